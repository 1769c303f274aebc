"""KV pages: who holds which, and who has been promised how many.

Admission policy for now: a row starts only when pages for its whole worst case (prompt plus
max_tokens, never more than the context) can be *reserved*. So a running row never waits for memory
and nothing has to be preempted. Pages are physically assigned as the row grows, out of its
reservation; what it did not need goes back when it is freed. Optimistic allocation with preemption
replaces `reserve` later; the owners below stay.

Page ids are 1 … pages. `NULL_PAGE` (0) pads tables and is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.plan import NULL_PAGE


class IntegrityError(Exception):
    """The scheduler's books do not balance: a bug, and the state is not to be trusted."""


class PagePool:
    """Pages of one engine. Owners are row ids."""

    def __init__(self, *, pages: int) -> None:
        self.total = pages
        self.peak = 0
        """Most pages ever in use at once."""
        self._free = list(range(pages, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        """Per owner: pages reserved and not yet assigned."""
        self._promised_sum = 0

    @property
    def used(self) -> int:
        """Pages assigned to rows."""
        return self.total - len(self._free)

    @property
    def reserved(self) -> int:
        """Pages assigned or promised: what admission counts."""
        return self.used + self._promised_sum

    def can_reserve(self, count: int) -> bool:
        return self.reserved + count <= self.total

    def reserve(self, owner: int, count: int) -> None:
        """Promise `count` pages to a new owner. Only after `can_reserve`."""
        if owner in self._owned or not self.can_reserve(count):
            raise IntegrityError(f"cannot reserve {count} pages for row {owner}")
        self._owned[owner] = []
        self._promised[owner] = count
        self._promised_sum += count

    def can_allocate(self, owner: int, count: int) -> bool:
        return 0 <= count <= self._promised.get(owner, 0)

    def allocate(self, owner: int, count: int) -> list[int]:
        """Assign `count` of the promised pages. Only after `can_allocate`."""
        if not self.can_allocate(owner, count):
            raise IntegrityError(f"row {owner} asks for {count} pages beyond its reservation")
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] += pages
        self._promised[owner] -= count
        self._promised_sum -= count
        self.peak = max(self.peak, self.used)
        return pages

    def free(self, owner: int) -> None:
        """Take back all pages and promises of `owner`."""
        self._free += reversed(self._owned.pop(owner))
        self._promised_sum -= self._promised.pop(owner)

    def owned(self, owner: int) -> list[int]:
        """Pages assigned to `owner`, in the order of its positions."""
        return list(self._owned.get(owner, ()))

    def integrity(self, owners: Iterable[int]) -> None:
        """Every page is free or owned by exactly one of `owners`, and no promise exceeds the pool.

        Raises IntegrityError.
        """
        _check(set(self._owned) == set(owners), "page owners are not the rows")
        _check(set(self._promised) == set(self._owned), "a promise without an owner")
        held = [page for pages in self._owned.values() for page in pages] + self._free
        every = np.arange(1, self.total + 1)
        _check(np.array_equal(np.sort(np.array(held)), every), "a page is lost or held twice")
        _check(self._promised_sum == sum(self._promised.values()), "sum of promises is off")
        _check(min(self._promised.values(), default=0) >= 0, "a negative promise")
        _check(self.reserved <= self.total, "more pages promised than there are")


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
