"""OpenTelemetry spans, where a collector is configured (extra `tracing`).

A `Generate` call makes one SERVER span, a child of the span its client sent in `traceparent`, with
a child each for queue, prefill and decode. All four are made when the call has ended, from the
times the scheduler noted anyway: nothing of it happens between tokens. They wait in a bounded queue
for a thread that hands them on in batches; a collector that is away costs spans, never a request.

Names follow OpenTelemetry's semantic conventions for RPC and for generative AI, where those have
one. No attribute holds a prompt or a text.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, Self

import anyio

from scheduler.request import Usage
from service.config import SettingError, TracingConfig
from service.exposure import is_loopback
from service.families import METHODS
from service.logs import Logger, RequestRecord
from service.trace import TraceContext
from service.version import VERSION

_EXPORT_S: Final = 10.0
_BATCH: Final = 512
_DELAY_MS: Final = 1000

_RPC: Final = {label: path.lstrip("/") for path, label in METHODS.items()}

_FAULTS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Statuses that are an error of the server's span; others are its client's affair."""


def check_tracing(config: TracingConfig) -> None:
    """Raises SettingError: the extra is missing, or spans would travel in plain text."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise SettingError(
            "otlp_endpoint",
            f"needs the extra `tracing` (pip install 'selfdraft[tracing]'): {error}",
        ) from error
    if config.ca is not None:
        try:
            config.ca.read_bytes()
        except OSError as error:
            raise SettingError("otlp_ca", f"{config.ca}: {error.strerror}") from error


def _is_plain(config: TracingConfig) -> bool:
    return config.insecure or (config.ca is None and is_loopback(config.host))


class Tracing:
    """Makes spans of requests that ended and has them exported."""

    def __init__(
        self, config: TracingConfig, logger: Logger, wall: Callable[[], int] = time.time_ns
    ) -> None:
        """Raises SettingError. `wall` gives nanoseconds since the epoch."""
        check_tracing(config)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._config = config
        self._logger = logger
        self._wall = wall
        self._results = {"exported": 0, "failed": 0}
        self.model = ""
        """Name of the served model, once it is loaded."""
        resource = Resource(
            {
                "service.name": "selfdraft",
                "service.version": VERSION,
                "service.instance.id": uuid.uuid4().hex,
            }
        )
        self._processor = BatchSpanProcessor(
            _counting(_exporter(config), self._results),
            max_queue_size=config.max_queue,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=min(_BATCH, config.max_queue),
            export_timeout_millis=_EXPORT_S * 1000,
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("selfdraft", VERSION)

    @classmethod
    def of(cls, config: TracingConfig | None, logger: Logger) -> Self | None:
        """None without a config. Raises SettingError."""
        return None if config is None else cls(config, logger)

    def results(self) -> dict[str, int]:
        """Spans so far that the collector took, and that it did not."""
        return dict(self._results)

    def record(self, record: RequestRecord, now: float) -> None:
        """Makes the spans of a request that ended at `now` on the scheduler's clock, and notes
        their ids in `record`. Never raises: the call has its answer already."""
        try:
            self._record(record, now)
        except Exception as defect:
            self._logger.error("unexpected error", exc_info=defect)

    def _record(self, record: RequestRecord, now: float) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        epoch = self._wall() - round(now * 1e9)

        def at(moment: float) -> int:
            return epoch + round(moment * 1e9)

        span: Any = self._tracer.start_span(
            _RPC.get(record.method, record.method),
            context=Context() if record.trace is None else _remote(record.trace),
            kind=SpanKind.SERVER,
            attributes=attributes(record, self.model),
            start_time=at(record.received_at),
        )
        if not span.is_recording():
            return
        ids = span.get_span_context()
        record.trace_id, record.span_id = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        if record.usage is not None:
            inside = set_span_in_context(span, Context())
            for name, begin, end in phases(record.usage):
                child: Any = self._tracer.start_span(name, context=inside, start_time=at(begin))
                child.end(at(end))
        if record.status in _FAULTS:
            span.set_status(_error(record.detail))
        span.end(at(now))

    async def close(self) -> None:
        """Hands on what is left, within `TracingConfig.flush_s`; idempotent."""
        thread = threading.Thread(target=self._shut_down, name="spans", daemon=True)
        thread.start()
        with anyio.move_on_after(self._config.flush_s):
            while thread.is_alive():
                await anyio.sleep(0.01)
        if thread.is_alive():
            self._logger.warning("spans not flushed", limit_s=self._config.flush_s)

    def _shut_down(self) -> None:
        try:
            shut_down: Any = self._processor.shutdown
            shut_down()
        except Exception:
            logging.getLogger(__name__).exception("the exporter of spans did not stop")


def phases(usage: Usage) -> list[tuple[str, float, float]]:
    """(name, begin, end) of what a request went through, in order, on the scheduler's clock."""
    end = usage.finished_at if usage.finished_at is not None else usage.last_token_at
    started, first, last = usage.started_at, usage.first_token_at, usage.last_token_at
    edges = (
        ("queue", usage.submitted_at, started if started is not None else end),
        ("prefill", started, first if first is not None else end),
        ("decode", first, last),
    )
    return [(name, b, max(b, e)) for name, b, e in edges if b is not None and e is not None]


def attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """What a call's span says."""
    found: dict[str, Any] = {
        "rpc.system.name": "grpc",
        "rpc.method": _RPC.get(record.method, record.method),
        "rpc.response.status_code": record.status,
        "gen_ai.provider.name": "selfdraft",
        "gen_ai.request.model": model or None,
        "gen_ai.response.id": record.request_id,
        "selfdraft.request_id": record.request_id,
        "selfdraft.tenant": record.tenant or None,
    }
    if record.status == "OK":
        found["gen_ai.response.finish_reasons"] = record.reason.split(",")
    else:
        found["error.type"] = str(record.reason)
    if record.prepared is not None:
        found |= _asked(record)
    if record.usage is not None:
        found |= _used(record.usage)
    return {name: value for name, value in found.items() if value is not None}


def _asked(record: RequestRecord) -> dict[str, Any]:
    assert record.prepared is not None
    request, options = record.prepared.requests[0], record.prepared.options
    sampling = options.sampling
    return {
        "gen_ai.operation.name": "chat" if record.prepared.input == "chat" else "text_completion",
        "gen_ai.conversation.id": options.session_id,
        "gen_ai.request.choice.count": options.n if options.n != 1 else None,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "selfdraft.tenant": record.tenant or request.tenant or None,
        "selfdraft.priority": options.priority.name.lower(),
        "selfdraft.constraint": options.form,
    }


def _used(usage: Usage) -> dict[str, Any]:
    drafts, first = usage.draft_tokens, usage.first_token_at
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.time_to_first_chunk": None
        if first is None
        else first - usage.submitted_at,
        "selfdraft.cycles": usage.cycles,
        "selfdraft.preemptions": usage.preemptions,
        "selfdraft.draft_tokens": drafts,
        "selfdraft.accepted_tokens": usage.accepted_tokens,
        "selfdraft.acceptance": usage.accepted_tokens / drafts if drafts else None,
    }


def _remote(trace: TraceContext) -> Any:
    """A context whose current span is the client's."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        TraceState,
        set_span_in_context,
    )

    remote = SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(trace.flags),
        trace_state=TraceState.from_header([trace.state]) if trace.state else TraceState(),
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _error(detail: str) -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR, detail)


def _exporter(config: TracingConfig) -> Any:
    """Everything is said here, so that none of OpenTelemetry's environment variables counts."""
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    plain = _is_plain(config)
    roots = None if config.ca is None else config.ca.read_bytes()
    return OTLPSpanExporter(
        endpoint=config.endpoint,
        insecure=plain,
        credentials=None if plain else grpc.ssl_channel_credentials(roots),
        headers=(("selfdraft-version", VERSION),),
        timeout=_EXPORT_S,
        compression=grpc.Compression.NoCompression,
    )


def _counting(exporter: Any, results: dict[str, int]) -> Any:
    """The same exporter; counts what came of each span, and raises nothing."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            try:
                result: SpanExportResult = exporter.export(spans)
            except Exception:
                logging.getLogger(__name__).exception("the exporter of spans failed")
                result = SpanExportResult.FAILURE
            done = result is SpanExportResult.SUCCESS
            results["exported" if done else "failed"] += len(spans)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Counting()
