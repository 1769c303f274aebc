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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from engine.plan import pages_needed
from scheduler.groups import Group
from scheduler.kv_events import KvEventLog, Removed, Stored, chain, live_chains
from scheduler.pages import IntegrityError, PagePool

ROOT = b""
"""Chained hash of no page at all, of requests without a salt."""

Tokens = NDArray[np.int32]


class Yield(IntEnum):
    """How far an eviction may go: entries of this class and the ones below."""

    LOOSE = 0
    SESSIONS = 1
    AWAITED = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One saved point: position, tokens, pages."""

    boundary: int
    tokens: Tokens
    """The tokens before the boundary; its position is their number."""
    pages: NDArray[np.int32]
    """Pages of these tokens, the last of them maybe filled in part."""
    mtp: bool
    """Whether MTP history is in it; without, only rows that never draft may use it."""
    hashes: list[bytes]
    """[n]: chained hash of the first n whole pages."""
    row: int
    """The row that left it; -1 for one that came from a file."""
    ready: bool
    """The step that saves it has come back. Only then may anybody start from it."""
    held: bool = True
    """False once it is evicted."""
    busy: bool = False
    """The plan being made uses it."""
    group: Group | None = None
    """Its queued members wait for this entry."""
    sessions: set[str] = field(default_factory=set)
    """Sessions that pin it."""

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def standing(self) -> Yield:
        if self.group is not None and self.group.queued:
            return Yield.AWAITED
        return Yield.SESSIONS if self.sessions else Yield.LOOSE


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

    def __init__(self, *, boundaries: int, page_size: int, pool: PagePool) -> None:
        self.total = boundaries
        """Boundaries the engine holds; 0 turns the cache off."""
        self.lookups = 0
        self.hits = 0
        self.cached_tokens = 0
        """Prompt tokens that rows did not prefill."""
        self.evictions: Counter[str] = Counter()
        self.on_evict: Callable[[Entry, str], None] = lambda entry, cause: None
        """Told of every eviction and its cause."""
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
    ) -> Entry:
        """A new entry under a new boundary. Only after `make_boundary`. `pages` is a page table
        that covers the tokens; `hashes` may be of more tokens than these."""
        entry = Entry(
            boundary=self._next_boundary,
            tokens=tokens,
            pages=pages[: pages_needed(len(tokens), self._page_size)],
            mtp=mtp,
            hashes=list(hashes[: len(tokens) // self._page_size + 1]),
            row=row,
            ready=ready,
        )
        if len(self._entries) >= self.total:
            raise IntegrityError("more boundaries than the engine holds")
        self._next_boundary += 1
        self._pool.hold(entry.pages)
        self._entries[entry.boundary] = entry
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

    def make_boundary(self, most: Yield) -> bool:
        """Have room for one more boundary, evicting one if need be."""
        if len(self._entries) < self.total:
            return True
        for standing in Yield:
            if standing > most:
                break
            for entry in self._entries.values():
                if entry.standing == standing and not entry.busy:
                    self.evict(entry, "boundaries")
                    return True
        return False

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
            self.evict(self._victim(spare, most), "pages")
        return True

    def evictable(self, most: Yield, *, spare: Entry | None = None, busy: bool = False) -> int:
        """Pages that evicting all one may evict would free. `busy`: what the plan being made uses
        counts as well."""
        stay = [
            self._pool.idle(entry.pages)
            for entry in self._entries.values()
            if entry is spare or (entry.busy and not busy) or entry.standing > most
        ]
        return self._pool.cached - (len(np.unique(np.concatenate(stay))) if stay else 0)

    def _victim(self, spare: Entry | None, most: Yield) -> Entry:
        """Whom to evict next for pages: by class, then one that frees some before one that shares
        all it would free with another, then the least recently used."""
        for standing in Yield:
            if standing > most:
                break
            fallback: Entry | None = None
            for entry in self._entries.values():
                if entry is spare or entry.busy or entry.standing != standing:
                    continue
                if self._pool.sole(entry.pages):
                    return entry
                if fallback is None and len(self._pool.idle(entry.pages)):
                    fallback = entry
            if fallback is not None:
                return fallback
        raise IntegrityError("pages to evict were promised and there are none")

    def evict(self, entry: Entry, cause: str) -> None:
        """Forget an entry; its boundary is dropped with the next plan."""
        del self._entries[entry.boundary]
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
