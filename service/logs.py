"""Logs: JSON or pretty lines on stderr; one line per request, at its end, with every number.

Prompts, generated texts and credentials are never logged.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, TextIO

import structlog

from scheduler.request import FinishReason, Priority, Usage
from service.config import LogFormat
from service.prompt import Prepared
from service.sampling import mode_name
from service.trace import TraceContext

Logger = structlog.typing.FilteringBoundLogger


class Lines:
    """Writes lines to a stream, whole and one after the other. A stream that does not take one
    (closed, a pipe that nobody reads any more, a full disk) loses it and harms nobody."""

    def __init__(self, stream: TextIO, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._lock = threading.Lock()
        self._lost = 0

    def msg(self, message: str) -> None:
        """Writes one line."""
        with self._lock:
            try:
                try:
                    self._stream.write(f"{message}\n")
                except UnicodeEncodeError:
                    plain = message.encode("ascii", "backslashreplace").decode("ascii")
                    self._stream.write(f"{plain}\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._lost += 1

    def dropped(self) -> dict[str, int]:
        """Lines not written so far, by cause: `rate` and `write`."""
        return {"rate": self._limits.dropped, "write": self._lost}

    log = debug = info = warn = warning = error = critical = fatal = exception = msg


_STRANGERS: Final = frozenset({"library message", "unexpected error"})
"""Events that somebody who may not even call can cause as often as he likes."""

BURST: Final = 100
PER_S: Final = 5.0
"""Lines of one such kind that are written at once, and per second after that."""


class Limits:
    """Bounds what bad calls can write: a processor that drops lines, and counts them.

    A request that got a token always has its line: the machine bounds how many there are. One that
    got none cost its client nothing, so lines of those, and each kind of `_STRANGERS`, pass a
    bucket of `BURST` that fills with `PER_S`. The next line of the kind says how many are missing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}
        """By kind: lines left, when that was."""
        self._missing: dict[str, int] = {}
        self.dropped = 0

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Raises structlog.DropEvent for a line too many."""
        kind = _kind(event)
        if kind is None:
            return event
        with self._lock:
            now = self._clock()
            left, then = self._buckets.get(kind, (float(BURST), now))
            left = min(left + (now - then) * PER_S, BURST)
            if left < 1:
                self._buckets[kind] = (left, now)
                self._missing[kind] = self._missing.get(kind, 0) + 1
                self.dropped += 1
                raise structlog.DropEvent
            self._buckets[kind] = (left - 1, now)
            if missing := self._missing.pop(kind, 0):
                event["suppressed"] = missing
        return event

    def take_missing(self) -> dict[str, int]:
        """By kind, lines dropped that no line has told of; none of them any more."""
        with self._lock:
            missing, self._missing = self._missing, {}
        return missing


def _kind(event: MutableMapping[str, Any]) -> str | None:
    """The bucket of a line; None for lines that are not limited."""
    name = str(event.get("event"))
    if name == "request":
        return None if event.get("completion_tokens") else "request"
    return name if name in _STRANGERS else None


def make_logger(
    form: LogFormat,
    stream: TextIO | None = None,
    *,
    level: int = logging.INFO,
    limited: bool = True,
) -> Logger:
    """A logger that writes to `stream` (stderr when None), without `Limits` if not `limited`.
    Nothing global is configured."""
    target = stream if stream is not None else sys.stderr
    renderer: Any
    if form == "json":
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    else:
        colors = target.isatty()
        renderer = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0)
    limits = Limits()
    processors: list[Any] = [
        *((limits,) if limited else ()),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    logger: Logger = structlog.wrap_logger(
        Lines(target, limits),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    return logger


def dropped_by(logger: Logger) -> Callable[[], Mapping[str, int]]:
    """Counts the lines that a logger of ours did not write, by cause."""
    lines = _lines(logger)
    return dict if lines is None else lines.dropped


def report_suppressed(logger: Logger) -> None:
    """One line for each kind of which lines were dropped since one told of it."""
    lines = _lines(logger)
    for kind, count in (lines._limits.take_missing() if lines is not None else {}).items():
        logger.warning("lines suppressed", kind=kind, suppressed=count)


def _lines(logger: Logger) -> Lines | None:
    found = getattr(logger, "_logger", None)
    return found if isinstance(found, Lines) else None


def capture_stdlib(logger: Logger) -> None:
    """Sends what libraries log with the standard `logging` through `logger`, warnings and up."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward(logger)], force=True)


class _Forward(logging.Handler):
    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: whoever logs is in the middle of something."""
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit the format
            message = str(record.msg)
        with contextlib.suppress(Exception):
            self._logger.log(
                record.levelno,
                "library message",
                library=record.name,
                message=message,
                exc_info=record.exc_info,
            )


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What the line about one request says; filled in while it runs."""

    request_id: str
    peer: str
    tenant: str = ""
    method: str = ""
    """The RPC, as metrics call it."""
    trace: TraceContext | None = None
    span_id: str = ""
    """Of the call's own span, where spans are exported."""
    trace_id: str = ""
    """The same: that of a trace which began here."""
    status: str = "OK"
    """gRPC status the call ended with."""
    reason: str = ""
    """finish_reason of a good end (of several sequences, each that occurred), else the error's
    reason."""
    detail: str = ""
    ends: tuple[FinishReason, ...] = ()
    """How the sequences ended for the scheduler, as metrics count them: a client may leave after
    the end of its text and before it was sent."""
    prepared: Prepared | None = None
    usage: Usage | None = None
    """Summed over the sequences."""
    delivered_tokens: int = 0
    received_at: float = 0.0
    """On the scheduler's clock."""
    admitted_at: float = 0.0
    """On the scheduler's clock."""

    def emit(self, logger: Logger, now: float) -> None:
        """Writes the line."""
        values: dict[str, Any] = {
            "request_id": self.request_id,
            "status": self.status,
            "reason": self.reason,
            "method": self.method,
            "peer": self.peer,
            "total_s": round(now - self.received_at, 6),
        }
        values |= {"tenant": self.tenant} if self.tenant else {}
        values |= {"detail": self.detail} if self.detail else {}
        values |= self._traced()
        if self.prepared is not None:
            values |= _asked(self.prepared)
        if self.usage is not None:
            values |= _used(self.usage, self.delivered_tokens)
            values["ends"] = list(self.ends)
        logger.log(
            logging.INFO if self.status != "INTERNAL" else logging.ERROR, "request", **values
        )

    def _traced(self) -> dict[str, str]:
        values = {"span_id": self.span_id} if self.span_id else {}
        if self.trace is None:
            return values | ({"trace_id": self.trace_id} if self.trace_id else {})
        return values | {
            "trace_id": self.trace.trace_id,
            "parent_span_id": self.trace.span_id,
            "trace_flags": f"{self.trace.flags:02x}",
        }


def _asked(prepared: Prepared) -> dict[str, Any]:
    request, options = prepared.requests[0], prepared.options
    sampling = options.sampling
    values = {
        "input": prepared.input,
        "n": options.n,
        "max_tokens": request.max_tokens,
        "temperature": round(sampling.temperature, 6),
        "top_p": round(sampling.top_p, 6),
        "top_k": sampling.top_k,
        "min_p": round(sampling.min_p, 6),
        "seed": sampling.seed,
        "speculation": mode_name(options.mode),
        "depth_cap": request.depth_cap,
    }
    rare = {
        "min_tokens": options.min_tokens or None,
        "repetition_penalty": _unless(sampling.repetition_penalty, 1.0),
        "frequency_penalty": _unless(sampling.frequency_penalty, 0.0),
        "presence_penalty": _unless(sampling.presence_penalty, 0.0),
        "logit_bias_tokens": len(sampling.logit_bias) or None,
        "logprobs": options.logprobs,
        "prompt_logprobs": options.prompt_logprobs,
        "constraint": options.form,
        "session_id": options.session_id,
        "reuse_prefix": None if options.reuse_prefix else False,
        "tenant": request.tenant or None,
        "priority": None if options.priority is Priority.DEFAULT else options.priority.name.lower(),
    }
    return values | {name: value for name, value in rare.items() if value is not None}


def _unless(value: float, neutral: float) -> float | None:
    return None if value == neutral else round(value, 6)


def total(usages: Sequence[Usage]) -> Usage:
    """The sum of several sequences' counts, from the first one's submission to the last one's end.
    There is at least one."""
    if len(usages) == 1:
        return usages[0]

    def earliest(name: str) -> float | None:
        return min((t for u in usages if (t := getattr(u, name)) is not None), default=None)

    def latest(name: str) -> float | None:
        return max((t for u in usages if (t := getattr(u, name)) is not None), default=None)

    def per_position(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*(getattr(u, name) for u in usages), fillvalue=0)))

    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in usages),
        cached_tokens=sum(u.cached_tokens for u in usages),
        completion_tokens=sum(u.completion_tokens for u in usages),
        cycles=sum(u.cycles for u in usages),
        draft_tokens=sum(u.draft_tokens for u in usages),
        accepted_tokens=sum(u.accepted_tokens for u in usages),
        drafted_per_position=per_position("drafted_per_position"),
        accepted_per_position=per_position("accepted_per_position"),
        preemptions=sum(u.preemptions for u in usages),
        submitted_at=min(u.submitted_at for u in usages),
        started_at=earliest("started_at"),
        first_token_at=earliest("first_token_at"),
        last_token_at=latest("last_token_at"),
        finished_at=latest("finished_at"),
    )


def _used(usage: Usage, delivered: int) -> dict[str, Any]:
    def since_submission(moment: float | None) -> float | None:
        return None if moment is None else round(moment - usage.submitted_at, 6)

    first, last = usage.first_token_at, usage.last_token_at
    decoding = last - first if first is not None and last is not None else 0.0
    after_first = usage.completion_tokens - 1  # of several sequences the first one's
    drafts = usage.draft_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "delivered_tokens": delivered,
        "queue_s": since_submission(usage.started_at),
        "ttft_s": since_submission(first),
        "e2e_s": since_submission(usage.finished_at),
        "tokens_per_s": round(after_first / decoding, 3) if decoding > 0 else None,
        "cycles": usage.cycles,
        "preemptions": usage.preemptions,
        "spec_draft_tokens": drafts,
        "spec_accepted_tokens": usage.accepted_tokens,
        "acceptance": round(usage.accepted_tokens / drafts, 4) if drafts else None,
        "spec_draft_tokens_per_pos": list(usage.drafted_per_position),
        "spec_accepted_tokens_per_pos": list(usage.accepted_per_position),
    }
