"""Memory of rows: a slot, a page table, and the pages in it, from start to end of a row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.plan import pages_needed
from scheduler.pages import PagePool, PageTables
from scheduler.prefix import Entry, PrefixCache, Yield
from scheduler.sequence import Sequence
from scheduler.shares import Account


class RowMemory:
    """Keeps the pool and the tables in step. A row starts with the pages of its whole prompt and
    takes others as it decodes."""

    def __init__(
        self,
        *,
        pool: PagePool,
        tables: PageTables,
        cache: PrefixCache,
        page_size: int,
        watermark: int,
    ) -> None:
        """`watermark`: pages that must be left when a row starts beside others."""
        self._pool = pool
        self._tables = tables
        self._cache = cache
        self._page_size = page_size
        self._watermark = watermark
        self.owed = 0
        """Pages that rows lack which sit this cycle out: nobody else may take them."""

    def needed(self, sequence: Sequence, start: int) -> int:
        """Pages that must be there for a row that starts at position `start` of a saved prefix:
        those of its prompt, and of one page's worth of tokens after it, so that it gets on."""
        soon = min(len(sequence.prompt) + self._page_size, sequence.longest)
        return pages_needed(soon, self._page_size) - start // self._page_size

    def margin(self, *, alone: bool) -> int:
        """Pages that must be left when a row starts, beyond those it needs. `alone`: no other row
        has any, so that whatever was admitted fits."""
        return 0 if alone else self.owed + self._watermark

    def start(self, sequence: Sequence, entry: Entry | None) -> tuple[int, int] | None:
        """Give a new row its slot, the pages of the prefix it starts from and those of its prompt;
        returns the page to copy, if any: (from, to). Only with room for `needed`.

        Whole pages are shared: nobody writes them again. The last one, when it is filled in part,
        is still written by the row that left it, and by every row that goes on from it.
        """
        whole = entry.position // self._page_size if entry else 0
        shared: list[int] = entry.pages[:whole].tolist() if entry else []
        self._pool.open(sequence.row, shared)
        sequence.slot = self._tables.take_slot()
        self._tables.extend(sequence.slot, shared)
        self._cache.shelves.hold(self._account(sequence), np.asarray(shared, np.int32))
        self.grow(sequence, len(sequence.prompt))
        if entry is None or whole == len(entry.pages):
            return None
        return int(entry.pages[whole]), self._tables.pages(sequence.slot)[whole]

    def missing(self, sequence: Sequence, positions: int) -> int:
        """Pages that a row's table lacks to cover `positions`."""
        held = self._tables.length(sequence.slot)
        return max(0, pages_needed(positions, self._page_size) - held)

    def at_most(self, sequence: Sequence) -> int:
        """Pages that a row may ever hold: what admission saw fit into the pool."""
        return pages_needed(sequence.asked_tokens + sequence.request.max_tokens, self._page_size)

    def can_grow(self, rows: Iterable[Sequence], depth: int) -> bool:
        """Whether there are pages for a cycle of `rows` at `depth`, kept prefixes given up."""
        pages = sum(self.missing(sequence, sequence.reach(depth)) for sequence in rows)
        return not pages or self._cache.can_make_room(pages, most=Yield.SESSIONS, margin=self.owed)

    def grow(self, sequence: Sequence, positions: int) -> None:
        """Extend a row's table to cover `positions`, evicting kept prefixes if need be. Raises
        IntegrityError when there is no room: ask first."""
        if missing := self.missing(sequence, positions):
            self._cache.make_room(missing, most=Yield.AWAITED)
            pages = self._pool.allocate(sequence.row, missing)
            self._tables.extend(sequence.slot, pages)
            self._cache.shelves.hold(self._account(sequence), np.asarray(pages, np.int32))

    def free(self, sequence: Sequence) -> None:
        """Take everything back."""
        self._cache.shelves.drop(self._account(sequence), self._tables.table(sequence.slot))
        self._tables.give_back(sequence.slot)
        self._pool.free(sequence.row)

    def _account(self, sequence: Sequence) -> Account:
        return self._cache.shelves.accounts.keeper(sequence.request.tenant)
