"""Is there room for one more? Asked before a row's chunk is built and before a row joins a cohort.

A budget is an estimate made at load, and other things live in the process. So what is really in use
is looked at again whenever a step is about to take more, and the row that would take it is refused
alone, before its arrays exist, instead of an allocation failing in the middle of everybody's step.

Chunks that run in one pass ask together, for their padding too; where there is no room for that,
each asks for itself (`engine.building`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.budget import LOGIT_COPIES, RULED_LOGIT_COPIES, Costs, size
from engine.logprobs import SLICE
from engine.padding import Shape
from engine.plan import PrefillChunk, RowSpec
from engine.rules import has_rules, needs_counts
from engine.step import OutOfMemoryError

COUNTED_BYTES = 5
"""Per token of the vocabulary and row of a cohort with penalties: an int32 count and a bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Upper estimates of the bytes parts of a step take while it runs, from a model's costs."""

    costs: Costs
    page_size: int

    def chunk(
        self, tokens: int, pages: int, *, rows: int = 1, logits: int = 0, ruled: bool = False
    ) -> int:
        """A prefill pass of `rows` rows with this many pages each; `tokens`: over all rows, what
        fills them up included. `logits`: positions whose logits are looked at together; `ruled`:
        some row has a rule or a constraint."""
        costs = self.costs
        states = rows * costs.prefill_row_bytes
        ran = costs.prefill(tokens, pages * self.page_size)
        copies = RULED_LOGIT_COPIES if ruled else LOGIT_COPIES
        looked_at = logits * copies * costs.logit_bytes
        gathered = rows * pages * costs.gather_bytes
        return ran + gathered + looked_at + states

    def cohort(
        self, rows: int, pages: int, *, width: int = 1, ruled: bool = False, counting: bool = False
    ) -> int:
        """A decode cycle of `width` positions; `pages` over all rows' tables. `ruled`: some row has
        a rule or a constraint; `counting`: some row's penalties count tokens."""
        costs = self.costs
        row = costs.verify_row_bytes
        if ruled:
            row += width * (RULED_LOGIT_COPIES - LOGIT_COPIES) * costs.logit_bytes
        if counting:
            row += costs.logit_bytes * COUNTED_BYTES // 4
        return rows * row + pages * costs.gather_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Compares what is in use, and what a step is to take, with the limit."""

    estimator: Estimator
    limit: int
    """Bytes the engine may hold at any time: the budget's working set."""
    in_use: Callable[[], int]
    clear: Callable[[], None]
    """Gives back what the allocator keeps for later."""

    def refusal(self, need: int, wait: Callable[[], None]) -> str | None:
        """Why `need` more bytes do not fit, or None. Tries to make room: clears the allocator's
        cache, then lets `wait` finish the running step, whose transients are in use until then."""
        for relief in (self.clear, wait, self.clear):
            if self.in_use() + need <= self.limit:
                return None
            relief()
        used = self.in_use()
        if used + need <= self.limit:
            return None
        return (
            f"out of memory: the step needs {size(need)} beside {size(used)} in use, "
            f"the limit is {size(self.limit)}"
        )


class Room:
    """Room for the parts of one engine's steps; all of it there is when nobody keeps watch."""

    def __init__(self, preflight: Preflight | None, wait: Callable[[], None]) -> None:
        """`wait` lets the running step finish."""
        self._preflight = preflight
        self._wait = wait

    def check(self, need: int) -> None:
        """Raises OutOfMemoryError unless there is room for `need` bytes while the step runs."""
        refusal = None if self._preflight is None else self._preflight.refusal(need, self._wait)
        if refusal is not None:
            raise OutOfMemoryError(refusal)

    def chunk_bytes(
        self,
        chunks: Sequence[PrefillChunk],
        specs: Sequence[RowSpec],
        dimensions: tuple[int, int, int],
    ) -> int:
        """What a pass over these rows' chunks takes; see `Prefill.dimensions`."""
        if self._preflight is None:
            return 0
        rows, width, pages = dimensions
        logits = 0
        for chunk, spec in zip(chunks, specs, strict=True):
            size = len(chunk.tokens)
            reported = 0 if spec.prompt_logprobs is None else min(size, 2 * SLICE)
            logits += max(reported, int(chunk.last))
        last = [spec for chunk, spec in zip(chunks, specs, strict=True) if chunk.last]
        return self._preflight.estimator.chunk(
            rows * width, pages, rows=rows, logits=logits, ruled=any(map(has_rules, last))
        )

    def cohort_bytes(
        self, specs: Sequence[RowSpec], columns: int, *, depth: int, shape: Shape | None
    ) -> int:
        """What a cycle of these rows takes, with this many pages each."""
        if self._preflight is None:
            return 0
        rows = len(specs)
        if shape is not None:
            rows, columns, depth = shape.rows, shape.columns, shape.depth
        counting = any(needs_counts(spec) for spec in specs)
        return self._preflight.estimator.cohort(
            rows,
            rows * columns,
            width=depth + 1,
            ruled=any(has_rules(spec) for spec in specs),
            counting=counting,
        )
