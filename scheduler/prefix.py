"""Prefixes that are kept for whoever comes with the same tokens: the entries, their index, LRU.

An *entry* is a boundary in the engine (see `engine.plan.StepPlan`), the pages of the tokens before
it, and those tokens. It is all of that or nothing: a model with recurrent layers can go on only
where its state was saved. Policy (which points to keep) is `scheduler.prefill`'s for prompts and
`SchedulerCore`'s for ends of rows.

Index: a hash per whole page, chained (SHA-256 of the hash before it and the page's token ids), so
one look-up per page finds the longest candidates; tokens are compared before an entry is used, so
equal hashes alone never give a request somebody else's prefix. A salt begins the chain: entries are
found only by requests of the same salt.

Eviction is LRU in three classes. Entries that nobody is promised go first; then ends that a session
pins (sessions are a cache with better manners, not a reservation); and, when no row runs or one
would have to be preempted, those that queued requests of a group wait for. An entry that the plan
being made restores or has a chunk save is never evicted by it.

Where tenants have shares (`scheduler.shares`), that is the order within an account, and accounts
come first:

- For a boundary, the account gives that holds most boundaries for its weight, the newcomer counted.
  When that is the newcomer's own, it replaces what it may (no pin, unless it is one), or is not
  kept. Promised: **an account at or below its share of the boundaries never loses one to another's
  newcomer**; nor does one above it, unless the newcomer's then holds less for its weight.
- For pages that a row needs, accounts give in the order of the pages that they hold for their
  weight, with those of their running rows. Rows go before whatever is kept, so this may reach
  everybody, but promised is: **an account at or below its share of the pages loses an entry only
  when those above theirs have none left to give.** A file's prefix is an operator's act: it takes
  pages as a row does, and a boundary like any newcomer.

Entries that nobody has used for `session_ttl_s` (give or take a little) and no session pins go
before all others, whoever left them: shares are for those who come back. An entry that sessions of
several accounts pin goes from each separately.

An eviction costs O(log n) comparisons, and a look at those it passes over: what somebody waits for
or uses, what frees no page because rows hold all of them too, and at most `MOST_SHARED` whose pages
others hold as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.plan import pages_needed
from scheduler.entry import Entry, Tokens, Yield
from scheduler.groups import Group
from scheduler.kv_events import KvEventLog, Removed, Stored, chain, live_chains
from scheduler.pages import IntegrityError, PagePool
from scheduler.shares import Account, Accounts
from scheduler.shelves import Line, Shelves

__all__ = ["Entry", "PrefixCache", "Yield", "page_hashes", "root"]

ROOT = b""
"""Chained hash of no page at all, of requests without a salt."""

MOST_SHARED: Final = 64
"""Entries of an account that free no page by themselves which an eviction looks past."""


def page_hashes(tokens: Tokens, page_size: int, known: Sequence[bytes] = (ROOT,)) -> list[bytes]:
    """[n]: chained hash of the first n whole pages of `tokens`, `known` being the first of them."""
    hashes = list(known)
    data, width = tokens.tobytes(), page_size * tokens.itemsize
    for end in range(len(hashes) * width, len(data) + 1, width):
        hashes.append(sha256(hashes[-1] + data[end - width : end]).digest())
    return hashes


def root(salt: str) -> list[bytes]:
    """The hash of no page at all, of requests with this salt: what their chains begin with."""
    return [sha256(salt.encode()).digest() if salt else ROOT]


class PrefixCache:
    """All entries of one engine. Knows pages and boundaries, not requests."""

    def __init__(
        self,
        *,
        boundaries: int,
        page_size: int,
        pool: PagePool,
        accounts: Accounts | None = None,
    ) -> None:
        self.total = boundaries
        """Boundaries the engine holds; 0 turns the cache off."""
        self.lookups = 0
        self.hits = 0
        self.cached_tokens = 0
        """Prompt tokens that rows did not prefill."""
        self.evictions: Counter[str] = Counter()
        self.on_evict: Callable[[Entry, str], None] = lambda entry, cause: None
        """Told of every eviction and its cause."""
        self.on_unpin: Callable[[Entry, Account, str], None] = lambda entry, account, cause: None
        """Told to end an account's pins of an entry that others pin as well, and why."""
        self.shelves = Shelves(accounts or Accounts(), boundaries=boundaries, pages=pool.total)
        """Who keeps what."""
        self.events = KvEventLog()
        """Blocks that came and went."""
        self._page_size = page_size
        self._pool = pool
        self._entries: dict[int, Entry] = {}
        """By boundary, least recently used first."""
        self._at: dict[bytes, dict[int, Entry]] = {}
        """By the hash of an entry's last whole page."""
        self._under: dict[bytes, dict[int, Entry]] = {}
        """By the hash of every whole page of an entry."""
        self._grouped: dict[int, Entry] = {}
        """By boundary: those that a group waits for, or has waited for."""
        self._busy: list[Entry] = []
        self._drops: list[int] = []
        self._next_boundary = 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Least recently used first."""
        return iter(self._entries.values())

    # --- look ------------------------------------------------------------------------------------

    def hashes(self, tokens: Tokens, known: Sequence[bytes]) -> list[bytes]:
        """As `page_hashes`; `known` begins with the `root` of some salt."""
        return page_hashes(tokens, self._page_size, known)

    def holds(self, boundary: int) -> bool:
        """It has not been evicted."""
        return boundary in self._entries

    def get(self, boundary: int) -> Entry | None:
        return self._entries.get(boundary)

    def match(self, prompt: Tokens, hashes: Sequence[bytes], *, mtp: bool) -> Entry | None:
        """The longest entry that is a proper prefix of `prompt`; the last token is always left to
        prefill. `mtp`: it must have MTP history."""
        if not self._entries:
            return None
        longest = len(prompt) - 1
        for pages in range(min(len(hashes) - 1, longest // self._page_size), -1, -1):
            best: Entry | None = None
            for entry in self._at.get(hashes[pages], {}).values():
                usable = entry.ready and entry.position <= longest and (entry.mtp or not mtp)
                better = usable and (best is None or entry.position > best.position)
                if better and _starts_with(prompt, entry.tokens):
                    best = entry
            if best is not None:
                return best
        return None

    def find(self, tokens: Tokens, hashes: Sequence[bytes], *, mtp: bool) -> Entry | None:
        """The entry of exactly these tokens."""
        for entry in self._at.get(hashes[len(tokens) // self._page_size], {}).values():
            if (entry.mtp or not mtp) and np.array_equal(entry.tokens, tokens):
                return entry
        return None

    def common(self, prompt: Tokens, hashes: Sequence[bytes]) -> int:
        """Tokens that `prompt` has in common with the entry it has most in common with."""
        if not self._entries:
            return 0
        candidates = {b: e for b, e in self._entries.items() if e.hashes[0] == hashes[0]}
        whole = 0
        for pages in range(len(hashes) - 1, 0, -1):
            if under := self._under.get(hashes[pages]):
                candidates, whole = under, pages * self._page_size
                break
        tail = self._page_size
        rest = prompt[whole : whole + tail]
        longest = 0
        for entry in candidates.values():
            other = entry.tokens[whole : whole + tail]
            size = min(len(rest), len(other))
            differ = np.flatnonzero(rest[:size] != other[:size])
            longest = max(longest, int(differ[0]) if len(differ) else size)
        return whole + longest

    def live_blocks(self) -> list[Stored]:
        """What a reader of `events` that starts over must know, as of `events.newest`."""
        entries = ((entry.hashes, entry.tokens) for entry in self._entries.values())
        return list(live_chains(entries, self._page_size))

    # --- keep ------------------------------------------------------------------------------------

    def add(
        self,
        *,
        tokens: Tokens,
        hashes: Sequence[bytes],
        pages: NDArray[np.int32],
        mtp: bool,
        row: int,
        ready: bool,
        tenant: str = "",
        group: Group | None = None,
    ) -> Entry:
        """A new entry under a new boundary. Only after `make_boundary`. `pages` is a page table
        that covers the tokens; `hashes` may be of more tokens than these. `tenant`: who leaves it;
        `group`: who waits for it."""
        entry = Entry(
            boundary=self._next_boundary,
            tokens=tokens,
            pages=pages[: pages_needed(len(tokens), self._page_size)],
            mtp=mtp,
            hashes=list(hashes[: len(tokens) // self._page_size + 1]),
            row=row,
            ready=ready,
            owner=self.shelves.accounts.keeper(tenant),
            tenant=self.shelves.accounts.of(tenant),
            group=group,
        )
        if len(self._entries) >= self.total:
            raise IntegrityError("more boundaries than the engine holds")
        self._next_boundary += 1
        self._pool.hold(entry.pages)
        self._entries[entry.boundary] = entry
        self.shelves.add(entry)
        if group is not None:
            self._grouped[entry.boundary] = entry
        self._at.setdefault(entry.hashes[-1], {})[entry.boundary] = entry
        known = sum(chained in self._under for chained in entry.hashes[1:])
        for chained in entry.hashes[1:]:
            self._under.setdefault(chained, {})[entry.boundary] = entry
        if known + 1 < len(entry.hashes):
            self.events.record(chain(entry.hashes, tokens, known, self._page_size))
        if not ready:
            self.use(entry)
        return entry

    def use(self, entry: Entry) -> None:
        """The plan being made needs it; it is the most recently used one."""
        self.touch(entry)
        if not entry.busy:
            entry.busy = True
            self._busy.append(entry)

    def started(self, cached: int) -> None:
        """Count a row that looked for a prefix and took `cached` tokens from it, 0 for none."""
        self.lookups += 1
        self.hits += cached > 0
        self.cached_tokens += cached

    def touch(self, entry: Entry) -> None:
        self._entries[entry.boundary] = self._entries.pop(entry.boundary)
        self.shelves.touch(entry)

    def pin(self, entry: Entry, session_id: str, tenant: str) -> None:
        """A session of the tenant's pins it."""
        self.shelves.pin(entry, session_id, self.shelves.accounts.keeper(tenant))

    def unpin(self, entry: Entry, session_id: str) -> None:
        """It does no longer, maybe because the entry is evicted."""
        if entry.held:
            self.shelves.unpin(entry, session_id)

    def planned(self) -> tuple[int, ...]:
        """The plan is made: boundaries to drop in it; what it used may be evicted from now on."""
        for entry in self._busy:
            entry.busy = False
        self._busy.clear()
        return self.take_drops()

    def take_drops(self) -> tuple[int, ...]:
        drops, self._drops = tuple(self._drops), []
        return drops

    # --- give up ---------------------------------------------------------------------------------

    def make_boundary(self, most: Yield, tenant: str = "") -> bool:
        """Have room for one more boundary, of this tenant's, evicting one if need be."""
        newcomer = self.shelves.accounts.keeper(tenant)
        while len(self._entries) >= self.total:
            found = self._for_boundary(newcomer, most)
            if found is None:
                return False
            self._give_up(*found, "boundaries")
        return True

    def _for_boundary(self, newcomer: Account, most: Yield) -> tuple[Account, Entry] | None:
        if (stale := self._stale()) is not None:
            return stale.owner, stale
        for account in self.shelves.givers(newcomer):
            for standing in (Yield.LOOSE, Yield.SESSIONS):
                if account is newcomer and standing > most:
                    break
                for _, entry in self.shelves.line(account, standing):
                    if not entry.busy and entry.standing == standing:
                        return account, entry
        if most >= Yield.AWAITED:
            for entry in self._awaited():
                if not entry.busy:
                    return entry.owner, entry
        return None

    def _stale(self) -> Entry | None:
        """The least recently used entry, if it is nobody's any more."""
        entry = next(iter(self._entries.values()), None)
        if entry is None or entry.busy or entry.standing is not Yield.LOOSE:
            return None
        return entry if self.shelves.stale(entry) else None

    def _awaited(self) -> list[Entry]:
        """Entries that somebody waits for, least recently used first."""
        for boundary, entry in list(self._grouped.items()):
            if entry.group is None or not entry.group.members:
                del self._grouped[boundary]
        waited = (e for e in self._grouped.values() if e.standing is Yield.AWAITED)
        return sorted(waited, key=lambda entry: entry.used)

    def _give_up(self, account: Account, entry: Entry, cause: str) -> None:
        """The account gives an entry: it is evicted, or loses its pins when others pin it too."""
        if set(entry.sessions.values()) - {account}:
            self.on_unpin(entry, account, cause)
        else:
            self.evict(entry, cause)

    def can_make_room(
        self, pages: int, *, spare: Entry | None = None, most: Yield, margin: int = 0
    ) -> bool:
        """Whether `pages` pages, and `margin` more that stay free or evictable, can be had by
        evicting entries other than `spare`."""
        short = pages + margin - self._pool.unused
        if short <= 0:
            return True
        return short <= self._pool.cached and short <= self.evictable(most, spare=spare)

    def make_room(
        self, pages: int, *, spare: Entry | None = None, most: Yield, margin: int = 0
    ) -> bool:
        """Have `pages` free pages, evicting entries if need be. Evicts nothing unless
        `can_make_room`."""
        if not self.can_make_room(pages, spare=spare, most=most, margin=margin):
            return False
        while not self._pool.can_allocate(pages):
            self._give_up(*self._for_pages(spare, most), "pages")
        return True

    def evictable(self, most: Yield, *, spare: Entry | None = None, busy: bool = False) -> int:
        """Pages that evicting all one may evict would free. `busy`: what the plan being made uses
        counts as well."""
        stay = [] if most >= Yield.AWAITED else self._awaited()
        stay += [] if most >= Yield.SESSIONS else self.shelves.pinned()
        stay += [] if spare is None else [spare]
        stay += [] if busy else [entry for entry in self._busy if entry.held]
        idle = [self._pool.idle(entry.pages) for entry in stay]
        return self._pool.cached - (len(np.unique(np.concatenate(idle))) if idle else 0)

    def _for_pages(self, spare: Entry | None, most: Yield) -> tuple[Account, Entry]:
        """Whom to evict next for pages: by account, then by class, then one that frees some before
        one that shares all it would free with another, then the least recently used."""
        stale = self._stale()
        if stale is not None and stale is not spare and len(self._pool.idle(stale.pages)):
            return stale.owner, stale
        for account in self.shelves.by_pages():
            for standing in (Yield.LOOSE, Yield.SESSIONS)[: most + 1]:
                line = self.shelves.line(account, standing)
                if (entry := self._frees(line, standing, spare)) is not None:
                    return account, entry
        if most >= Yield.AWAITED:
            line = [(entry.used, entry) for entry in self._awaited()]
            if (entry := self._frees(line, Yield.AWAITED, spare)) is not None:
                return entry.owner, entry
        raise IntegrityError("pages to evict were promised and there are none")

    def _frees(self, line: Line, standing: Yield, spare: Entry | None) -> Entry | None:
        fallback: Entry | None = None
        passed = 0
        for _, entry in line:
            if entry is spare or entry.busy or entry.standing != standing:
                continue
            if self._pool.sole(entry.pages):
                return entry
            if passed == MOST_SHARED:
                break
            if len(self._pool.idle(entry.pages)):
                fallback, passed = fallback or entry, passed + 1
        return fallback

    def evict(self, entry: Entry, cause: str) -> None:
        """Forget an entry; its boundary is dropped with the next plan."""
        del self._entries[entry.boundary]
        self._grouped.pop(entry.boundary, None)
        self.shelves.remove(entry)
        entry.held = False
        _unlist(self._at, entry.hashes[-1], entry)
        for chained in entry.hashes[1:]:
            _unlist(self._under, chained, entry)
        gone = tuple(c for c in reversed(entry.hashes[1:]) if c not in self._under)
        if gone:
            self.events.record(Removed(hashes=gone))
        self._pool.drop(entry.pages)
        self._drops.append(entry.boundary)
        self.evictions[cause] += 1
        self.on_evict(entry, cause)

    def distrust(self, row: int, origin: int) -> None:
        """A row's numbers went bad: evict what it left, and the boundary it started from."""
        for entry in [e for e in self._entries.values() if e.row == row or e.boundary == origin]:
            self.evict(entry, "fault")

    def clear(self, cause: str) -> None:
        """Evict everything."""
        for entry in list(self._entries.values()):
            self.evict(entry, cause)

    # --- look in ---------------------------------------------------------------------------------

    def integrity(self, *, idle: bool) -> None:
        """The index is that of the entries, and each entry is what it says. Raises
        IntegrityError."""
        _check(len(self._entries) <= self.total, "more boundaries than the engine holds")
        at: dict[bytes, dict[int, Entry]] = {}
        under: dict[bytes, dict[int, Entry]] = {}
        for boundary, entry in self._entries.items():
            name = f"entry {boundary}"
            _check(entry.boundary == boundary and entry.held, f"{name} is filed under another id")
            _check(entry.position > 0, f"{name} is empty")
            needed = pages_needed(entry.position, self._page_size)
            _check(len(entry.pages) == needed, f"{name}: its pages are not those of its tokens")
            whole = entry.position // self._page_size
            _check(len(entry.hashes) == whole + 1, f"{name}: its hashes are not of its tokens")
            at.setdefault(entry.hashes[-1], {})[boundary] = entry
            for chained in entry.hashes[1:]:
                under.setdefault(chained, {})[boundary] = entry
            _check(entry.ready or not idle, f"{name} is still being saved")
            _check(not entry.busy, f"{name} is in use by no plan")
        _check(at == self._at and under == self._under, "the prefix index is not of the entries")
        self.shelves.integrity(self._entries.values())
        _check(
            [e.used for e in self._entries.values()]
            == sorted(e.used for e in self._entries.values()),
            "entries are not in the order of their use",
        )
        awaited = {b for b, e in self._entries.items() if e.standing is Yield.AWAITED}
        _check(awaited <= set(self._grouped) <= set(self._entries), "who is awaited is off")
        _check(not set(self._drops) & set(self._entries), "an entry's boundary is to be dropped")


def _starts_with(tokens: Tokens, prefix: Tokens) -> bool:
    return np.array_equal(tokens[: len(prefix)], prefix)


def _unlist(index: dict[bytes, dict[int, Entry]], key: bytes, entry: Entry) -> None:
    under = index.get(key, {})
    under.pop(entry.boundary, None)  # gone already where two of its hashes are equal
    if not under:
        index.pop(key, None)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
