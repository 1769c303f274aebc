"""The decode cycles of a step: which rows, how deep, with which pages, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.plan import DecodeBatch, RowResult
from scheduler.depth import DepthPolicy
from scheduler.memory import RowMemory
from scheduler.pages import PageTables
from scheduler.sequence import Sequence
from scheduler.ticket import Cohort, Ticket


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohorts:
    """The two cohorts of a core and their planners, over its rows."""

    rows: Mapping[int, Sequence]
    free: CohortPlanner
    guided: CohortPlanner

    def ready(self, served: set[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Rows that decode now, of those that have pages for it: free ones and guided ones."""
        ready = [s for s in self.rows.values() if s in served and s.can_decode]
        guided = [s for s in ready if s.guided]
        return ([s for s in ready if not s.guided] if guided else ready), guided

    def estimates(self, free: list[Sequence], guided: list[Sequence]) -> list[float | None]:
        """Seconds that each cycle of these rows takes beside prompts; None for unknown."""
        cohorts = ((self.free, free), (self.guided, guided))
        return [planner.estimate(rows) for planner, rows in cohorts if rows]

    def plan(
        self, ticket: Ticket, free: list[Sequence], guided: list[Sequence]
    ) -> tuple[DecodeBatch | None, DecodeBatch | None]:
        """A cycle of each, noted in `ticket`, which has its chunks already."""
        alone = not (ticket.chunks or (free and guided))
        return (
            self.free.plan(free, ticket.decode, alone=alone),
            self.guided.plan(guided, ticket.guided, alone=alone),
        )

    def of(self, ticket: Ticket) -> tuple[tuple[CohortPlanner, Cohort], ...]:
        """Each planner with its cohort of a step."""
        return (self.free, ticket.decode), (self.guided, ticket.guided)
