"""Everything that can go wrong for a client, as a closed set.

A `ServiceError` becomes a gRPC status with google.rpc details: always ErrorInfo (domain
"selfdraft", a stable reason), BadRequest where fields are at fault, RetryInfo where trying again
makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from scheduler.request import FinishReason

DOMAIN: Final = "selfdraft"

MAX_VIOLATIONS: Final = 16
MAX_TEXT: Final = 240
"""Characters per description. Details travel as a response header, of which clients take 8 KiB."""


class Reason(StrEnum):
    """Stable name of a cause, the same in ErrorInfo, metrics and logs."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_LIMIT = "TENANT_LIMIT"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    SLOW_READER = "SLOW_READER"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ABORTED = "ABORTED"
    LOADING = "LOADING"
    DRAINING = "DRAINING"
    ENGINE_FAILED = "ENGINE_FAILED"
    GRAMMAR_LIMIT = "GRAMMAR_LIMIT"
    ROW_FAULT = "ROW_FAULT"
    INTERNAL = "INTERNAL"


STATUS: Final[Mapping[Reason, grpc.StatusCode]] = {
    Reason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.DUPLICATE_REQUEST: grpc.StatusCode.ALREADY_EXISTS,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TENANT_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_UNREACHABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SLOW_READER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.ABORTED: grpc.StatusCode.ABORTED,
    Reason.LOADING: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.GRAMMAR_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ROW_FAULT: grpc.StatusCode.INTERNAL,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One field at fault: its path as written in the .proto file, and its limit."""

    field: str
    description: str


class ServiceError(Exception):
    """An RPC that ends with an error."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        violations: Sequence[Violation] = (),
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    @property
    def code(self) -> grpc.StatusCode:
        return STATUS[self.reason]

    def to_status(self) -> grpc.Status:
        """The gRPC status with its details."""
        details: list[Any] = []
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        info.metadata.update(self.metadata)
        parts = [info, *self._bad_request(), *self._retry_info()]
        for part in parts:
            packed = Any()
            packed.Pack(part)
            details.append(packed)
        number = code_pb2.Code.Value(self.code.name)
        status = status_pb2.Status(code=number, message=_short(self.message), details=details)
        return rpc_status.to_status(status)

    def _bad_request(self) -> list[error_details_pb2.BadRequest]:
        if not self.violations:
            return []
        bad = error_details_pb2.BadRequest()
        for violation in self.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(
                field=_short(violation.field), description=_short(violation.description)
            )
        return [bad]

    def _retry_info(self) -> list[error_details_pb2.RetryInfo]:
        if self.retry_after_s is None:
            return []
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(round(self.retry_after_s * 1000))
        return [info]


def invalid(violations: Sequence[Violation]) -> ServiceError:
    """INVALID_ARGUMENT for all of `violations`, of which there is at least one."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return ServiceError(
        Reason.INVALID_ARGUMENT,
        f"{first.field}: {first.description}{more}",
        violations=violations,
    )


_ENDS: Final[Mapping[FinishReason, tuple[Reason, str]]] = {
    FinishReason.CANCELLED: (Reason.CANCELLED, "the client left"),
    FinishReason.ABORTED: (Reason.ABORTED, "the request was aborted"),
    FinishReason.DEADLINE: (Reason.DEADLINE_EXCEEDED, "the request's deadline passed"),
    FinishReason.SLOW_READER: (Reason.SLOW_READER, "the stream was left unread for too long"),
    FinishReason.FAULT: (Reason.ROW_FAULT, "generation of this request failed"),
    FinishReason.SHUTDOWN: (Reason.DRAINING, "the server is shutting down"),
    FinishReason.ENGINE_FAILED: (Reason.ENGINE_FAILED, "the engine failed"),
}


def error_of(reason: FinishReason, detail: str, *, retry_after_s: float) -> ServiceError | None:
    """The error a finished request ends with, or None where it ended well.

    `retry_after_s` is told to the client where another server, or this one restarted, may help.
    """
    if reason not in _ENDS:
        return None
    name, message = _ENDS[reason]
    retry = retry_after_s if name is Reason.DRAINING else None
    text = f"{message}: {detail}" if detail else message
    return ServiceError(name, text, retry_after_s=retry)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
