"""How the tokens of one pass lie: flat [M, …] for matrix products, in a block [B, W, …] for mixers.

Rows of one length are a block as they stand. Rows of several lengths lie flat one behind the other
(nothing is padded there), and each mixer sees them in a block as wide as the longest: gathered into
it, with its row's last token once more in the places that are left over, and gathered out of it
again. A mixer must take those places for nothing: keys go to the null page, the recurrence neither
decays nor writes (x · 1 + 0 = x, to the bit), and the rows before a convolution are taken at each
row's own end (`engine.models.delta.keep_all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.ops import first_rows, pad_rows

PADDING = 2
"""A row is never filled up to more than this many times its tokens, except in small blocks, and a
block has at most this many scores (places × keys) per score that is wanted."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the tokens of rows of several lengths lie."""

    places: mx.array
    """[B, W] int32: place in the flat form of what stands at each place of the block."""
    order: mx.array
    """[N] int32: place in the block (counted through) of each token of the flat form."""
    alive: mx.array
    """[B, W] bool: a token of the row."""
    count: mx.array
    """[B] int32: tokens of each row; 0 of a stand-in."""


@dataclass(frozen=True, slots=True)
class Block:
    """B rows, W places wide."""

    batch: int
    width: int
    ragged: Ragged | None = None
    """None where every row is W tokens long: the flat form is the block, row by row."""

    def spread(self, x: mx.array) -> mx.array:
        """x [M, C] as [B, W, C]; rows of x past the last token are nobody's."""
        if self.ragged is not None:
            return mx.take(x, self.ragged.places, axis=0)
        return first_rows(x, self.batch * self.width).reshape(self.batch, self.width, -1)

    def flatten(self, x: mx.array, rows: int) -> mx.array:
        """x [B, W, …] as [rows, C], zeros past the last token."""
        flat = x.reshape(self.batch * self.width, -1)
        if self.ragged is not None:
            flat = mx.take(flat, self.ragged.order, axis=0)
        return pad_rows(flat, rows)


def block_of(sizes: Sequence[int], *, batch: int, width: int) -> Block:
    """The block of rows with so many tokens each, filled up to `batch` rows of `width` places."""
    if len(sizes) == batch and all(size == width for size in sizes):
        return Block(batch, width)
    counts = np.zeros(batch, np.int32)
    counts[: len(sizes)] = sizes
    first = np.cumsum(counts) - counts
    step = np.arange(width)
    own = np.minimum(step, np.maximum(counts[:, None] - 1, 0))
    places = np.minimum(first[:, None] + own, int(counts.sum()) - 1)
    alive = step < counts[:, None]
    return Block(
        batch,
        width,
        Ragged(
            places=mx.array(places.astype(np.int32)),
            order=mx.array(np.flatnonzero(alive).astype(np.int32)),
            alive=mx.array(alive),
            count=mx.array(counts),
        ),
    )


def share_passes(
    sizes: Sequence[int], columns: Sequence[int], *, spare: int, spare_scores: int
) -> list[list[int]]:
    """Which chunks run in one pass: places of chunks of so many tokens and pages, in order.

    Longest first, as long as they keep to `PADDING`. Blocks of up to `spare` places, and of up to
    `spare_scores` places × pages, need not: there a pass more costs more than its padding.
    """
    passes: list[list[int]] = []
    wide = high = scores = 0
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size, pages = sizes[index], columns[index]
        area = (len(passes[-1]) + 1) * wide if passes else 0
        tall, wanted = max(high, pages), scores + size * pages
        if (
            passes
            and (wide <= PADDING * size or area <= spare)
            and area * tall <= max(spare_scores, PADDING * wanted)
        ):
            passes[-1].append(index)
            high, scores = tall, wanted
        else:
            passes.append([index])
            wide, high, scores = size, pages, size * pages
    return [sorted(chosen) for chosen in passes]
