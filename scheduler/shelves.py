"""Kept prefixes by account, least recently used first, and the pages that each account holds.

An entry stands on the shelf of whoever left it, or, while sessions pin it, on those of all whose
sessions do. Pages of an account are those that its entries or its rows hold, each counted once:
whoever fills the pool with running rows is above its share with little kept. They are counted only
where tenants have shares; without, there is one account.

Every change costs O(log n) comparisons, and a pass over an entry's pages where they are counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduler.entry import Entry, Yield
from scheduler.pages import IntegrityError
from scheduler.shares import Account, Accounts, Ranking

Line = list[tuple[int, Entry]]
"""(number of its last use, entry), least recently used first. Numbers are unique."""

Pages = NDArray[np.int32]

TICKS: Final = 64
"""Times in a TTL at which the number of uses is noted."""


class Shelves:
    """Who keeps what."""

    def __init__(self, accounts: Accounts, *, boundaries: int, pages: int) -> None:
        self.accounts = accounts
        self.by_tenant: Counter[str] = Counter()
        """Entries, by the tenant that left them; all others are one."""
        self._boundaries = boundaries
        self._pages = pages
        self._lines: defaultdict[tuple[Account, Yield], Line] = defaultdict(list)
        self._kept = Ranking()
        self._filled = Ranking()
        self._counts: dict[Account, Pages] = {}
        """[page]: entries and rows of the account that hold it; of accounts that hold any."""
        self._uses = 0
        self._clock: deque[tuple[float, int]] = deque()
        """(when, uses until then) now and then, back to a TTL ago."""
        self._stale = 0

    # --- entries ---------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """A new one, used now."""
        self._uses += 1
        entry.used = self._uses
        self.by_tenant[entry.tenant.name] += 1
        self._put(entry)

    def remove(self, entry: Entry) -> None:
        self.by_tenant[entry.tenant.name] -= 1
        self._take(entry)

    def touch(self, entry: Entry) -> None:
        """It is the most recently used one."""
        lines = [self._lines[key] for key in _places(entry)]
        for line in lines:
            _delete(line, entry)
        self._uses += 1
        entry.used = self._uses
        for line in lines:
            line.append((entry.used, entry))

    def pin(self, entry: Entry, session_id: str, account: Account) -> None:
        self._take(entry)
        entry.sessions[session_id] = account
        self._put(entry)

    def unpin(self, entry: Entry, session_id: str) -> None:
        self._take(entry)
        del entry.sessions[session_id]
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        for key in _places(entry):
            insort(self._lines[key], (entry.used, entry))
            self._kept.add(key[0], 1)
            self.hold(key[0], entry.pages)

    def _take(self, entry: Entry) -> None:
        for key in _places(entry):
            _delete(self._lines[key], entry)
            self._kept.add(key[0], -1)
            self.drop(key[0], entry.pages)

    def line(self, account: Account, standing: Yield) -> Line:
        """The entries of an account that sessions pin, or that none does, least recently used
        first. Those that somebody waits for are among them."""
        return self._lines[account, standing]

    def pinned(self) -> Iterator[Entry]:
        """All entries that sessions pin, some maybe twice."""
        for (_, standing), line in self._lines.items():
            if standing is Yield.SESSIONS:
                yield from (entry for _, entry in line)

    # --- pages -----------------------------------------------------------------------------------

    def hold(self, account: Account, pages: Pages) -> None:
        """A row or an entry of the account's holds these pages, each once."""
        if not self.accounts.fair or not len(pages):
            return
        counts = self._counts.get(account)
        if counts is None:
            counts = self._counts[account] = np.zeros(self._pages + 1, np.int32)
        self._filled.add(account, int(np.count_nonzero(counts[pages] == 0)))
        counts[pages] += 1

    def drop(self, account: Account, pages: Pages) -> None:
        """It does no longer."""
        if not self.accounts.fair or not len(pages):
            return
        counts = self._counts[account]
        counts[pages] -= 1
        self._filled.add(account, -int(np.count_nonzero(counts[pages] == 0)))
        if not self._filled[account]:
            del self._counts[account]

    # --- time ------------------------------------------------------------------------------------

    def expire(self, now: float, ttl_s: float) -> None:
        """What was not used for `ttl_s` seconds, give or take a `TICKS`th, has no protection."""
        if not self._clock or now >= self._clock[-1][0] + ttl_s / TICKS:
            self._clock.append((now, self._uses))
        while self._clock[0][0] <= now - ttl_s:
            self._stale = self._clock.popleft()[1]

    def stale(self, entry: Entry) -> bool:
        """Nobody has used it for so long that it counts as nobody's."""
        return self.accounts.fair and entry.used <= self._stale

    # --- shares ----------------------------------------------------------------------------------

    def givers(self, newcomer: Account) -> Iterator[Account]:
        """Whose entries may go for one more of the newcomer's, who should give first."""
        return self._kept.givers(newcomer, self._boundaries)

    def by_pages(self) -> Iterator[Account]:
        """Accounts, those that hold most pages for their weight first."""
        if not self.accounts.fair:
            return iter([self.accounts.keeper("")])
        return self._filled.most_first()

    def above(self, tenant: str) -> bool:
        """Whether a tenant holds more pages than its share. Not where nobody has one."""
        return self._filled.above(self.accounts.keeper(tenant), self._pages)

    # --- looking in ------------------------------------------------------------------------------

    def integrity(self, entries: Iterable[Entry]) -> None:
        """Entries stand where they should, in order of use. Raises IntegrityError."""
        lines: defaultdict[tuple[Account, Yield], Line] = defaultdict(list)
        kept: Counter[Account] = Counter()
        tenants: Counter[str] = Counter()
        for entry in entries:
            tenants[entry.tenant.name] += 1
            for key in _places(entry):
                lines[key].append((entry.used, entry))
                kept[key[0]] += 1
        for line in lines.values():
            line.sort()
        if lines != {key: line for key, line in self._lines.items() if line}:
            raise IntegrityError("kept prefixes are not on the shelves of their accounts")
        if tenants != +self.by_tenant:
            raise IntegrityError("kept prefixes of tenants are miscounted")
        self._kept.integrity(kept, "kept prefixes")

    def check_pages(self, entries: Iterable[Entry], rows: Iterable[tuple[str, list[int]]]) -> None:
        """Pages of accounts are those of their entries and of these rows, (tenant, pages) each.
        Raises IntegrityError."""
        if not self.accounts.fair:
            return
        counts: dict[Account, Pages] = {}
        holders = [(account, e.pages) for e in entries for account in e.holders]
        holders += [(self.accounts.of(name), np.array(owned, int)) for name, owned in rows if owned]
        for account, pages in holders:
            counts.setdefault(account, np.zeros(self._pages + 1, np.int32))[pages] += 1
        same = counts.keys() == self._counts.keys()
        if not same or any((counts[a] != self._counts[a]).any() for a in counts):
            raise IntegrityError("pages of tenants are miscounted")
        self._filled.integrity({a: int(np.count_nonzero(c)) for a, c in counts.items()}, "pages")


def _places(entry: Entry) -> list[tuple[Account, Yield]]:
    standing = Yield.SESSIONS if entry.sessions else Yield.LOOSE
    return [(account, standing) for account in entry.holders]


def _delete(line: Line, entry: Entry) -> None:
    index = bisect_left(line, entry.used, key=lambda place: place[0])
    if line[index][1] is not entry:
        raise IntegrityError(f"entry {entry.boundary} is not where it should stand")
    del line[index]
