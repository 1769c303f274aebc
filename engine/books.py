"""What an engine knows of its rows between steps, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mlx.core as mx

from engine.guided import Form
from engine.plan import PrefillChunk, RowSpec
from engine.prefill import PrefillRow
from engine.rows import RowArrays, RowTable


class Books:
    """All rows of one engine."""

    def __init__(self, vocab: int) -> None:
        self.free = RowTable(vocab)
        """Rows that `StepPlan.decode` names."""
        self.guided = RowTable(vocab)
        """Rows with a constraint."""
        self.forms: dict[int, Form] = {}
        """Of the rows in `guided`."""
        self.prefilling: dict[int, PrefillRow] = {}
        self.reached: dict[int, int] = {}
        """Position of each decoding row's last emitted token, as results tell."""
        self.ends: dict[int, RowArrays] = {}
        """State of each row that has ended as it was then: a cycle that was under way may have run
        over it. Kept only where it may become a boundary."""
        self.faulted: set[int] = set()
        self.lost: set[int] = set()
        """Faulted rows that the device does not have; a plan may name them until it learns."""

    def decoding(self) -> set[int]:
        """Ids of all rows that can decode."""
        return self.free.rows() | self.guided.rows()

    def table(self, row: int) -> RowTable:
        """The table a decoding row is in."""
        return self.guided if row in self.guided else self.free

    def spec(self, row: int) -> RowSpec:
        """Of a decoding row."""
        return self.table(row).spec(row)

    def chunk_spec(self, chunk: PrefillChunk) -> RowSpec | None:
        """Of a chunk's row; None of a row that is lost."""
        row = self.prefilling.get(chunk.row)
        return chunk.spec if row is None else row.spec

    def release(self, rows: Iterable[int]) -> None:
        """Forget rows; unknown ids are ignored."""
        self.free.release(rows)
        self.guided.release(rows)
        for row in rows:
            self.forms.pop(row, None)
            self.prefilling.pop(row, None)
            self.reached.pop(row, None)
            self.ends.pop(row, None)
            self.faulted.discard(row)
            self.lost.discard(row)

    def arrays(self) -> Iterator[mx.array]:
        """Every live array, for evaluation."""
        yield from self.free.arrays()
        yield from self.guided.arrays()
        for end in self.ends.values():
            yield from end.arrays()
        for row in self.prefilling.values():
            yield from row.arrays()
