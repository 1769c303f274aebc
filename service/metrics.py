"""The Prometheus metrics of one server. All names start with `selfdraft_`.

What they are is declared in `service.catalogue`. What the scheduler counts is read from its
statistics when Prometheus asks (`service.scrape`), so nothing is counted twice; what only the
service sees is observed here: latencies, refusals, calls. Labels are from closed sets: no request,
model or client can add a series.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import EngineInfo
from scheduler.loop import StepRecord
from scheduler.request import FinishReason, Tokens, Usage
from service.catalogue import CATALOGUE
from service.errors import Reason
from service.families import ACCEPTANCE_WINDOW_S, PREFIX, REFUSALS, SUCCESS
from service.histogram import observe_times
from service.sampling import mode_name
from service.scrape import AcceptanceWindow, Facts, SnapshotCollector, TakeStatistics
from service.text.grammar import Form

__all__ = ["ACCEPTANCE_WINDOW_S", "REFUSALS", "AcceptanceWindow", "Metrics"]

# A second series for each counter and histogram, with the time the process started, which
# process_start_time_seconds tells once.
_once: Any = disable_created_metrics
_once()


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, take_statistics: TakeStatistics, *, version: str) -> None:
        self.registry = CollectorRegistry()
        self.facts = Facts(version=version)
        """What parts of the server make known."""
        self._time_to_first_token = self._histogram("time_to_first_token_seconds")
        self._inter_token_latency = self._histogram("inter_token_latency_seconds")
        self._e2e_latency = self._histogram("e2e_request_latency_seconds")
        self._queue_time = self._histogram("request_queue_time_seconds")
        self._prefill_time = self._histogram("request_prefill_time_seconds")
        self._decode_time = self._histogram("request_decode_time_seconds")
        self._time_per_token = self._histogram("request_time_per_output_token_seconds")
        self._prompt_tokens = self._histogram("request_prompt_tokens")
        self._generation_tokens = self._histogram("request_generation_tokens")
        self._n = self._histogram("request_params_n")
        self._max_tokens = self._histogram("request_params_max_tokens")
        self._host_gap = self._histogram("host_gap_seconds")
        self._loop_lag = self._histogram("event_loop_lag_seconds")
        self._refused = self._counter("requests_refused")
        self._by_mode = self._counter("spec_decode_requests")
        self._guided = self._counter("guided_requests")
        self._errors = self._counter("errors")
        self._calls = self._counter("grpc_calls")
        self._in_flight = Gauge(
            f"{PREFIX}grpc_calls_in_flight",
            CATALOGUE["grpc_calls_in_flight"].text,
            ["method"],
            registry=self.registry,
        )
        self._acceptance = AcceptanceWindow(ACCEPTANCE_WINDOW_S)
        self._collector = SnapshotCollector(take_statistics, self._acceptance, self.facts)
        self.registry.register(self._collector)
        # CPU seconds, resident memory, start time, open files of this process (Linux only).
        ProcessCollector(registry=self.registry)

    # --- of the server -----------------------------------------------------------------------

    def model_loaded(self, info: EngineInfo, name: str) -> None:
        """Makes the served model's facts known."""
        self.facts.model = (info, name)

    def phase_took(self, phase: str, seconds: float) -> None:
        """A phase of the start is over."""
        self.facts.load_s[phase] = seconds

    def planned(self, parts: Mapping[str, int]) -> None:
        """What the engine's budget is made of, in bytes."""
        self.facts.planned = {name.replace(" ", "_"): size for name, size in parts.items()}

    def loop_lagged(self, seconds: float) -> None:
        """The event loop came this much later than it was to."""
        self._loop_lag.observe(seconds)

    def line_dropped(self) -> None:
        """A line about a refused call was left out."""
        self.facts.refusals_unlogged += 1

    # --- of calls ----------------------------------------------------------------------------

    def call_began(self, method: str) -> None:
        """A call of this method (one of the catalogue's) is being answered."""
        self._in_flight.labels(method).inc()

    def call_left(self, method: str) -> None:
        """It is no more."""
        self._in_flight.labels(method).dec()

    def call_ended(self, method: str, code: str, reason: Reason | None) -> None:
        """A call ended with this gRPC status, and this error of ours."""
        self._calls.labels(method, code).inc()
        if reason is not None:
            self._errors.labels(reason.value).inc()

    def refused(self, reason: Reason) -> None:
        """A Generate call was refused before admission, or any call for its token."""
        self._refused.labels(reason.value).inc()

    def admitted(
        self, mode: pb.SpeculationMode, form: Form | None, *, n: int = 1, max_tokens: int = 1
    ) -> None:
        """A Generate call was admitted, to draft in this `SpeculationMode`."""
        self._by_mode.labels(mode_name(mode)).inc()
        if form is not None:
            self._guided.labels(form).inc()
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    # --- of steps and sequences --------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        """The engine ran a step."""
        if record.gap_s is not None:
            self._host_gap.observe(record.gap_s)
        self.facts.memory = record.memory

    def burst(self, tokens: Tokens, *, previous_at: float | None, submitted_at: float) -> None:
        """A cycle emitted tokens for a request whose previous burst came at `previous_at`."""
        if tokens.drafted:
            self._acceptance.add(tokens.drafted, tokens.accepted, tokens.at)
        if previous_at is None:
            self._time_to_first_token.observe(max(tokens.at - submitted_at, 0.0))
            return
        share = max(tokens.at - previous_at, 0.0) / len(tokens.ids)
        observe_times(self._inter_token_latency, share, len(tokens.ids))

    def finished(self, reason: FinishReason, usage: Usage) -> None:
        """A request ended, well or not."""
        start, first, last = usage.submitted_at, usage.first_token_at, usage.last_token_at
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._generation_tokens.observe(usage.completion_tokens)
        if usage.started_at is not None:
            self._queue_time.observe(max(usage.started_at - start, 0.0))
            if first is not None:
                self._prefill_time.observe(max(first - usage.started_at, 0.0))
        if first is not None and last is not None:
            self._decode_time.observe(max(last - first, 0.0))
            if usage.completion_tokens > 1:
                self._time_per_token.observe(max(last - first, 0.0) / (usage.completion_tokens - 1))
        if reason in SUCCESS and usage.finished_at is not None:
            self._e2e_latency.observe(max(usage.finished_at - start, 0.0))

    # --- making them -------------------------------------------------------------------------

    def _histogram(self, name: str) -> Histogram:
        family = CATALOGUE[name]
        return Histogram(
            f"{PREFIX}{name}",
            family.text,
            buckets=family.buckets,
            unit=family.open_metrics_unit,
            registry=self.registry,
        )

    def _counter(self, name: str) -> Counter:
        """With every series of a single label, so that each is 0 before it is anything else."""
        family = CATALOGUE[name]
        labels = [label.name for label in family.labels]
        counter = Counter(
            f"{PREFIX}{name}",
            family.text,
            labels,
            unit=family.open_metrics_unit,
            registry=self.registry,
        )
        if len(family.labels) == 1:
            for value in family.labels[0].values:
                counter.labels(value)
        return counter
