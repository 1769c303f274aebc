"""What tenants are promised of kept prefixes, checked at every eviction; counts for itself."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from scheduler.prefix import Entry, PrefixCache, Yield
from scheduler.sessions import Sessions
from scheduler.shares import Account


class Ledger:
    """Who holds how much of something, counted anew, in exact numbers."""

    def __init__(self, held: Counter[Account], total: int, *others: Account) -> None:
        self.held = held
        self.total = total
        self.weights = sum(Fraction(a.policy.weight) for a in {*(+held), *others})

    def above(self, account: Account) -> bool:
        share = self.total * Fraction(account.policy.weight) / self.weights
        return self.held[account] > share


def entries_of(cache: PrefixCache) -> Counter[Account]:
    return Counter(account for entry in cache for account in entry.holders)


def pages_of(cache: PrefixCache) -> Counter[Account]:
    """With those of rows, as `integrity` has them counted."""
    counts = cache.shelves._counts
    return Counter({account: int((pages > 0).sum()) for account, pages in counts.items()})


def watch(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Have every cache checked for what is promised; counts what there was to check."""
    seen: Counter[str] = Counter()
    make_boundary, give_up, make_room = (
        PrefixCache.make_boundary,
        PrefixCache._give_up,
        Sessions._make_room,
    )

    def checked_boundary(self: PrefixCache, most: Yield, tenant: str = "") -> bool:
        if not self.shelves.accounts.fair:
            return make_boundary(self, most, tenant)
        newcomer = self.shelves.accounts.keeper(tenant)
        ledger = Ledger(entries_of(self), self.total, newcomer)
        before = {entry: entry.holders for entry in self}
        stale = {entry for entry in self if self.shelves.stale(entry)}
        made = make_boundary(self, most, tenant)
        after = {entry: entry.holders for entry in self}
        for entry, holders in before.items():
            for account in holders - after.get(entry, set()) if entry not in stale else ():
                seen["lost"] += 1
                assert account is newcomer or ledger.above(account), (
                    "a newcomer took what it may not"
                )
                assert len(before) == self.total, "something went for nothing"
        spare = any(ledger.above(a) for e in after if not e.busy for a in e.holders - {newcomer})
        mine = ledger.held[newcomer] + 1
        rightful = mine * ledger.weights <= ledger.total * Fraction(newcomer.policy.weight)
        awaited = any(e.standing is Yield.AWAITED for e in after)
        assert made or awaited or not (rightful and spare), "a newcomer did not get its share"
        return made

    def checked_give_up(self: PrefixCache, account: Account, entry: Entry, cause: str) -> None:
        if cause == "pages" and self.shelves.accounts.fair and not self.shelves.stale(entry):
            ledger = Ledger(pages_of(self), self._pool.total)
            seen["pages"] += 1
            if not ledger.above(account) and entry.standing is not Yield.AWAITED:
                seen["rightful pages"] += 1
                for other in self:
                    can = not other.busy and other.standing is not Yield.AWAITED
                    can = can and other is not spare_of(self)
                    can = can and len(self._pool.idle(other.pages)) > 0
                    assert not (can and any(map(ledger.above, other.holders))), "not its turn"
        give_up(self, account, entry, cause)

    def checked_session(self: Sessions, newcomer: Account) -> bool:
        before = {name: session.account for name, session in self._sessions.items()}
        made = make_room(self, newcomer)
        if self._accounts.fair:
            ledger = Ledger(Counter(before.values()), self._limit, newcomer)
            for name in before.keys() - self._sessions.keys():
                seen["sessions"] += 1
                assert before[name] is newcomer or ledger.above(before[name])
        return made

    patch.setattr(PrefixCache, "make_boundary", checked_boundary)
    patch.setattr(PrefixCache, "_give_up", checked_give_up)
    patch.setattr(Sessions, "_make_room", checked_session)
    for name in ("make_room", "_for_pages"):
        remember_spare(patch, name)
    return seen


SPARE: list[Entry | None] = [None]


def spare_of(cache: PrefixCache) -> Entry | None:
    """The entry that the eviction in progress is not to touch."""
    return SPARE[0]


def remember_spare(patch: pytest.MonkeyPatch, name: str) -> None:
    well = getattr(PrefixCache, name)

    def call(self: PrefixCache, *args: Any, **others: Any) -> Any:
        SPARE[0] = others.get("spare", args[0] if name == "_for_pages" else None)
        return well(self, *args, **others)

    patch.setattr(PrefixCache, name, call)
