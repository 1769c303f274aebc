"""How many rows this device likes to multiply at once.

The time of a matrix product with few rows is no smooth function of their number: MLX takes other
kernels at other widths. Measured on one H200 (MLX 0.32.4, 4 bit, 2560 → 18432; µs at 1, 2, 3, 4, 5,
6, 7, 8, 16, 24, 32 rows): 167, 72, 99, 117, 154, 176, 199, 31, 29, 65, 42. So it is measured at
load, on this model's own matrices, and blocks are padded with rows of zeros up to a width that is
cheaper. Padded rows are cut off again; no result depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

CANDIDATES = (1, 2, 3, 4, 8, 16, 32, 64)
"""Widths measured: few, because on CUDA each may compile a kernel of its own, some seconds on a
machine's first start. Between them the next better one is taken; beyond the last nothing is padded,
a product is then bound by arithmetic."""
MARGIN = 0.1
"""A wider product must save this share of the time."""
ROUNDS = 5
CALLS = 8
"""Products per measurement, submitted together: what a step does."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Which width to pad to; without measurements, none."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of the measured products by number of rows."""

    def padded(self, rows: int) -> int:
        """The number of rows, at least `rows`, at which a product should be made."""
        wider = {width: cost for width, cost in self.seconds.items() if width >= rows}
        if not wider:
            return rows
        best = min(wider, key=lambda width: (wider[width], width))
        # Between two measured widths nothing is known, so a known one is taken.
        own = self.seconds.get(rows, float("inf"))
        return best if wider[best] < own * (1.0 - MARGIN) else rows

    def __str__(self) -> str:
        moved = [f"{w}→{self.padded(w)}" for w in self.seconds if self.padded(w) != w]
        return f"rows padded for cheaper products: {', '.join(moved)}" if moved else ""


def measure_widths(
    product: Callable[[mx.array], Sequence[mx.array]], size: int, dtype: mx.Dtype
) -> Widths:
    """Time `product`, which maps [rows, size] to the outputs of some of the model's matrices, at
    every candidate width. Rounds are interleaved; the fastest of each width counts."""
    best = dict.fromkeys(CANDIDATES, float("inf"))
    inputs = {rows: mx.ones((rows, size), dtype) for rows in CANDIDATES}
    for rows in CANDIDATES:  # the first call may compile
        mx.eval(inputs[rows], list(product(inputs[rows])))
    for _ in range(ROUNDS):
        for rows in CANDIDATES:
            began = time.perf_counter()
            mx.eval([list(product(inputs[rows])) for _ in range(CALLS)])
            best[rows] = min(best[rows], time.perf_counter() - began)
    return Widths(best)
