"""Memory of rows: a slot, a page table, and the pages in it, from start to end of a row."""

from __future__ import annotations

from engine.plan import pages_needed
from scheduler.pages import PagePool, PageTables
from scheduler.prefix import Entry
from scheduler.sequence import Sequence


class RowMemory:
    """Keeps the pool and the tables in step."""

    def __init__(self, *, pool: PagePool, tables: PageTables, page_size: int) -> None:
        self._pool = pool
        self._tables = tables
        self._page_size = page_size

    def needed(self, sequence: Sequence, start: int) -> int:
        """Pages a row must reserve when it starts at position `start` of a saved prefix."""
        return sequence.pages_at_worst(self._page_size) - start // self._page_size

    def start(self, sequence: Sequence, entry: Entry | None) -> tuple[int, int] | None:
        """Give a new row its slot, its reservation and the pages of the prefix it starts from;
        returns the page to copy, if any: (from, to).

        Whole pages are shared: nobody writes them again. The last one, when it is filled in part,
        is still written by the row that left it, and by every row that goes on from it.
        """
        whole = entry.position // self._page_size if entry else 0
        shared: list[int] = entry.pages[:whole].tolist() if entry else []
        self._pool.reserve(sequence.row, self.needed(sequence, whole * self._page_size), shared)
        sequence.slot = self._tables.take_slot()
        self._tables.extend(sequence.slot, shared)
        if entry is None or whole == len(entry.pages):
            return None
        self.grow(sequence, entry.position)
        return int(entry.pages[whole]), self._tables.pages(sequence.slot)[whole]

    def grow(self, sequence: Sequence, positions: int) -> None:
        """Extend a row's table to cover `positions`."""
        held = self._tables.length(sequence.slot)
        missing = pages_needed(positions, self._page_size) - held
        if missing > 0:
            self._tables.extend(sequence.slot, self._pool.allocate(sequence.row, missing))

    def free(self, sequence: Sequence) -> None:
        """Take everything back."""
        self._tables.give_back(sequence.slot)
        self._pool.free(sequence.row)
