"""Numbers about a scheduler: running counters inside, a frozen snapshot outside."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.plan import MAX_DEPTH, RowResult, StepPlan, StepResult
from scheduler.request import FinishReason, Priority
from scheduler.sequence import Preempted, per_position


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot. Gauges describe now; counters only grow."""

    at: float
    """Scheduler-clock seconds."""

    queued_requests: int
    queued_tokens: int
    """Prompt tokens waiting in the queue."""
    running: int
    """Started requests that have not ended, prefilling and paused ones included."""
    prefilling: int
    prefilling_tokens: int
    """Prompt tokens that running requests have still to hand to the engine."""
    paused: int
    """Running requests whose reader does not keep up."""
    guided_rows: int
    """Running requests with a constraint."""
    rows_held: int
    """Rows with device state, ended ones that wait for their last step included."""
    max_rows: int
    in_flight: int
    """Steps planned and not committed."""
    pages_total: int
    pages_used: int
    """Distinct pages held by rows or prefix entries."""
    pages_cached: int
    """Pages held by prefix entries only: given up when a row needs them."""
    pages_peak: int
    entries: int
    """Prefixes kept."""
    boundaries_used: int
    """Boundaries of the engine they take: one each."""
    boundaries_total: int
    """Boundaries the engine has memory for; 0 when nothing is kept."""
    boundaries_by_tenant: Mapping[str, int]
    """Boundaries used, by tenant: those with a policy of their own, and "other"."""
    sessions: int
    """Sessions with a pinned prefix."""
    sessions_by_tenant: Mapping[str, int]
    """The same, by tenant as above."""
    tokens_per_second: float
    """Generated tokens, over `SchedulerConfig.rate_window_s`."""
    prompt_tokens_per_second: float
    depth: int
    """Depth of the newest decode cycle planned."""
    step_s: float
    """Smoothed device seconds per step."""
    step_times: Mapping[tuple[int, int], float]
    """Seconds per (batch bucket, depth) the depth controller believes in."""
    queued_by_class: Mapping[Priority, int]
    """By the class they came with; all classes."""
    oldest_wait_by_class: Mapping[Priority, float]
    """Seconds since the oldest of them came; 0 where nobody waits."""
    oldest_wait_s: float
    """The longest of these."""
    served: Mapping[str, int]
    """Tokens served, prompt tokens that were prefilled and generated ones, by tenant: those with a
    policy of their own, and "other"."""
    preempted_waiting: int
    """Requests in the queue that have run before."""

    submitted: int
    """Requests accepted."""
    refused: Mapping[str, int]
    """By reason: those of `Refusal`, invalid, not_running."""
    refused_by_tenant: Mapping[tuple[str, str], int]
    """The same by (tenant, reason): tenants as above. Those that have occurred."""
    finished: Mapping[FinishReason, int]
    prompt_tokens: int
    """Prompt tokens prefilled."""
    generated_tokens: int
    """Tokens handed to streams."""
    discarded_tokens: int
    """Tokens the device emitted for requests that had already ended (cancelled)."""
    wasted_rows: int
    """Row cycles spent on rows that had already finished on the device."""
    steps: int
    cycles: int
    """Decode cycles: cohorts run. A step that ran a free and a guided cohort counts twice."""
    guided_cycles: int
    """Those of them that were guided."""
    guided_row_cycles: int
    """Sum of guided cohort sizes over them."""
    row_cycles: int
    """Sum of cohort sizes over cycles."""
    drafted: int
    accepted: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    cycles_by_depth: tuple[int, ...]
    """[K]: cycles at depth K, K = 0 … 8."""
    build_s: float
    wait_s: float
    device_s: float
    """Sums of the `StepResult` fields of the same names."""
    gap_s: float
    """The same, where there was a step before to be idle after."""
    mixed_step_error: float
    """Smoothed |estimated - actual| / actual seconds of steps with both chunks and a cycle."""
    gap_exceeded: int
    """Steps with a decode cycle that took longer than `max_token_gap_s`."""
    contended_s: float
    """Seconds of steps in which a row decoded and a prompt could run, with `max_token_gap_s`."""
    contended_prefill_s: float
    """Those of them that prompts took, as estimated: their share is to be `prefill_share`."""
    prefix_lookups: int
    """Started requests that might have begun with a saved prefix."""
    prefix_hits: int
    """Those of them that did."""
    cached_tokens: int
    """Prompt tokens they took from saved prefixes."""
    evictions: Mapping[str, int]
    """Prefix entries evicted, by cause: pages or boundaries (somebody needed them), fault (the row
    that left it broke), import (a file's prefix needed room), flush, engine_failed."""
    preemptions: Mapping[str, int]
    """By cause: pages (a row that goes first could not grow), priority (a higher class waited)."""
    recomputed_tokens: int
    """Positions that were computed again, or are about to be, after preemptions."""
    sessions_ended: Mapping[str, int]
    """Pins that ended before their client said so, by cause: ttl, max_sessions,
    tenant_max_sessions, or that of an eviction."""


class Rate:
    """Amounts per second over a sliding window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._first: float | None = None

    def add(self, amount: int, now: float) -> None:
        if self._first is None:
            self._first = now
        self._samples.append((now, amount))
        self._sum += amount
        self._evict(now)

    def per_second(self, now: float) -> float:
        self._evict(now)
        if self._first is None:
            return 0.0
        return self._sum / min(self._window_s, max(now - self._first, 1.0))

    def _evict(self, now: float) -> None:
        while self._samples and self._samples[0][0] <= now - self._window_s:
            self._sum -= self._samples.popleft()[1]


class Meter:
    """The counters behind `Statistics`, advanced by the core."""

    def __init__(self, *, window_s: float) -> None:
        self.submitted = 0
        self.refused: Counter[str] = Counter()
        self.refused_by_tenant: Counter[tuple[str, str]] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.discarded_tokens = 0
        self.wasted_rows = 0
        self.steps = 0
        self.cycles_by_depth = [0] * (MAX_DEPTH + 1)
        self.row_cycles = 0
        self.depth = 0
        self.step_s = 0.0
        self.guided_cycles = self.guided_row_cycles = 0
        self.build_s = self.wait_s = self.device_s = self.gap_s = 0.0
        self.tokens_per_request = 0.0
        """Smoothed completion tokens per finished request."""
        self.preempted: Counter[Preempted] = Counter()
        self.generated = Rate(window_s)
        self.prefilled = Rate(window_s)
        self._drafted = [0] * (MAX_DEPTH + 1)
        self._accepted = [0] * (MAX_DEPTH + 1)

    def refuse(self, reason: str, tenant: str) -> None:
        """A request was refused; `tenant` as in statistics."""
        self.refused[reason] += 1
        self.refused_by_tenant[tenant, str(reason)] += 1

    def row(self, result: RowResult) -> None:
        if result.drafted:
            self._drafted[result.drafted] += 1
            self._accepted[result.accepted] += 1

    def step(self, result: StepResult, *, prompt_tokens: int, tokens: int, now: float) -> None:
        self.steps += 1
        self.build_s += result.build_s
        self.wait_s += result.wait_s
        self.device_s += result.device_s
        self.gap_s += result.gap_s or 0.0
        if prompt_tokens or result.rows:
            self.step_s += (0.1 if self.step_s else 1.0) * (result.device_s - self.step_s)
        if prompt_tokens:
            self.prompt_tokens += prompt_tokens
            self.prefilled.add(prompt_tokens, now)
        if tokens:
            self.generated_tokens += tokens
            self.generated.add(tokens, now)

    def cohorts(self, plan: StepPlan) -> None:
        """A step's decode cycles."""
        for batch in (plan.guided, plan.decode):
            if batch is not None:
                self.depth = batch.depth
                self.cycles_by_depth[batch.depth] += 1
                self.row_cycles += len(batch.rows)
        if plan.guided is not None:
            self.guided_cycles += 1
            self.guided_row_cycles += len(plan.guided.rows)

    def end(self, reason: FinishReason, tokens: int) -> None:
        self.finished[reason] += 1
        if tokens:
            weight = 0.1 if self.tokens_per_request else 1.0
            self.tokens_per_request += weight * (tokens - self.tokens_per_request)

    def seconds_per_request(self, now: float) -> float:
        """Seconds between two requests finishing, from measured throughput; 1 before any."""
        rate = self.generated.per_second(now)
        if not rate or not self.tokens_per_request:
            return 1.0
        return self.tokens_per_request / rate

    def snapshot(self, now: float) -> dict[str, Any]:
        """The counters and rates of `Statistics`, by field."""
        drafted = per_position(self._drafted)
        return {
            "submitted": self.submitted,
            "refused": dict(self.refused),
            "refused_by_tenant": dict(self.refused_by_tenant),
            "finished": dict(self.finished),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "discarded_tokens": self.discarded_tokens,
            "wasted_rows": self.wasted_rows,
            "steps": self.steps,
            "cycles": sum(self.cycles_by_depth),
            "row_cycles": self.row_cycles,
            "drafted": sum(count * n for n, count in enumerate(self._drafted)),
            "accepted": sum(count * n for n, count in enumerate(self._accepted)),
            "drafted_per_position": drafted,
            "accepted_per_position": per_position(self._accepted, len(drafted)),
            "cycles_by_depth": tuple(self.cycles_by_depth),
            "build_s": self.build_s,
            "wait_s": self.wait_s,
            "step_s": self.step_s,
            "depth": self.depth,
            "tokens_per_second": self.generated.per_second(now),
            "prompt_tokens_per_second": self.prefilled.per_second(now),
            "device_s": self.device_s,
            "gap_s": self.gap_s,
            "preemptions": {cause.value: self.preempted[cause] for cause in Preempted},
            "guided_cycles": self.guided_cycles,
            "guided_row_cycles": self.guided_row_cycles,
        }
