"""What is read when Prometheus asks: the scheduler's snapshot, and facts of the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.plan import MAX_DEPTH, EngineInfo, MemoryUse, MtpGate
from scheduler.request import FinishReason, Priority
from scheduler.sequence import Preempted
from scheduler.statistics import Statistics
from scheduler.tenants import OTHER
from service.backend import State
from service.catalogue import CATALOGUE
from service.families import (
    ACCEPTANCE_WINDOW_S,
    DROPPED,
    EVICTIONS,
    MEMORY,
    PARTS,
    PHASES,
    PREFIX,
    RELOADED,
    SCHEDULER_REFUSALS,
    SESSION_ENDS,
    SPAN_RESULTS,
    SUCCESS,
)
from service.tls import Tls
from service.tokens import Tokens

TakeStatistics = Callable[[], Statistics | None]
"""A snapshot of the scheduler, None before there is one. Called from the exporter's threads."""

Values = float | Mapping[Any, float]
"""Of one family: its only series, or one for each value of its label (or of its labels)."""

_NAN: Final = float("nan")


class AcceptanceWindow:
    """Accepted over drafted tokens of the last `window_s` seconds, in steps of a second."""

    def __init__(self, window_s: float = ACCEPTANCE_WINDOW_S) -> None:
        self._window_s = window_s
        self._slots: deque[tuple[int, int, int]] = deque()
        self._drafted = 0
        self._accepted = 0

    def add(self, drafted: int, accepted: int, at: float) -> None:
        second = int(at)
        if self._slots and self._slots[-1][0] == second:
            _, d, a = self._slots.pop()
            self._slots.append((second, d + drafted, a + accepted))
        else:
            self._slots.append((second, drafted, accepted))
        self._drafted += drafted
        self._accepted += accepted
        self._evict(at)

    def ratio(self, now: float) -> float:
        """NaN when nothing was drafted."""
        self._evict(now)
        return self._accepted / self._drafted if self._drafted else _NAN

    def _evict(self, now: float) -> None:
        while self._slots and self._slots[0][0] < now - self._window_s:
            _, drafted, accepted = self._slots.popleft()
            self._drafted -= drafted
            self._accepted -= accepted


@dataclass
class Facts:
    """What the parts of a server know; each puts in its own. Read from the exporter's threads."""

    version: str
    model: tuple[EngineInfo, str] | None = None
    """With the name it is served under."""
    state: Callable[[], State] = lambda: State.LOADING
    stalled_s: Callable[[], float] = lambda: 0.0
    lines_dropped: Callable[[], Mapping[str, int]] = dict
    spans: Callable[[], Mapping[str, int]] = dict
    tls: Tls | None = None
    tokens: Tokens | None = None
    load_s: dict[str, float] = field(default_factory=dict)
    """By phase."""
    planned: dict[str, int] = field(default_factory=dict)
    """Bytes by part of the budget."""
    memory: MemoryUse | None = None
    refusals_unlogged: int = 0


class SnapshotCollector(Collector):
    """Turns a scheduler snapshot and the facts into metrics, when Prometheus asks."""

    def __init__(
        self, take_statistics: TakeStatistics, acceptance: AcceptanceWindow, facts: Facts
    ) -> None:
        self._take_statistics = take_statistics
        self._acceptance = acceptance
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        read = dict(_server(self._facts))
        if self._facts.model is not None:
            read |= _model(self._facts, *self._facts.model)
        statistics = self._take_statistics()
        if statistics is not None:
            read |= _load(statistics, self._acceptance)
            read |= _queue(statistics)
            read |= _totals(statistics)
            read |= _pace(statistics)
            read |= _speculation(statistics)
            read |= _reuse(statistics)
            read |= _ends(statistics)
        for name, values in read.items():
            yield _metric(name, values)


def _metric(name: str, values: Values) -> Metric:
    family = CATALOGUE[name]
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    labels = [label.name for label in family.labels]
    metric: Metric = make(
        f"{PREFIX}{name}", family.text, labels=labels, unit=family.open_metrics_unit
    )
    by_label = values if isinstance(values, Mapping) else {(): values}
    for key, value in by_label.items():
        metric.add_metric([key] if isinstance(key, str) else list(key), value)  # type: ignore[attr-defined]
    return metric


def _server(facts: Facts) -> dict[str, Values]:
    watched = {"tls": facts.tls, "tokens": facts.tokens}
    expires = 0.0
    if facts.tls is not None:  # which reads a changed file, so before its count is
        expires = facts.tls.certificates.expires.timestamp()
    reloads = {
        (what, result): 0.0 if part is None else float(part.reloads[result])
        for what in RELOADED
        for result in ("ok", "failed")
        for part in (watched[what],)
    }
    dropped = {cause: facts.lines_dropped().get(cause, 0) for cause in DROPPED}
    dropped["rate"] += facts.refusals_unlogged
    state = facts.state()
    return {
        "build_info": {(facts.version,): 1},
        "server_state": {each.value: float(each is state) for each in State},
        "load_seconds": {phase: facts.load_s.get(phase, 0.0) for phase in PHASES},
        "event_loop_stall_seconds": facts.stalled_s(),
        "reloads": reloads,
        "tls_certificate_expiry_timestamp_seconds": expires,
        "log_lines_dropped": dropped,
        "spans": {result: facts.spans().get(result, 0) for result in SPAN_RESULTS},
    }


def _model(facts: Facts, info: EngineInfo, name: str) -> dict[str, Values]:
    labels = (
        *(name, info.family, info.dtype, info.quantization, info.device),
        *(str(info.mtp_layers), str(info.max_depth), str(info.context_length)),
    )
    acceptance = info.mtp_gate_acceptance
    memory = facts.memory or MemoryUse(active=0, peak=0, cache=0)
    return {
        "model_info": {labels: 1},
        "mtp_gate": {gate.value: float(gate is info.mtp_gate) for gate in MtpGate},
        "mtp_gate_acceptance_ratio": _NAN if acceptance is None else acceptance,
        "memory_planned_bytes": {part: facts.planned.get(part, 0) for part in PARTS},
        "device_memory_bytes": {kind: getattr(memory, kind) for kind in MEMORY},
    }


def _load(s: Statistics, acceptance: AcceptanceWindow) -> dict[str, Values]:
    return {
        "requests_running": s.running,
        "requests_waiting": s.queued_requests,
        "requests_preempted_waiting": s.preempted_waiting,
        "requests_paused": s.paused,
        "rows": s.max_rows,
        "rows_used": s.rows_held,
        "kv_pages": s.pages_total,
        "kv_pages_used": s.pages_used,
        "kv_pages_peak": s.pages_peak,
        "kv_pages_cached": s.pages_cached,
        "kv_cache_usage_ratio": s.pages_used / s.pages_total if s.pages_total else 0.0,
        "tokens_per_second": s.tokens_per_second,
        "spec_decode_acceptance_rate": acceptance.ratio(s.at),
        "spec_decode_depth": s.depth,
    }


def _queue(s: Statistics) -> dict[str, Values]:
    names = {priority: priority.name.lower() for priority in Priority}
    return {
        "requests_waiting_by_priority": {
            name: s.queued_by_class.get(priority, 0) for priority, name in names.items()
        },
        "queue_oldest_wait_seconds": {
            name: s.oldest_wait_by_class.get(priority, 0.0) for priority, name in names.items()
        },
        "tenant_tokens": {OTHER: 0, **s.served},
        "tenant_boundaries": {OTHER: 0, **s.boundaries_by_tenant},
        "tenant_sessions": {OTHER: 0, **s.sessions_by_tenant},
        "tenant_refused": {(OTHER, reason): 0 for reason in SCHEDULER_REFUSALS}
        | dict(s.refused_by_tenant),
    }


def _totals(s: Statistics) -> dict[str, Values]:
    return {
        "prompt_tokens": s.prompt_tokens,
        "generation_tokens": s.generated_tokens,
        "discarded_tokens": s.discarded_tokens,
        "preemptions": {cause.value: s.preemptions.get(cause, 0) for cause in Preempted},
        "recomputed_tokens": s.recomputed_tokens,
        "requests_admitted": s.submitted,
        "steps": s.steps,
        "cycles": {str(depth): count for depth, count in enumerate(s.cycles_by_depth)},
        "cycle_seconds": {"build": s.build_s, "wait": s.wait_s, "device": s.device_s},
    }


def _pace(s: Statistics) -> dict[str, Values]:
    return {
        "token_gap_exceeded": s.gap_exceeded,
        "contended_seconds": {
            "prefill": s.contended_prefill_s,
            "decode": s.contended_s - s.contended_prefill_s,
        },
        "mixed_step_error_ratio": s.mixed_step_error,
    }


def _speculation(s: Statistics) -> dict[str, Values]:
    return {
        # Every drafting row cycle has a first draft.
        "spec_decode_drafts": s.drafted_per_position[0] if s.drafted_per_position else 0,
        "spec_decode_draft_tokens": s.drafted,
        "spec_decode_accepted_tokens": s.accepted,
        "spec_decode_draft_tokens_per_pos": _per_position(s.drafted_per_position),
        "spec_decode_accepted_tokens_per_pos": _per_position(s.accepted_per_position),
    }


def _per_position(counts: tuple[int, ...]) -> dict[str, int]:
    return {
        str(position): counts[position - 1] if position <= len(counts) else 0
        for position in range(1, MAX_DEPTH + 1)
    }


def _reuse(s: Statistics) -> dict[str, Values]:
    return {
        "prefix_lookups": s.prefix_lookups,
        "prefix_hits": s.prefix_hits,
        "prefix_cached_tokens": s.cached_tokens,
        "prefix_evictions": dict.fromkeys(EVICTIONS, 0) | dict(s.evictions),
        "sessions": s.sessions,
        "sessions_ended": dict.fromkeys(SESSION_ENDS, 0) | dict(s.sessions_ended),
        "boundaries": s.boundaries_total,
        "boundaries_used": s.boundaries_used,
    }


def _ends(s: Statistics) -> dict[str, Values]:
    success = dict.fromkeys(SUCCESS.values(), 0)
    cancelled = {}
    for reason in FinishReason:
        count = s.finished.get(reason, 0)
        if reason in SUCCESS:
            success[SUCCESS[reason]] += count
        else:
            cancelled[reason.value] = count
    return {"request_success": success, "requests_cancelled": cancelled}
