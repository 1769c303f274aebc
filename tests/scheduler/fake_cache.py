"""Page contents and boundaries of `FakeEngine`: what is written is what is read.

Every page holds the tokens last written to it, also what a rejected draft left behind, and what the
page's last owner left. Who may write where is checked at every write:

- a row writes only pages of its own table that no other row has in its table;
- never a position below a boundary whose pages include that page.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import NULL_PAGE

Ints = NDArray[np.int64]

GARBAGE = -7
"""What rejected drafts leave in the cache."""


class PlanError(ValueError):
    """A plan broke the contract."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanError(message)


def digest(tokens: Iterable[int], before: int = 0) -> int:
    """32 bits of a sequence; `before`: those of what stands before it. The fake's recurrent
    state."""
    return zlib.crc32(np.array(list(tokens), dtype=np.int64).tobytes(), before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    position: int
    state: int
    """Digest of the tokens before it."""
    mtp: bool
    pages: tuple[int, ...]


class FakeCache:
    """All pages and boundaries; rows are known by their tables."""

    def __init__(self, *, pages: int, page_size: int, boundaries: int) -> None:
        self.page_size = page_size
        self.content: Ints = np.full((pages + 1, page_size), -1, dtype=np.int64)
        self.tables: dict[int, list[int]] = {}
        self.boundaries: dict[int, Boundary] = {}
        self._limit = boundaries
        self._pages = pages
        self._used: set[int] = set()
        """Boundary ids that there have been."""
        self._rows: dict[int, set[int]] = {}
        """[page]: rows that have it in their tables."""
        self._saved: dict[int, set[int]] = {}
        """[page]: boundaries whose pages include it."""

    # --- rows ------------------------------------------------------------------------------------

    def extend(self, row: int, table: NDArray[np.int32], positions: int) -> None:
        """A row's table as of now: it covers `positions`, extends the one before, and what is new
        in it belongs to nobody."""
        require(table.dtype == np.int32 and table.ndim == 1, "page tables are int32")
        pages, held = table.tolist(), self.tables[row]
        needed = -(-positions // self.page_size)
        require(len(pages) >= needed, f"row {row}: {len(pages)} pages for {positions} positions")
        require(pages[: len(held)] == held, f"row {row}: its table changed")
        for page in pages[len(held) :]:
            require(NULL_PAGE < page <= self._pages, f"row {row}: page {page}")
            users = (self._rows.get(page), self._saved.get(page))
            require(not any(users), f"row {row}: page {page} is not free")
            self._rows.setdefault(page, set()).add(row)
        require(len(set(pages)) == len(pages), f"row {row}: a page twice")
        self.tables[row] = pages

    def begin(self, row: int) -> None:
        self.tables[row] = []

    def restore(
        self, row: int, boundary: int, table: NDArray[np.int32], copies: set[tuple[int, int]]
    ) -> Boundary:
        """Start a row's table with a boundary's whole pages and a copy of the rest."""
        require(boundary in self.boundaries, f"row {row}: boundary {boundary} is unknown")
        saved = self.boundaries[boundary]
        whole = saved.position // self.page_size
        pages = table.tolist()
        shared = tuple(pages[:whole])
        require(shared == saved.pages[:whole], f"row {row}: its prefix is in other pages")
        if saved.position % self.page_size:
            copy = (saved.pages[whole], pages[whole] if len(pages) > whole else NULL_PAGE)
            require(copy in copies, f"row {row}: no copy of the last page of boundary {boundary}")
            copies.discard(copy)
        self.tables[row] = list(shared)
        for page in shared:
            self._rows.setdefault(page, set()).add(row)
        return saved

    def release(self, row: int) -> None:
        for page in self.tables.pop(row):
            self._rows[page].discard(row)

    def write(self, row: int, position: int, tokens: Sequence[int], *, to: int) -> None:
        """Write `tokens` from `position` on, then garbage up to position `to`, as far as there are
        pages."""
        table = self.tables[row]
        most = min(max(to, position + len(tokens)), len(table) * self.page_size)
        for at in range(position, most):
            page = table[at // self.page_size]
            require(self._rows[page] == {row}, f"row {row} writes page {page}, which is shared")
            for boundary in self._saved.get(page, ()):
                lowest = self.boundaries[boundary].position
                require(at >= lowest, f"row {row} writes {at}, below boundary {boundary}")
            token = tokens[at - position] if at - position < len(tokens) else GARBAGE
            self.content[page, at % self.page_size] = token

    def read(self, row: int, positions: int) -> Ints:
        """What stands at 0 … positions - 1."""
        needed = -(-positions // self.page_size)
        return self.content[self.tables[row][:needed]].reshape(-1)[:positions]

    # --- boundaries ------------------------------------------------------------------------------

    def save(self, boundary: int, saved: Boundary) -> None:
        require(boundary not in self._used, f"boundary id {boundary} is not new")
        require(len(saved.pages) * self.page_size >= saved.position, "pages of a boundary")
        self._used.add(boundary)
        self.boundaries[boundary] = saved
        for page in saved.pages:
            self._saved.setdefault(page, set()).add(boundary)

    def drop(self, boundary: int) -> None:
        if (saved := self.boundaries.pop(boundary, None)) is not None:
            for page in saved.pages:
                self._saved[page].discard(boundary)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = {a for a, _ in copies}, [b for _, b in copies]
        require(len(set(targets)) == len(targets), "a page is copied to twice")
        require(not sources & set(targets), "a page is copied from and to")
        for source, target in copies:
            require(bool(self._saved.get(source)), f"page {source} is copied and in no boundary")
            require(NULL_PAGE < target <= self._pages, f"a copy to page {target}")
            users = (self._rows.get(target), self._saved.get(target))
            require(not any(users), f"a copy to page {target}, which is not free")
        for source, target in copies:
            self.content[target] = self.content[source]

    def check_count(self) -> None:
        require(len(self.boundaries) <= self._limit, f"more than {self._limit} boundaries")
