"""What a machine's steps cost, and how many drafts stand: the model behind the simulated device.

A step takes the sum of its parts, as the engine runs them one after the other:

    prefill chunk of n tokens at position s:  chunk_s + token_s · n + context_s · n · (s + n / 2)
    decode cycle of B rows at depth K:        t(B, K) + row_context_s · Σ context of its rows

t(B, K) comes from a table that `selfdraft tune` measured (`TableCosts`), or from what a forward
pass over B · (K + 1) positions takes (`WidthCosts`), where only published figures are to be had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.plan import MAX_DEPTH
from scheduler.costs import CostTable, Plane


class DecodeCosts(Protocol):
    def seconds(self, rows: int, depth: int) -> float:
        """Of one cycle of `rows` rows at `depth`, > 0."""


class TableCosts:
    """t(B, K) between and beyond the points of a measured table.

    A plane (`scheduler.costs.Plane`) is fitted to the points; what they deviate from it, in log
    seconds, is interpolated along rows and then along depths, and kept constant beyond the ends.
    """

    def __init__(self, table: CostTable) -> None:
        """Raises ValueError for a table without points."""
        if not table.seconds:
            raise ValueError("the cost table has no entries")
        self._plane = Plane.fit((b, k, s) for (b, k), s in table.seconds.items())
        self._columns: dict[int, tuple[list[float], list[float]]] = {}
        for depth in sorted({k for _, k in table.seconds}):
            rows = sorted(b for b, k in table.seconds if k == depth)
            offsets = [math.log(table.seconds[b, depth] / self._guess(b, depth)) for b in rows]
            self._columns[depth] = ([math.log(b) for b in rows], offsets)
        self._known: dict[tuple[int, int], float] = {}

    def _guess(self, rows: int, depth: int) -> float:
        return float(self._plane.seconds(rows, np.array([float(depth)]))[0])

    def seconds(self, rows: int, depth: int) -> float:
        found = self._known.get((rows, depth))
        if found is None:
            found = self._known[rows, depth] = self._between(rows, depth)
        return found

    def _between(self, rows: int, depth: int) -> float:
        at = math.log(rows)
        offsets = [np.interp(at, *column) for column in self._columns.values()]
        offset = float(np.interp(depth, list(self._columns), offsets))
        return self._guess(rows, depth) * math.exp(offset)


class WidthCosts:
    """t(B, K) = f(B · (K + 1)) + K · (draft_s + draft_row_s · B).

    f, a forward pass by the number of positions in it, is linear between the points given; beyond
    the last it grows in proportion, as where arithmetic is the limit. Equal neighbours make the
    plateaus that matrix products in tiles have.
    """

    def __init__(
        self,
        widths: Iterable[tuple[int, float]],
        *,
        draft_s: float = 0.0,
        draft_row_s: float = 0.0,
    ) -> None:
        """`widths`: (positions, seconds), by ascending positions. Raises ValueError."""
        points = [(int(width), float(seconds)) for width, seconds in widths]
        if not points:
            raise ValueError("widths must not be empty")
        self._widths = [width for width, _ in points]
        self._seconds = [seconds for _, seconds in points]
        if self._widths[0] < 1 or sorted(set(self._widths)) != self._widths:
            raise ValueError("widths must be ascending numbers of positions, >= 1")
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in self._seconds):
            raise ValueError("widths: seconds must be finite and > 0")
        for name, value in (("draft_s", draft_s), ("draft_row_s", draft_row_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, not {value}")
        self._draft_s = draft_s
        self._draft_row_s = draft_row_s
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, depth: int) -> float:
        found = self._known.get((rows, depth))
        if found is None:
            draft = depth * (self._draft_s + self._draft_row_s * rows)
            found = self._known[rows, depth] = self._forward(rows * (depth + 1)) + draft
        return found

    def _forward(self, width: int) -> float:
        last = self._widths[-1]
        if width > last:
            return self._seconds[-1] * width / last
        return float(np.interp(width, self._widths, self._seconds))


def tabulated(costs: DecodeCosts, *, max_rows: int, max_depth: int) -> CostTable:
    """What `selfdraft tune` would have found on a machine of these costs, without noise."""
    rows = sorted({min(2**n, max_rows) for n in range(max_rows.bit_length() + 1)})
    grid = [(b, k) for b in rows for k in range(max_depth + 1)]
    return CostTable(seconds={(b, k): costs.seconds(b, k) for b, k in grid})


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCosts:
    """Seconds of everything a step does. ValueError names the field that is out of range."""

    decode: DecodeCosts
    token_s: float
    """Seconds per prompt token."""
    chunk_s: float = 0.0
    """Seconds per prefill chunk, beside its tokens."""
    context_s: float = 0.0
    """Seconds per prompt token and position before it: attention over what is there."""
    row_context_s: float = 0.0
    """The same of a decoding row, per position of its context."""
    gap_s: float = 0.0
    """Seconds that the device sits idle between two steps although the next one is there."""
    host_s: float = 0.0
    """Seconds the host takes to commit a step and to plan and build the next; hidden while another
    step runs, as in the pipelined loop."""
    noise: float = 0.0
    """Standard deviation of log seconds of a step, about the same mean."""

    def __post_init__(self) -> None:
        names = ("token_s", "chunk_s", "context_s", "row_context_s", "gap_s", "host_s", "noise")
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, not {value}")

    def chunk(self, tokens: int, start: int) -> float:
        """Seconds of one prefill chunk."""
        attention = self.context_s * tokens * (start + tokens / 2)
        return self.chunk_s + self.token_s * tokens + attention

    def cycle(self, rows: int, depth: int, context: int) -> float:
        """Seconds of one decode cycle; `context` positions over all its rows."""
        return self.decode.seconds(rows, depth) + self.row_context_s * context


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceModel:
    """How often drafts stand: one chance per position, given that the ones before did."""

    rates: tuple[float, ...] = (0.75, 0.7, 0.65, 0.6)
    """[j]: of draft j + 1; drafts beyond the last one never stand."""
    variation: float = 0.0
    """Standard deviation, between requests, of the log odds of all positions alike: some texts are
    easier than others."""

    def __post_init__(self) -> None:
        if len(self.rates) > MAX_DEPTH:
            raise ValueError(f"rates: at most {MAX_DEPTH} positions, not {len(self.rates)}")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError("rates must be in [0, 1]")
        if not (math.isfinite(self.variation) and self.variation >= 0):
            raise ValueError("variation must be finite and >= 0")

    def of(self, deviate: float) -> tuple[float, ...]:
        """The chances of a request whose standard normal deviate this is."""
        if not self.variation:
            return self.rates
        shift = math.exp(self.variation * deviate)
        return tuple(r * shift / (1 - r + r * shift) if r < 1 else 1.0 for r in self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """One machine: its size and its costs. ValueError names the field that is out of range."""

    costs: MachineCosts
    name: str = "machine"
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel)
    max_rows: int = 16
    """Rows at once."""
    max_depth: int = 4
    """Most drafts per cycle."""
    context_length: int = 32_768
    """Positions per row."""
    pages: int = 4096
    """KV pages of the pool."""
    page_size: int = 16
    """Tokens per page."""
    boundaries: int = 64
    """Saved prefixes there is memory for; 0 keeps none."""
    prefill_chunk: int = 256
    """Prompt tokens per step."""
    tuned: bool = True
    """The scheduler begins with a cost table, as after `selfdraft tune`; otherwise it learns."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "context_length", "pages", "page_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if not 0 <= self.max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth must be in 0 … {MAX_DEPTH}, not {self.max_depth}")
        if self.boundaries < 0:
            raise ValueError(f"boundaries must be >= 0, not {self.boundaries}")
