"""A step's result, taken to all that it concerns: rows, prompts, depth, pace, counters."""

from __future__ import annotations

from engine.plan import EngineFailedError, StepResult
from scheduler.cohorts import Cohorts
from scheduler.delivery import Delivery
from scheduler.pace import Pace
from scheduler.prefill import PrefillPlanner
from scheduler.statistics import Meter
from scheduler.ticket import Ticket


class Results:
    """Applies results over state that `SchedulerCore` owns."""

    def __init__(
        self,
        *,
        delivery: Delivery,
        prefill: PrefillPlanner,
        cohorts: Cohorts,
        pace: Pace,
        meter: Meter,
    ) -> None:
        self._delivery = delivery
        self._prefill = prefill
        self._cohorts = cohorts
        self._pace = pace
        self._meter = meter

    def apply(self, ticket: Ticket, result: StepResult, now: float) -> None:
        """`result` is that of the step that `ticket` stands for. Raises EngineFailedError when it
        names rows that the step did not run."""
        rows = {row.row: row for row in result.rows}
        tokens = 0
        for sequence, chunk in ticket.chunks:
            tokens += self._delivery.chunk(sequence, chunk, rows.pop(sequence.row, None), now)
        self._prefill.saved(ticket)
        time = result.device_s if ticket.alone else None
        for planner, cohort in self._cohorts.of(ticket):
            decoded = [rows.pop(sequence.row, None) for sequence, _ in cohort.rows]
            tokens += self._delivery.cohort(cohort, decoded, now)
            planner.observe(cohort, decoded, device_s=time)
        if rows:
            raise EngineFailedError(f"step {result.step} has results for rows it did not run")
        self._pace.observe(ticket.load, result.device_s, decoded=ticket.decodes)
        self._meter.step(result, prompt_tokens=ticket.prompt_tokens, tokens=tokens, now=now)
