"""Is there room for one more? Asked before a row's chunk is built and before a row joins a cohort.

A budget is an estimate made at load, and other things live in the process. So what is really in use
is looked at again whenever a step is about to take more, and the row that would take it is refused
alone, before its arrays exist, instead of an allocation failing in the middle of everybody's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.budget import Costs, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Upper estimates of the bytes parts of a step take while it runs, from a model's costs."""

    costs: Costs
    page_size: int

    def chunk(self, tokens: int, pages: int) -> int:
        """A prefill chunk of a row with this many pages."""
        scores = pages * self.page_size * self.costs.score_bytes
        return tokens * (self.costs.prefill_token_bytes + scores) + pages * self.costs.gather_bytes

    def cohort(self, rows: int, pages: int) -> int:
        """A decode cycle; `pages` over all rows' tables."""
        return rows * self.costs.verify_row_bytes + pages * self.costs.gather_bytes


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
