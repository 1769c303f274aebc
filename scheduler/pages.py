"""KV pages: who holds which.

Pages are counted by reference. A *row* holds the pages of its table, a prefix *entry* those of its
tokens; a page is free when nobody holds it. Two rows hold the same page only below the boundary
from which one of them started, where neither writes.

Nothing is promised: a row takes pages as it grows. What happens when there are none is
`scheduler.preemption`'s business. Pages that entries alone hold (*cached*) count as used;
`PrefixCache` gives them up when a row needs them.

Page ids are 1 … pages. `NULL_PAGE` (0) pads tables and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan import NULL_PAGE


class IntegrityError(Exception):
    """The scheduler's books do not balance: a bug, and the state is not to be trusted."""


class PagePool:
    """Pages of one engine. Owners are row ids; what entries hold is only counted."""

    def __init__(self, *, pages: int) -> None:
        self.total = pages
        self.peak = 0
        """Most pages ever in use at once."""
        self._free = list(range(pages, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._rows: NDArray[np.int32] = np.zeros(pages + 1, dtype=np.int32)
        """[page]: rows that hold it."""
        self._entries: NDArray[np.int32] = np.zeros(pages + 1, dtype=np.int32)
        """[page]: prefix entries that hold it."""
        self._with_rows = 0
        """Pages that some row holds."""

    @property
    def used(self) -> int:
        """Distinct pages that a row or an entry holds."""
        return self.total - len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only entries hold."""
        return self.used - self._with_rows

    @property
    def unused(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def open(self, owner: int, shared: Sequence[int] = ()) -> None:
        """A new owner, whose first pages are `shared`, held by an entry."""
        if owner in self._owned:
            raise IntegrityError(f"row {owner} owns pages already")
        self._owned[owner] = list(shared)
        if shared:
            pages = np.asarray(shared)
            self._with_rows += int(np.count_nonzero(self._rows[pages] == 0))
            self._rows[pages] += 1

    def can_allocate(self, count: int) -> bool:
        return 0 <= count <= len(self._free)

    def allocate(self, owner: int, count: int) -> list[int]:
        """Give `count` free pages to `owner`. Only after `can_allocate`."""
        if not self.can_allocate(count) or owner not in self._owned:
            raise IntegrityError(f"row {owner} asks for {count} pages; {len(self._free)} are free")
        pages = self._take(count)
        for page in pages:
            self._rows[page] = 1
        self._with_rows += count
        self._owned[owner] += pages
        return pages

    def free(self, owner: int) -> None:
        """`owner` holds its pages no longer; those that nobody else holds are free."""
        pages = np.asarray(self._owned.pop(owner)[::-1], dtype=np.int32)
        self._rows[pages] -= 1
        left = pages[self._rows[pages] == 0]
        self._with_rows -= len(left)
        self._free += left[self._entries[left] == 0].tolist()

    def hold(self, pages: NDArray[np.int32]) -> None:
        """A new entry holds `pages`, all in use."""
        self._entries[pages] += 1

    def drop(self, pages: NDArray[np.int32]) -> None:
        """An entry is gone; pages that nobody else holds are free."""
        if (self._entries[pages] < 1).any():
            raise IntegrityError("a page is dropped that no entry holds")
        self._entries[pages] -= 1
        self._free += pages[(self._entries[pages] == 0) & (self._rows[pages] == 0)].tolist()

    def take(self, count: int) -> NDArray[np.int32]:
        """Free pages for an entry that comes from no row and is about to `hold` them. Only after
        `can_allocate`."""
        if not self.can_allocate(count):
            raise IntegrityError(f"cannot take {count} pages")
        return np.asarray(self._take(count), dtype=np.int32)

    def idle(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of an entry's pages that no row holds."""
        loose: NDArray[np.int32] = pages[self._rows[pages] == 0]
        return loose

    def sole(self, pages: NDArray[np.int32]) -> int:
        """How many of an entry's pages dropping it would free."""
        return int(np.count_nonzero((self._rows[pages] == 0) & (self._entries[pages] == 1)))

    def only_of(self, owners: Iterable[int]) -> int:
        """Pages that no row but these holds: without them they are free, or cached."""
        held = np.zeros_like(self._rows)
        for owner in owners:
            held[self._owned[owner]] += 1
        return int(np.count_nonzero((held > 0) & (held == self._rows)))

    def _take(self, count: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        self.peak = max(self.peak, self.used)
        return pages

    def owned(self, owner: int) -> list[int]:
        """Pages assigned to `owner`, in the order of its positions."""
        return list(self._owned.get(owner, ()))

    def integrity(self, owners: Iterable[int], entries: Iterable[NDArray[np.int32]] = ()) -> None:
        """Every page is free, or held by exactly as many of `owners` and `entries` (the pages of
        each) as is counted. Raises IntegrityError.
        """
        _check(set(self._owned) == set(owners), "page owners are not the rows")
        rows, cached = np.zeros_like(self._rows), np.zeros_like(self._entries)
        for owned in self._owned.values():
            _check(len(set(owned)) == len(owned), "a row holds a page twice")
            rows[owned] += 1
        for pages in entries:
            cached[pages] += 1
        _check(np.array_equal(rows, self._rows), "pages that rows hold are miscounted")
        _check(np.array_equal(cached, self._entries), "pages that entries hold are miscounted")
        held = np.flatnonzero(rows + cached).tolist()
        every = list(range(1, self.total + 1))
        _check(sorted(held + self._free) == every, "a page is lost or held twice")
        _check(self._with_rows == np.count_nonzero(rows), "pages with rows are miscounted")


class PageTables:
    """Page tables of all running rows in one array, so that a batch is one gather.

    A row has a *slot* while it holds device state; its table is padded with `NULL_PAGE`.
    """

    def __init__(self, *, slots: int, width: int) -> None:
        self._tables: NDArray[np.int32] = np.full((slots, width), NULL_PAGE, dtype=np.int32)
        self._lengths = [0] * slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        """A slot with an empty table. Only while `free_slots`."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._tables[slot, : self._lengths[slot]] = NULL_PAGE
        self._lengths[slot] = 0
        self._free.append(slot)

    def extend(self, slot: int, pages: list[int]) -> None:
        length = self._lengths[slot]
        self._tables[slot, length : length + len(pages)] = pages
        self._lengths[slot] = length + len(pages)

    def length(self, slot: int) -> int:
        """Pages in the table of `slot`."""
        return self._lengths[slot]

    def table(self, slot: int) -> NDArray[np.int32]:
        """int32 [pages], a copy."""
        return self._tables[slot, : self._lengths[slot]].copy()

    def pages(self, slot: int) -> list[int]:
        """Page ids in the table of `slot`."""
        pages: list[int] = self._tables[slot, : self._lengths[slot]].tolist()
        return pages

    def gather(self, slots: list[int]) -> NDArray[np.int32]:
        """int32 [len(slots), P], a copy; P is the longest table among them."""
        width = max(self._lengths[slot] for slot in slots)
        return self._tables[slots, :width]

    def integrity(self, slots: Iterable[int]) -> None:
        """Every slot is free or one of `slots`, and nothing lies beyond a table's length."""
        _check(
            sorted([*self._free, *slots]) == list(range(len(self._lengths))),
            "a slot is lost or held twice",
        )
        used = np.count_nonzero(self._tables, axis=1)
        _check(used.tolist() == self._lengths, "a page table has a hole or a tail")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
