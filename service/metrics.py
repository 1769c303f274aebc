"""Every Prometheus metric of the service, in one place. All names start with `selfdraft_`.

What the scheduler counts is read from its statistics when Prometheus asks (`_SchedulerCollector`),
so nothing is counted twice; what only the service sees is observed here: latencies, refusals,
windowed acceptance. Labels are from closed sets: no request, model or client can add a series.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MAX_DEPTH, EngineInfo
from scheduler.loop import StepRecord
from scheduler.request import FinishReason, Priority, Tokens, Usage
from scheduler.sequence import Preempted
from scheduler.statistics import Statistics
from scheduler.tenants import OTHER
from service.errors import Reason
from service.sampling import mode_name
from service.text.grammar import Form

ACCEPTANCE_WINDOW_S: Final = 60.0

_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_REQUEST: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAP: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)

MODES: Final = (
    pb.SPECULATION_MODE_OFF,
    pb.SPECULATION_MODE_REJECTION,
    pb.SPECULATION_MODE_COUPLED,
)

EVICTIONS: Final = ("pages", "boundaries", "fault", "import", "flush", "engine_failed")
SESSION_ENDS: Final = ("ttl", "max_sessions", *EVICTIONS)
"""Causes, each of which has a series before it occurs."""

_SUCCESS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}

REFUSALS: Final = (
    Reason.INVALID_ARGUMENT,
    Reason.DUPLICATE_REQUEST,
    Reason.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED,
    Reason.QUEUE_FULL,
    Reason.TENANT_LIMIT,
    Reason.DEADLINE_UNREACHABLE,
    Reason.TOO_MANY_CALLS,
    Reason.SLOW_SENDER,
    Reason.CANCELLED,
    Reason.DEADLINE_EXCEEDED,
    Reason.LOADING,
    Reason.DRAINING,
    Reason.ENGINE_FAILED,
    Reason.INTERNAL,
)
"""CANCELLED and DEADLINE_EXCEEDED: of calls whose client left before they were admitted."""

TakeStatistics = Callable[[], Statistics | None]
"""A snapshot of the scheduler, None before there is one. Called from the exporter's threads."""


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, take_statistics: TakeStatistics, *, version: str) -> None:
        self.registry = CollectorRegistry()
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Admission to first token.", _LATENCY
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; a burst of n tokens after t seconds counts n times "
            "as t/n.",
            _TOKEN,
        )
        self._e2e_latency = self._histogram(
            "e2e_request_latency_seconds",
            "Admission to end, of sequences that ended with stop or length.",
            _REQUEST,
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "Admission to the first prefill chunk.", _LATENCY
        )
        self._refused = Counter(
            "selfdraft_requests_refused",
            "Generate calls refused before admission, and calls whose token does not allow them.",
            ["reason"],
            registry=self.registry,
        )
        for reason in REFUSALS:
            self._refused.labels(reason.value)
        self._by_mode = Counter(
            "selfdraft_spec_decode_requests",
            "Generate calls admitted, by how their drafts are verified.",
            ["mode"],
            registry=self.registry,
        )
        self._guided = Counter(
            "selfdraft_guided_requests",
            "Generate calls admitted whose text must have a form.",
            ["form"],
            registry=self.registry,
        )
        for mode in MODES:
            self._by_mode.labels(mode_name(mode))
        for form in get_args(Form):
            self._guided.labels(form)
        self._host_gap = self._histogram(
            "host_gap_seconds",
            "Time the device sat idle between two steps that followed each other.",
            _GAP,
        )
        self._acceptance = AcceptanceWindow(ACCEPTANCE_WINDOW_S)
        self._collector = _SchedulerCollector(take_statistics, self._acceptance, version)
        self.registry.register(self._collector)
        # CPU seconds, resident memory, start time, open files of this process (Linux only).
        ProcessCollector(registry=self.registry)

    def model_loaded(self, info: EngineInfo, name: str) -> None:
        """Makes the served model's facts known."""
        self._collector.model = (info, name)

    def refused(self, reason: Reason) -> None:
        """A Generate call was refused before admission, or any call for its token."""
        self._refused.labels(reason.value).inc()

    def admitted(self, mode: pb.SpeculationMode, form: Form | None) -> None:
        """A Generate call was admitted, to draft in this `SpeculationMode`."""
        self._by_mode.labels(mode_name(mode)).inc()
        if form is not None:
            self._guided.labels(form).inc()

    def step(self, record: StepRecord) -> None:
        """The engine ran a step."""
        if record.gap_s is not None:
            self._host_gap.observe(record.gap_s)

    def burst(self, tokens: Tokens, *, previous_at: float | None, submitted_at: float) -> None:
        """A cycle emitted tokens for a request whose previous burst came at `previous_at`."""
        self._acceptance.add(tokens.drafted, tokens.accepted, tokens.at)
        if previous_at is None:
            self._time_to_first_token.observe(max(tokens.at - submitted_at, 0.0))
            return
        share = max(tokens.at - previous_at, 0.0) / len(tokens.ids)
        for _ in tokens.ids:
            self._inter_token_latency.observe(share)

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        """A request ended, well or not."""
        start = usage.submitted_at
        if usage.started_at is not None:
            self._queue_time.observe(max(usage.started_at - start, 0.0))
        if reason in _SUCCESS and usage.finished_at is not None:
            self._e2e_latency.observe(max(usage.finished_at - start, 0.0))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"selfdraft_{name}", text, buckets=buckets, registry=self.registry)


class AcceptanceWindow:
    """Accepted over drafted tokens of the last `window_s` seconds, in steps of a second."""

    def __init__(self, window_s: float) -> None:
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
        return self._accepted / self._drafted if self._drafted else float("nan")

    def _evict(self, now: float) -> None:
        while self._slots and self._slots[0][0] < now - self._window_s:
            _, drafted, accepted = self._slots.popleft()
            self._drafted -= drafted
            self._accepted -= accepted


class _SchedulerCollector(Collector):
    """Turns a scheduler snapshot into metrics, when Prometheus asks."""

    def __init__(
        self, take_statistics: TakeStatistics, acceptance: AcceptanceWindow, version: str
    ) -> None:
        self._take_statistics = take_statistics
        self._acceptance = acceptance
        self._version = version
        self.model: tuple[EngineInfo, str] | None = None

    def collect(self) -> Iterable[Metric]:
        yield _info("build_info", "The running server.", {"version": self._version})
        if self.model is not None:
            yield self._model_info(*self.model)
        statistics = self._take_statistics()
        if statistics is not None:
            yield from self._load(statistics)
            yield from _queue(statistics)
            yield from _totals(statistics)
            yield from _pace(statistics)
            yield from _speculation(statistics)
            yield from _reuse(statistics)
            yield from _ends(statistics)

    def _model_info(self, info: EngineInfo, name: str) -> Metric:
        labels = {
            "model": name,
            "family": info.family,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "device": info.device,
            "mtp_layers": str(info.mtp_layers),
            "max_depth": str(info.max_depth),
            "context_length": str(info.context_length),
        }
        return _info("model_info", "The served model.", labels)

    def _load(self, s: Statistics) -> Iterable[Metric]:
        ratio = s.pages_used / s.pages_total if s.pages_total else 0.0
        yield _gauge("requests_running", "Requests with a row.", s.running)
        yield _gauge("requests_waiting", "Requests in the queue.", s.queued_requests)
        yield _gauge(
            "requests_preempted_waiting",
            "Requests in the queue that have run before.",
            s.preempted_waiting,
        )
        yield _gauge("requests_paused", "Running requests whose reader lags.", s.paused)
        yield _gauge("kv_pages", "KV cache pages.", s.pages_total)
        yield _gauge("kv_pages_used", "KV cache pages in use.", s.pages_used)
        yield _gauge("kv_pages_peak", "Most KV cache pages ever in use.", s.pages_peak)
        yield _gauge("kv_cache_usage_ratio", "KV cache pages in use over all, 0 to 1.", ratio)
        yield _gauge(
            "tokens_per_second", "Tokens generated per second, recently.", s.tokens_per_second
        )
        yield _gauge(
            "spec_decode_acceptance_rate",
            f"Accepted over drafted tokens of the last {ACCEPTANCE_WINDOW_S:.0f} s; NaN without.",
            self._acceptance.ratio(s.at),
        )
        yield _gauge("spec_decode_depth", "Drafts per cycle in the newest cycle.", s.depth)


def _queue(s: Statistics) -> Iterable[Metric]:
    waiting = GaugeMetricFamily(
        "selfdraft_requests_waiting_by_priority",
        "Requests in the queue, by the priority they came with.",
        labels=["priority"],
    )
    oldest = GaugeMetricFamily(
        "selfdraft_queue_oldest_wait_seconds",
        "How long the oldest of them has waited; 0 without any.",
        labels=["priority"],
    )
    for priority in Priority:
        name = priority.name.lower()
        waiting.add_metric([name], s.queued_by_class.get(priority, 0))
        oldest.add_metric([name], s.oldest_wait_by_class.get(priority, 0.0))
    yield waiting
    yield oldest
    yield _labelled(
        "tenant_tokens",
        "Tokens served, prefilled and generated, by tenants with a policy and all others.",
        "tenant",
        {OTHER: 0, **s.served},
    )


def _totals(s: Statistics) -> Iterable[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens prefilled.", s.prompt_tokens)
    yield _counter("generation_tokens", "Tokens generated for streams.", s.generated_tokens)
    yield _counter(
        "discarded_tokens", "Tokens generated for requests that had ended.", s.discarded_tokens
    )
    given_up = {cause.value: s.preemptions.get(cause, 0) for cause in Preempted}
    yield _labelled("preemptions", "Rows given up, to be computed again.", "cause", given_up)
    yield _counter(
        "recomputed_tokens", "Positions computed again after preemptions.", s.recomputed_tokens
    )
    yield _counter("requests_admitted", "Sequences admitted.", s.submitted)
    yield _counter("steps", "Engine steps.", s.steps)
    cycles = CounterMetricFamily(
        "selfdraft_cycles", "Decode cycles, by their depth.", labels=["depth"]
    )
    for depth, count in enumerate(s.cycles_by_depth):
        cycles.add_metric([str(depth)], count)
    yield cycles
    phases = CounterMetricFamily(
        "selfdraft_cycle_seconds",
        "Time spent in engine steps: build (host), wait (host, on the device), device.",
        labels=["phase"],
    )
    for phase, seconds in (("build", s.build_s), ("wait", s.wait_s), ("device", s.device_s)):
        phases.add_metric([phase], seconds)
    yield phases


def _pace(s: Statistics) -> Iterable[Metric]:
    yield _counter(
        "token_gap_exceeded",
        "Steps with a decode cycle that took longer than --max-token-gap.",
        s.gap_exceeded,
    )
    contended = CounterMetricFamily(
        "selfdraft_contended_seconds",
        "Time of steps in which rows decoded and prompts waited, under --max-token-gap: prefill is "
        "to have --prefill-share of it.",
        labels=["work"],
    )
    contended.add_metric(["prefill"], s.contended_prefill_s)
    contended.add_metric(["decode"], s.contended_s - s.contended_prefill_s)
    yield contended
    yield _gauge(
        "mixed_step_error_ratio",
        "Error of the estimated time of steps with prompts and a cycle, over the time; smoothed.",
        s.mixed_step_error,
    )


def _speculation(s: Statistics) -> Iterable[Metric]:
    # Every drafting row cycle has a first draft.
    drafts = s.drafted_per_position[0] if s.drafted_per_position else 0
    yield _counter("spec_decode_drafts", "Row cycles that drafted.", drafts)
    yield _counter("spec_decode_draft_tokens", "Drafts up for acceptance.", s.drafted)
    yield _counter("spec_decode_accepted_tokens", "Drafts accepted.", s.accepted)
    yield _per_position("draft", "Drafts up for acceptance", s.drafted_per_position)
    yield _per_position("accepted", "Drafts accepted", s.accepted_per_position)


def _reuse(s: Statistics) -> Iterable[Metric]:
    yield _counter(
        "prefix_lookups", "Prompts for which a kept prefix was sought.", s.prefix_lookups
    )
    yield _counter("prefix_hits", "Prompts that started from a kept prefix.", s.prefix_hits)
    yield _counter(
        "prefix_cached_tokens", "Prompt tokens whose prefill a kept prefix saved.", s.cached_tokens
    )
    yield _gauge("sessions", "Sessions for which something is kept.", s.sessions)
    yield _gauge(
        "boundaries", "Boundaries (states to go on from) there is room for.", s.boundaries_total
    )
    yield _gauge("boundaries_used", "Boundaries held.", s.boundaries_used)
    evictions = dict.fromkeys(EVICTIONS, 0) | dict(s.evictions)
    yield _labelled("prefix_evictions", "Kept prefixes let go.", "cause", evictions)
    ended = dict.fromkeys(SESSION_ENDS, 0) | dict(s.sessions_ended)
    yield _labelled(
        "sessions_ended", "Sessions that ended before their client said so.", "cause", ended
    )
    yield _gauge("kv_pages_cached", "KV cache pages that only kept prefixes hold.", s.pages_cached)


def _ends(s: Statistics) -> Iterable[Metric]:
    success = dict.fromkeys(_SUCCESS.values(), 0)
    cancelled: dict[str, int] = {}
    for reason in FinishReason:
        count = s.finished.get(reason, 0)
        if reason in _SUCCESS:
            success[_SUCCESS[reason]] += count
        else:
            cancelled[reason.value] = count
    yield _labelled("request_success", "Requests that ended well.", "finish_reason", success)
    yield _labelled(
        "requests_cancelled", "Requests ended early, faults included.", "reason", cancelled
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"selfdraft_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"selfdraft_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"selfdraft_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _per_position(kind: str, text: str, counts: tuple[int, ...]) -> Metric:
    family = CounterMetricFamily(
        f"selfdraft_spec_decode_{kind}_tokens_per_pos",
        f"{text}, by position in the draft, 1 first; a draft stands only with all before it.",
        labels=["position"],
    )
    for position in range(1, MAX_DEPTH + 1):
        value = counts[position - 1] if position <= len(counts) else 0
        family.add_metric([str(position)], value)
    return family


def _info(name: str, text: str, labels: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(f"selfdraft_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
