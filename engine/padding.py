"""Shapes of passes and what fills them up: one for all cycles, or a few.

`Buckets`, on a GPU: numbers of rows and pages are rounded up, and the lengths of prompts in a pass,
because every new shape costs there. MLX's CUDA attention plans each of them anew, and batches that
shrink row by row meet a new one in every other cycle.

`Shape`, for `EngineConfig.deterministic`: one shape for every cycle.

Kernels are chosen by shape, so at one shape a row's result does not depend on how many others there
are. It may still depend on which: OpenBLAS (0.3.21, AVX-512) sums the rows of a product in another
order at other places of the batch, whatever its size. So it is tried at load, with the same row at
every place; where places differ, rows run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cache import page_table
from engine.cycle import DecodeCycle
from engine.guided import Form
from engine.models.qwen3_5 import DraftPast, Qwen35Model
from engine.plan import NULL_PAGE, DecodeBatch, RowSpec, SamplingParams
from engine.rows import FIRST_PAD, RowArrays, make_statics, stack

_TILE = 16
"""A matmul's last rows may go through another kernel than the others when their number is no
multiple of the kernel's tile, and then a row's bits would depend on its place."""

_SPECS = (
    RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=1),
    RowSpec(
        sampling=SamplingParams(temperature=1.0, draft_temperature=0.5, top_p=0.5, min_p=0.1),
        max_tokens=1,
    ),
)
"""Greedy and fully shaped: with both always in the cohort, which filters run never depends on the
neighbours either. Rules (`engine.rules`) need no stand-in: they pass other rows' bits through."""


class _Anything:
    """The constraint of a row that has ended, which is never asked."""

    def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32] | None:
        return None

    def advance(self, tokens: Sequence[int]) -> None:
        pass


NOBODYS_FORM = Form(_Anything(), frozenset(), remaining=0, ended=True)
"""The form of stand-ins in a guided cohort."""


def padded_rows(max_rows: int) -> int:
    """Rows of every cycle."""
    return -(-(max_rows + len(_SPECS)) // _TILE) * _TILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The one shape."""

    rows: int
    """Rows of a cycle; 1: a cohort's rows run one by one."""
    columns: int
    """Pages per row: the whole context's."""
    depth: int

    def pad(self, batch: DecodeBatch) -> DecodeBatch:
        """The same cohort in this shape: the depth that was planned lives on in `limits`."""
        missing = max(0, self.rows - len(batch.rows))
        pads = tuple(FIRST_PAD - index for index in range(missing))
        pages = batch.pages[:, : self.columns]
        widths = ((0, missing), (0, self.columns - pages.shape[1]))
        return DecodeBatch(
            rows=batch.rows + pads,
            pages=np.pad(pages, widths, constant_values=NULL_PAGE),
            depth=self.depth,
            limits=batch.limits + (0,) * missing,
        )

    @staticmethod
    def spec(row: int) -> RowSpec:
        """Specification of a stand-in."""
        return _SPECS[(FIRST_PAD - row) % len(_SPECS)]

    def stand_in(self, model: Qwen35Model, *, mtp: bool) -> RowArrays:
        """One row that is done and has nothing."""
        zero, hidden = mx.zeros((1,), mx.int32), model.config.hidden_size
        dtype = model.model.norm.weight.dtype
        width = self.depth + 1 if mtp else 0
        return RowArrays(
            length=zero,
            primary=zero,
            remaining=zero,
            done=mx.ones((1,), mx.bool_),
            states=tuple(model.zero_states(1)),
            pending_hidden=mx.zeros((1, width, hidden), dtype),
            pending_tokens=mx.zeros((1, width), mx.int32),
            pending_count=zero,
            counts=mx.zeros((1, 0), mx.int32),
            prompted=mx.zeros((1, 0), mx.bool_),
        )


ROW_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that cycles in buckets come in."""
COLUMN_TOKENS = 256
"""Page tables in buckets cover multiples of this."""
WIDTH_STEP = 16
"""Prompts in buckets are multiples of this wide: what recurrences in blocks fill up to anyway
(`engine.models.delta_chunked.BLOCK`)."""


def bucket(rows: int) -> int:
    """Rows of the cycle that runs this many."""
    return next((step for step in ROW_STEPS if step >= rows), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets(Shape):
    """A few shapes: `rows` and `columns` are the largest. Depths stay as planned."""

    page_size: int

    def pad(self, batch: DecodeBatch) -> DecodeBatch:
        """The same cohort with stand-ins up to the next number of rows, and null pages."""
        count = len(batch.rows)
        missing = bucket(count) - count
        filled = self._columns(batch.pages.shape[1]) - batch.pages.shape[1]
        return replace(
            batch,
            rows=batch.rows + tuple(FIRST_PAD - index for index in range(missing)),
            pages=np.pad(batch.pages, ((0, missing), (0, filled)), constant_values=NULL_PAGE),
            limits=batch.limits + (0,) * missing,
        )

    def prompts(self, rows: int, width: int, columns: int) -> tuple[int, int, int]:
        """Rows, tokens and pages per row of the pass that runs prompts of these."""
        width = width if width == 1 else -(-width // WIDTH_STEP) * WIDTH_STEP
        return bucket(rows), width, self._columns(columns)

    def _columns(self, columns: int) -> int:
        tile = max(1, COLUMN_TOKENS // self.page_size)
        return columns + min(-columns % tile, max(0, self.columns - columns))

    @staticmethod
    def spec(row: int) -> RowSpec:
        """Specification of a stand-in: the plainest."""
        return _SPECS[0]


def places_agree(shape: Shape, model: Qwen35Model, cycle: DecodeCycle, row: RowArrays) -> bool:
    """Whether the same row has the same numbers at every place of a cycle of this shape.

    Runs trunk, head and MTP passes on `shape.rows` copies of `row`, whose pages are the null page.
    """
    rows = stack([row] * shape.rows)
    table = page_table(np.full((shape.rows, shape.columns), NULL_PAGE, np.int32))
    statics = make_statics([_SPECS[0]] * shape.rows, model.config.vocab_size)
    limits = mx.zeros((shape.rows,), mx.int32)
    output = cycle.run(rows, statics, table, shape.depth, limits)
    found = [output.logits]
    if cycle.mtp_pool is not None:
        hidden = output.rows.pending_hidden
        first = cycle.write_pending(output.rows, table)
        past = DraftPast(cycle.mtp_pool, table, rows.length)
        found += [hidden, first, model.mtp_draft(first[:, :1], rows.primary[:, None], past)]
    return all(mx.array_equal(x, mx.broadcast_to(x[:1], x.shape)).item() for x in found)
