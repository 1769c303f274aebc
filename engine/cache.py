"""Paged keys and values, and the recurrent rows beside them.

A `PagePool` holds the keys and values of one attention layer for all rows; which page belongs to
whom is the scheduler's business. A `Window` says where a block of new tokens sits, once per
forward pass, for all layers. A row's committed length is the only truth about its pages: rows of a
page past it are dead, so rejecting drafts costs attention layers nothing.

Pools are updated in place through donation: MLX reuses the buffer of `pool[...] = x` when nothing
else holds it. Hence two rules that the engine follows: write before read within a pass, and never
hand a pass to the device while an earlier one that reads the same pool still runs (it would copy
the pool).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.blocks import Block
from engine.models.delta_block import BlockWrites
from engine.ops import finite
from engine.plan import NULL_PAGE


@dataclass(frozen=True, slots=True)
class Window:
    """Where a block of `width` new tokens of B rows sits."""

    start: mx.array
    """[B] int32: rotary position of each row's first token (or slot, see `slot_window`)."""
    width: int
    table: mx.array
    """[B, P + 1] int32 page table; the last column is the null page."""
    page: mx.array
    """[B, width] int32: page of each token."""
    offset: mx.array
    """[B, width] int32: row within that page."""
    mask: mx.array
    """[B, 1, width, P · page_size] bool: key j is visible to query i iff j <= start + i."""
    block: Block
    """How the tokens lie."""


def window(start: mx.array, width: int, table: mx.array, page_size: int) -> Window:
    """Describe tokens at positions start … start + width - 1 of each row.

    A position past the row's table lands on the null page: nothing that is read later lives there.
    """
    keys = mx.arange((table.shape[1] - 1) * page_size, dtype=mx.int32)
    places = mx.arange(width, dtype=mx.int32)
    return _window(start, places, table, page_size, keys)


def slot_window(start: mx.array, width: int, table: mx.array, page_size: int) -> Window:
    """Describe MTP slots start … start + width - 1 of each row. Slot p lies at position p + 1.

    Slot p needs the token at p + 1, so what a row writes after a boundary at position L begins with
    slot L - 1; one place further it lies at L, like the keys of token L, and pages that end at L
    are never written again. Position 0 is never written, so nobody sees it. Rotary positions are
    the slots' own.
    """
    keys = slot_positions((table.shape[1] - 1) * page_size)
    places = mx.arange(1, width + 1, dtype=mx.int32)
    return _window(start, places, table, page_size, keys)


def _window(
    start: mx.array, places: mx.array, table: mx.array, page_size: int, keys: mx.array
) -> Window:
    """Tokens at `places` [width] from `start` on; they see what `keys` says lies no further."""
    width = places.shape[0]
    positions = start[:, None] + places[None, :]
    column = mx.minimum(positions // page_size, table.shape[1] - 1)
    return Window(
        start=start,
        width=width,
        table=table,
        page=mx.take_along_axis(table, column, axis=1),
        offset=positions % page_size,
        mask=(keys[None, None, :] <= positions[:, :, None])[:, None],
        block=Block(start.shape[0], width),
    )


def in_block(where: Window, block: Block, written: mx.array | None = None) -> Window:
    """The window of a block; places of it that are not `written` [B, W] (None: its tokens are) go
    to the null page."""
    if written is None and block.ragged is not None:
        written = block.ragged.alive
    page = where.page if written is None else mx.where(written, where.page, NULL_PAGE)
    return replace(where, page=page, block=block)


def slot_positions(count: int) -> mx.array:
    """Positions 0 … count - 1 as int32 [count] for a `<=` that must not see position 0."""
    keys = np.arange(count, dtype=np.int32)
    keys[:1] = np.iinfo(np.int32).max
    return mx.array(keys)


def page_table(pages: NDArray[np.int32]) -> mx.array:
    """A host page table [B, P] as a device array with its null column."""
    return mx.array(np.pad(pages, ((0, 0), (0, 1)), constant_values=NULL_PAGE))


class PagePool:
    """Keys and values of one layer: two arrays [pages + 1, page_size, kv_heads, head_dim]."""

    def __init__(
        self, *, pages: int, page_size: int, heads: int, head_dim: int, dtype: mx.Dtype
    ) -> None:
        shape = (pages + 1, page_size, heads, head_dim)
        self.keys = mx.zeros(shape, dtype)
        self.values = mx.zeros(shape, dtype)

    def write(self, keys: mx.array, values: mx.array, where: Window) -> None:
        """Store new rows, [B, width, heads, head_dim] each.

        Non-finite numbers are stored as zero: a masked key has weight exactly 0, but 0 · NaN
        is NaN, so one broken row would spread through a recycled page. The broken row itself still
        shows, in its residual stream.
        """
        self.keys[where.page, where.offset] = finite(keys)
        self.values[where.page, where.offset] = finite(values)

    def read(self, where: Window) -> tuple[mx.array, mx.array]:
        """All rows of the window's pages, [B, heads, P · page_size, head_dim] each."""
        table = where.table[:, :-1]
        return self.gather(self.keys, table), self.gather(self.values, table)

    @staticmethod
    def gather(pool: mx.array, table: mx.array) -> mx.array:
        """Rows of the pages in `table` [B, P], as [B, heads, P · page_size, head_dim]."""
        batch, columns = table.shape
        _, size, heads, dim = pool.shape
        rows = pool[table].reshape(batch, columns * size, heads, dim)
        return rows.transpose(0, 2, 1, 3)

    def current(self) -> tuple[mx.array, mx.array]:
        """The pool as it is now, for an evaluation: other Python objects than `keys` and `values`,
        because a later write would replace what those two stand for."""
        return self.keys.astype(self.keys.dtype), self.values.astype(self.values.dtype)

    def handles(self) -> tuple[mx.array, mx.array]:
        """The pool as it is now, for `restore`. Let go of it before anything is evaluated: while it
        is held, a write copies the pool."""
        return self.keys[:], self.values[:]

    def restore(self, handles: tuple[mx.array, mx.array]) -> None:
        """Undo every write since `handles`, none of which may have been evaluated."""
        self.keys, self.values = handles

    def copy(self, source: mx.array, target: mx.array) -> list[mx.array]:
        """Copy whole pages, ids int32 [n] each; a target is in no other place of either list.

        Returns the pages as read. Evaluate them before anything that writes to the pool: a read
        that still runs holds the buffer, and the write would copy the whole pool.
        """
        pages = [self.keys[source], self.values[source]]
        self.keys[target], self.values[target] = pages
        return pages

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of one Gated-DeltaNet layer for B rows."""

    conv: mx.array
    """[B, K - 1, C]: the last rows before the convolution."""
    memory: mx.array
    """[B, Hv, Dv, Dk] float32."""


@dataclass(frozen=True, slots=True)
class RecurrentTrail:
    """What a forward pass over W tokens leaves behind so that any prefix of it can be kept."""

    before: RecurrentState
    rows: mx.array
    """[B, K - 1 + W, C]: convolution inputs, the ones before the block first."""
    memories: tuple[mx.array, ...]
    """State after token t, [1, B, Hv, Dv, Dk], for each t < W; empty when the pass kept only the
    inputs below."""
    last: mx.array | None
    """State after the last token, [1, B, Hv, Dv, Dk]; None when the pass ran as one block."""
    block: BlockWrites | None
    """What a pass that ran as one block wrote."""
    inputs: tuple[mx.array, mx.array, mx.array, mx.array]
    """k, v, log decay, β of the block (see `delta_rule`)."""
