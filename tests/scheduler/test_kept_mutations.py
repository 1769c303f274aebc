"""Faults planted in the shares of what tenants keep, each with the test that sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from scheduler.entry import Entry
from scheduler.pages import IntegrityError
from scheduler.preemption import Preemption, seniority
from scheduler.prefix import PrefixCache
from scheduler.sequence import Sequence
from scheduler.sessions import Sessions
from scheduler.shares import Account, Accounts, Ranking
from scheduler.shelves import Shelves
from tests.scheduler import test_kept_shares as kept
from tests.scheduler import test_preemption_shares

Patch = Callable[[pytest.MonkeyPatch], None]


def one_lru_for_all(patch: pytest.MonkeyPatch) -> None:
    def keeper(self: Accounts, tenant: str) -> Account:
        return self.of("")

    patch.setattr(Accounts, "keeper", keeper)


def weights_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def above(self: Ranking, account: Account, total: int, newcomer: Any = None) -> bool:
        return self[account] * len(self._held) > total

    patch.setattr(Ranking, "above", above)


def the_newcomer_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    def givers(self: Ranking, newcomer: Account, total: int) -> Iterator[Account]:
        for account in self.most_first():
            if account is not newcomer:
                yield account
        yield newcomer

    patch.setattr(Ranking, "givers", givers)


def those_at_their_share_give_too(patch: pytest.MonkeyPatch) -> None:
    def givers(self: Ranking, newcomer: Account, total: int) -> Iterator[Account]:
        yield from self.most_first()
        yield newcomer

    patch.setattr(Ranking, "givers", givers)


def equals_never_give(patch: pytest.MonkeyPatch) -> None:
    def givers(self: Ranking, newcomer: Account, total: int) -> Iterator[Account]:
        mine = (self[newcomer] + 1) / newcomer.policy.weight
        for ratio, _, account in reversed(self._order):
            if ratio > mine and account is not newcomer:
                yield account
        yield newcomer

    patch.setattr(Ranking, "givers", givers)


def every_name_has_an_account(patch: pytest.MonkeyPatch) -> None:
    def of(self: Accounts, tenant: str) -> Account:
        if tenant not in self._named:
            self._named[tenant] = Account(name=tenant, policy=self._other.policy)
        return self._named[tenant]

    patch.setattr(Accounts, "of", of)


def pages_of_rows_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """Nor do those of entries: whoever keeps most boundaries gives."""
    patch.setattr(Shelves, "by_pages", lambda self: self._kept.most_first())


def a_shared_pin_goes_whole(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: PrefixCache, account: Account, entry: Entry, cause: str) -> None:
        self.evict(entry, cause)

    patch.setattr(PrefixCache, "_give_up", give_up)


def nothing_gets_stale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shelves, "stale", lambda self, entry: False)


def a_tenants_limit_of_sessions_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    make_room = Sessions._make_room

    def unlimited(self: Sessions, newcomer: Account) -> bool:
        policy = newcomer.policy
        object.__setattr__(policy, "max_sessions", None)
        return make_room(self, newcomer)

    patch.setattr(Sessions, "_make_room", unlimited)


def the_oldest_session_of_all_goes(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: Sessions, newcomer: Account) -> bool:
        if len(self._sessions) < self._limit:
            return True
        return self.release(next(iter(self._sessions)))

    patch.setattr(Sessions, "_make_room", make_room)


def a_freed_row_keeps_its_pages_on_the_account(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shelves, "drop", lambda self, account, pages: None)


def a_touch_moves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shelves, "touch", lambda self, entry: None)


def every_entry_is_weighed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.prefix.MOST_SHARED", 10**9)


def all_entries_are_looked_at(patch: pytest.MonkeyPatch) -> None:
    make_boundary = PrefixCache.make_boundary

    def slow(self: PrefixCache, *args: Any) -> bool:
        sorted(self, key=lambda entry: entry.standing)
        return make_boundary(self, *args)

    patch.setattr(PrefixCache, "make_boundary", slow)


def shares_do_not_say_who_leaves(patch: pytest.MonkeyPatch) -> None:
    def rank(self: Preemption, sequence: Sequence) -> tuple[int, bool, bool, int]:
        level, paused, order = seniority(sequence)
        return level, paused, False, order

    patch.setattr(Preemption, "_rank", rank)


def shares_push_a_row_out_for_ever(patch: pytest.MonkeyPatch) -> None:
    def rank(self: Preemption, sequence: Sequence) -> tuple[int, bool, bool, int]:
        level, paused, order = seniority(sequence)
        return level, paused, self._cache.shelves.above(sequence.request.tenant), order

    patch.setattr(Preemption, "_rank", rank)


def promises(seed: int) -> Callable[[], object]:
    test: Any = kept.test_promises_hold_whatever_happens
    return partial(test.hypothesis.inner_test, seed, [0.3, 1.0, 7.0], 9, True)


def few(policies: Any) -> Callable[[], object]:
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            kept.test_an_eviction_looks_at_few(policies, patch)

    return check


def past_few() -> None:
    with pytest.MonkeyPatch.context() as patch:
        kept.test_an_eviction_looks_past_few_that_share_their_pages(patch)


PLANTED: list[tuple[Patch, Callable[[], object]]] = [
    (one_lru_for_all, kept.test_a_flood_leaves_others_their_share),
    (one_lru_for_all, promises(10)),
    (weights_do_not_count, promises(10)),
    (the_newcomer_is_not_counted, kept.test_a_flood_leaves_others_their_share),
    (the_newcomer_is_not_counted, promises(10)),
    (those_at_their_share_give_too, promises(10)),
    (equals_never_give, kept.test_where_there_is_less_than_one_for_each_they_take_turns),
    (every_name_has_an_account, kept.test_tenants_without_a_policy_are_one),
    (every_name_has_an_account, kept.test_accounts_are_as_many_as_policies_and_one),
    (pages_of_rows_do_not_count, kept.test_pages_come_from_who_holds_most_for_its_weight),
    (pages_of_rows_do_not_count, promises(10)),
    (a_shared_pin_goes_whole, kept.test_an_entry_that_two_tenants_pin_goes_from_each_separately),
    (nothing_gets_stale, kept.test_what_nobody_has_used_for_long_is_nobodys),
    (
        a_tenants_limit_of_sessions_is_not_kept,
        kept.test_sessions_of_a_tenant_are_bounded_by_its_own_limit,
    ),
    (the_oldest_session_of_all_goes, promises(10)),
    (a_freed_row_keeps_its_pages_on_the_account, promises(10)),
    (a_touch_moves_nothing, promises(10)),
    (every_entry_is_weighed, past_few),
    (all_entries_are_looked_at, few({})),
    (
        shares_do_not_say_who_leaves,
        test_preemption_shares.test_no_row_leaves_for_a_tenant_above_its_share,
    ),
    (
        shares_push_a_row_out_for_ever,
        test_preemption_shares.test_a_row_is_pushed_out_for_its_tenants_share_a_few_times_only,
    ),
]


@pytest.mark.parametrize(
    ("patch", "check"),
    PLANTED,
    ids=[f"{patch.__name__}-{number}" for number, (patch, _) in enumerate(PLANTED)],
)
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        check()
