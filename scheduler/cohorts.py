"""One decode cycle of one cohort: how deep, with which pages, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping

from engine.plan import DecodeBatch, RowResult
from scheduler.depth import DepthPolicy
from scheduler.memory import RowMemory
from scheduler.pages import PageTables
from scheduler.sequence import Sequence
from scheduler.ticket import Cohort


class CohortPlanner:
    """Plans a cohort's cycles. Free rows and guided ones have one each: a guided cycle costs other
    times, and accepts other shares, than a free one."""

    def __init__(self, *, policy: DepthPolicy, tables: PageTables, memory: RowMemory) -> None:
        self._policy = policy
        self._tables = tables
        self._memory = memory

    def plan(self, rows: list[Sequence], cohort: Cohort, *, alone: bool) -> DecodeBatch | None:
        """A cycle of `rows`, noted in the ticket's `cohort`; None without rows. It is no deeper
        than there are pages for; those of depth 0 the rows have. `alone`: the step runs nothing
        else."""
        if not rows:
            return None
        caps = [sequence.depth_cap for sequence in rows]
        deepest = max(caps)
        while deepest and not self._memory.can_grow(rows, deepest):
            deepest -= 1
        caps = [min(cap, deepest) for cap in caps]
        depth = self._policy.choose(caps, prefilling=not alone)
        limits = [min(cap, depth) for cap in caps]
        for sequence, limit in zip(rows, limits, strict=True):
            self._memory.grow(sequence, sequence.reach(depth))
            sequence.tickets += 1
            sequence.ceiling += limit + 1
            sequence.floor += 1
            cohort.rows.append((sequence, limit + 1))
        cohort.depth = depth
        return DecodeBatch(
            rows=tuple(sequence.row for sequence in rows),
            pages=self._tables.gather([sequence.slot for sequence in rows]),
            depth=depth,
            limits=tuple(limits),
        )

    def estimate(self, rows: list[Sequence]) -> float | None:
        """Seconds that a cycle of `rows` takes in a step that also prefills; None for unknown."""
        return self._policy.estimate([sequence.depth_cap for sequence in rows])

    def observe(
        self, cohort: Cohort, results: list[RowResult | None], *, device_s: float | None
    ) -> None:
        """What a cycle brought; `device_s` is None when the step ran other things too."""
        if cohort.rows:
            self._policy.observe(
                [row for row in results if row],
                depth=cohort.depth,
                rows=len(cohort.rows),
                device_s=device_s,
            )

    def step_times(self) -> Mapping[tuple[int, int], float]:
        return self._policy.step_times()
