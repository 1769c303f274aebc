"""A step on its way through the engine, and what becomes of rows that it does not run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx

from engine.executor import Pending
from engine.plan import RowResult, StepPlan
from engine.results import Output
from engine.rows import RowArrays


@dataclass(slots=True)
class Step:
    """A submitted step: what to wait for and how to read it."""

    plan: StepPlan
    outputs: list[Output] = field(default_factory=list)
    """In result order."""
    pending: list[mx.array] = field(default_factory=list)
    """Everything the step must compute; emptied once the device has it, because a reference would
    keep the next step from updating the page pools in place."""
    before: list[tuple[tuple[int, ...], RowArrays]] = field(default_factory=list)
    """Cohorts it runs and their state before it, for rows that turn out to have ended already."""
    first: list[mx.array] = field(default_factory=list)
    """What must be done before the rest may start (see `PagePool.copy`)."""
    ends: list[mx.array] = field(default_factory=list)
    """Small arrays whose presence means that the step is done."""
    lost: dict[tuple[str, int], RowResult] = field(default_factory=dict)
    """Results of rows that this step did not run, by part of the plan and row."""
    need: int = 0
    """Bytes it is estimated to take while it runs, as far as it is built."""
    build_s: float = 0.0
    waited_s: float = 0.0
    """Part of `submit` spent waiting for the device."""
    began: float = 0.0
    """When building it began."""
    started: float | None = None
    """When the device could begin; None while it has nothing of the step."""
    run: Pending[tuple[float, float]] | None = None
    """What an executor has of the step: when it begins and ends."""
    ended: float | None = None
    """When the step was seen to be done, before it was collected."""
    gap_s: float | None = None

    @property
    def runs_rows(self) -> bool:
        return bool(self.plan.prefill or self.plan.decode or self.plan.guided)


class OutOfMemoryError(Exception):
    """There is no room for a row's part of a step."""


class GoneError(Exception):
    """The plan names a row whose fault its scheduler has not read yet."""


def rows_of(plan: StepPlan) -> Iterator[int]:
    """Rows that a plan runs."""
    yield from (chunk.row for chunk in plan.prefill)
    for batch in (plan.decode, plan.guided):
        if batch is not None:
            yield from batch.rows


def in_plan_order(
    plan: StepPlan, ran: Iterable[RowResult], lost: dict[tuple[str, int], RowResult]
) -> tuple[RowResult, ...]:
    """Results of rows that ran, a row's own in order, and of those that did not, in plan order."""
    rest: dict[int, deque[RowResult]] = {}
    for result in ran:
        rest.setdefault(result.row, deque()).append(result)
    results: list[RowResult] = []
    parts = [("prefill", chunk.row) for chunk in plan.prefill]
    for part, batch in (("decode", plan.decode), ("guided", plan.guided)):
        parts += [(part, row) for row in (() if batch is None else batch.rows)]
    for place in parts:
        if place in lost:
            results.append(lost[place])
        elif rest.get(place[1]):
            results.append(rest[place[1]].popleft())
    return tuple(results)
