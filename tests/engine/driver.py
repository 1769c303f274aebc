"""A hand-driven engine for tests: rows join and decode in whatever order the test likes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.plan import (
    DecodeBatch,
    Engine,
    PrefillChunk,
    RowSpec,
    StepPlan,
    page_array,
    pages_needed,
)
from engine.solo import SoloResult


class Driver:
    """Submits one step per call; keeps up to `in_flight` of them uncollected."""

    def __init__(self, engine: Engine, *, in_flight: int = 1) -> None:
        self.engine = engine
        self.results: dict[int, SoloResult] = {}
        self.pages: dict[int, list[int]] = {}
        self.guided: set[int] = set()
        self._in_flight = in_flight
        self._flying = 0
        self._step = 0
        self._next_page = 1

    @property
    def active(self) -> list[int]:
        """Rows that have joined and, as far as results tell, not ended."""
        return [row for row in self.pages if not self.results[row].ended]

    def join(
        self, row: int, prompt: Sequence[int], spec: RowSpec, pages: list[int] | None = None
    ) -> None:
        """Prefill a row, on given pages or fresh ones. Rows with a constraint decode in guided."""
        if spec.constraint is not None:
            self.guided.add(row)
        if pages is None:
            need = pages_needed(len(prompt) + spec.max_tokens, self.engine.info.page_size)
            pages = list(range(self._next_page, self._next_page + need))
            self._next_page += need
        chunk = PrefillChunk(
            row=row,
            tokens=np.asarray(prompt, dtype=np.int32),
            start=0,
            pages=page_array(pages),
            last=True,
            spec=spec,
        )
        self._submit(StepPlan(step=self._step, prefill=(chunk,)))
        self.results.setdefault(row, SoloResult(row=row))
        self.pages[row] = pages
        self._settle()

    def decode(self, rows: list[int], *, depth: int, even_finished: bool = False) -> None:
        """One cycle for these rows, without those known to have ended unless asked."""
        rows = [r for r in rows if even_finished or not self.results[r].ended]
        if not rows:
            return
        plan = StepPlan(
            step=self._step,
            decode=self._cohort([row for row in rows if row not in self.guided], depth),
            guided=self._cohort([row for row in rows if row in self.guided], depth),
        )
        self._submit(plan)
        self._settle()

    def _cohort(self, rows: list[int], depth: int) -> DecodeBatch | None:
        if not rows:
            return None
        width = max(len(self.pages.get(row, [])) for row in rows)
        table = [self.pages.get(row, []) for row in rows]
        return DecodeBatch(
            rows=tuple(rows),
            pages=np.stack([page_array(p + [0] * (width - len(p))) for p in table]),
            depth=depth,
            limits=(depth,) * len(rows),
        )

    def release(self, row: int) -> list[int]:
        """Forget a row; returns its pages."""
        self._submit(StepPlan(step=self._step, release=(row,)))
        self._settle()
        return self.pages.pop(row)

    def drain(self) -> None:
        """Collect everything in flight."""
        while self._flying:
            self._collect()

    def _submit(self, plan: StepPlan) -> None:
        self.engine.submit(plan)
        self._step += 1
        self._flying += 1

    def _settle(self) -> None:
        while self._flying >= self._in_flight:
            self._collect()

    def _collect(self) -> None:
        self._flying -= 1
        for result in self.engine.collect().rows:
            self.results[result.row].add(result)
