"""Logs: JSON or pretty lines on stderr; one line per request, at its end, with every number.

Prompts, generated texts and credentials are never logged.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TextIO

import structlog

from scheduler.request import FinishReason, Priority, Usage
from service.config import LogFormat
from service.prompt import Prepared
from service.sampling import mode_name

Logger = structlog.typing.FilteringBoundLogger


def make_logger(
    form: LogFormat, stream: TextIO | None = None, *, level: int = logging.INFO
) -> Logger:
    """A logger that writes to `stream` (stderr when None). Nothing global is configured."""
    target = stream if stream is not None else sys.stderr
    renderer: Any
    if form == "json":
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=target.isatty(), pad_event_to=0)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    logger: Logger = structlog.wrap_logger(
        structlog.PrintLogger(target),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    return logger


def capture_stdlib(logger: Logger) -> None:
    """Sends what libraries log with the standard `logging` through `logger`, warnings and up."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward(logger)], force=True)


class _Forward(logging.Handler):
    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log(
            record.levelno,
            "library message",
            library=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def trace_context(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Trace and parent span id of a W3C `traceparent` header, where there is a valid one."""
    for key, value in metadata:
        match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
        if key == "traceparent" and match is not None:
            return {"trace_id": match[1], "parent_span_id": match[2]}
    return {}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What the line about one request says; filled in while it runs."""

    request_id: str
    peer: str
    tenant: str = ""
    trace: dict[str, str] = field(default_factory=dict)
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
            "peer": self.peer,
            "total_s": round(now - self.received_at, 6),
        }
        values |= {"tenant": self.tenant} if self.tenant else {}
        values |= {"detail": self.detail} if self.detail else {}
        values |= self.trace
        if self.prepared is not None:
            values |= _asked(self.prepared)
        if self.usage is not None:
            values |= _used(self.usage, self.delivered_tokens)
            values["ends"] = list(self.ends)
        logger.log(
            logging.INFO if self.status != "INTERNAL" else logging.ERROR, "request", **values
        )


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
