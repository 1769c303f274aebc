"""Everything that can go wrong for a client, as a closed set.

A `ServiceError` becomes a gRPC status with google.rpc details: always ErrorInfo (domain
"selfdraft", a stable reason), BadRequest where fields are at fault, RetryInfo where trying again
makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from selfdraft.v1 import admin_pb2, selfdraft_pb2
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from scheduler.request import FinishReason

DOMAIN: Final = "selfdraft"

MAX_VIOLATIONS: Final = 16
MAX_TEXT: Final = 240
"""Characters per description. Details travel as a response header, of which clients take 8 KiB."""


class Reason(StrEnum):
    """Stable name of a cause, the same in ErrorInfo, metrics and logs."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_LIMIT = "TENANT_LIMIT"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    SLOW_READER = "SLOW_READER"
    SLOW_SENDER = "SLOW_SENDER"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ABORTED = "ABORTED"
    LOADING = "LOADING"
    DRAINING = "DRAINING"
    ENGINE_FAILED = "ENGINE_FAILED"
    GRAMMAR_LIMIT = "GRAMMAR_LIMIT"
    EVENTS_EXPIRED = "EVENTS_EXPIRED"
    EVENTS_MISSED = "EVENTS_MISSED"
    ROW_FAULT = "ROW_FAULT"
    NOT_CONFIGURED = "NOT_CONFIGURED"
    NOT_FOUND = "NOT_FOUND"
    FILE_EXISTS = "FILE_EXISTS"
    FOREIGN_FILE = "FOREIGN_FILE"
    NO_ROOM = "NO_ROOM"
    STORAGE_FAILED = "STORAGE_FAILED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client can rely on when a call ends for one reason."""

    code: grpc.StatusCode
    meaning: str
    """One line, for the table in proto/README.md."""
    details: frozenset[str] = frozenset({"ErrorInfo"})
    """Which google.rpc details come with it, always."""


_Code: Final = grpc.StatusCode
_INFO: Final = frozenset({"ErrorInfo"})
_FIELDS: Final = _INFO | {"BadRequest"}
_RETRY: Final = _INFO | {"RetryInfo"}

CATALOGUE: Final[Mapping[Reason, Kind]] = {
    Reason.INVALID_ARGUMENT: Kind(
        _Code.INVALID_ARGUMENT,
        "fields of the request are at fault; all of them are listed",
        _FIELDS,
    ),
    Reason.DUPLICATE_REQUEST: Kind(
        _Code.ALREADY_EXISTS, "a live request of the same tenant has this request_id", _FIELDS
    ),
    Reason.UNAUTHENTICATED: Kind(
        _Code.UNAUTHENTICATED, "the call has no valid token; what is wrong with it is not told"
    ),
    Reason.PERMISSION_DENIED: Kind(
        _Code.PERMISSION_DENIED, "the token is valid and does not allow this"
    ),
    Reason.QUEUE_FULL: Kind(
        _Code.RESOURCE_EXHAUSTED,
        "the queue is full; try again after the delay, or elsewhere",
        _RETRY,
    ),
    Reason.TENANT_LIMIT: Kind(
        _Code.RESOURCE_EXHAUSTED,
        "as much of this tenant waits already as may; try again after the delay",
        _RETRY,
    ),
    Reason.DEADLINE_UNREACHABLE: Kind(
        _Code.RESOURCE_EXHAUSTED,
        "the queue is too long for the call's deadline; try again after the delay, or elsewhere",
        _RETRY,
    ),
    Reason.TOO_MANY_CALLS: Kind(
        _Code.RESOURCE_EXHAUSTED,
        "too many calls, health watches or reflections run at once",
        _RETRY,
    ),
    Reason.SLOW_READER: Kind(_Code.RESOURCE_EXHAUSTED, "the stream was left unread for too long"),
    Reason.SLOW_SENDER: Kind(
        _Code.RESOURCE_EXHAUSTED, "the request's message did not arrive in time"
    ),
    Reason.DEADLINE_EXCEEDED: Kind(
        _Code.DEADLINE_EXCEEDED, "the call's deadline passed, queued or running"
    ),
    Reason.CANCELLED: Kind(_Code.CANCELLED, "the client left; seen in logs, by nobody else"),
    Reason.ABORTED: Kind(_Code.ABORTED, "`Abort` was called for the request"),
    Reason.LOADING: Kind(_Code.UNAVAILABLE, "the model is still loading", _RETRY),
    Reason.DRAINING: Kind(
        _Code.UNAVAILABLE, "the server is shutting down; another one may help at once", _RETRY
    ),
    Reason.ENGINE_FAILED: Kind(_Code.UNAVAILABLE, "the engine is beyond use; the process ends"),
    Reason.GRAMMAR_LIMIT: Kind(
        _Code.RESOURCE_EXHAUSTED,
        "the grammar could not be followed any further; the text is incomplete",
    ),
    Reason.EVENTS_EXPIRED: Kind(
        _Code.OUT_OF_RANGE,
        "events after the given number are not known any more; subscribe from 0 for a snapshot",
    ),
    Reason.EVENTS_MISSED: Kind(
        _Code.DATA_LOSS, "the subscriber fell behind; subscribe from 0 for a snapshot"
    ),
    Reason.ROW_FAULT: Kind(
        _Code.INTERNAL,
        "this sequence's numbers went bad or its memory could not be had; others go on",
    ),
    Reason.NOT_CONFIGURED: Kind(
        _Code.FAILED_PRECONDITION, "the server was started without what this call needs"
    ),
    Reason.NOT_FOUND: Kind(_Code.NOT_FOUND, "there is no session or file of this name"),
    Reason.FILE_EXISTS: Kind(
        _Code.ALREADY_EXISTS, "a file of this name exists and `overwrite` was not set"
    ),
    Reason.FOREIGN_FILE: Kind(
        _Code.FAILED_PRECONDITION, "the file is of another model or version, or damaged"
    ),
    Reason.NO_ROOM: Kind(
        _Code.RESOURCE_EXHAUSTED, "what the file holds does not fit beside what runs"
    ),
    Reason.STORAGE_FAILED: Kind(_Code.INTERNAL, "the disk did not take or give a file"),
    Reason.INTERNAL: Kind(_Code.INTERNAL, "a defect in the server; its log has the cause"),
}
"""The closed set: every error a call can end with, gRPC's own aside (see proto/README.md)."""


def table() -> str:
    """The catalogue as Markdown; proto/README.md holds it, and a test compares."""
    rows = ["| reason | status | details | means |", "|---|---|---|---|"]
    for reason, kind in CATALOGUE.items():
        details = ", ".join(sorted(kind.details - _INFO)) or "–"
        rows.append(f"| `{reason.value}` | {kind.code.name} | {details} | {kind.meaning} |")
    return "\n".join(rows) + "\n"


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
        return CATALOGUE[self.reason].code

    @property
    def for_log(self) -> str:
        """The message without what a client sent: where fields are at fault their names alone, for
        a description may quote a prompt, a schema or a grammar."""
        if self.violations:
            fields = (violation.field for violation in self.violations[:MAX_VIOLATIONS])
            return ", ".join(map(_field_for_log, fields))
        if self.reason is Reason.GRAMMAR_LIMIT:
            return self.message.partition(":")[0]
        return self.message

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


def _field_for_log(path: str) -> str:
    """A field's path without keys that a client made up, as those of a Struct are."""
    known = _field_names()
    parts = [part if part.partition("[")[0] in known else "…" for part in path.split(".")]
    return ".".join(parts)


@cache
def _field_names() -> frozenset[str]:
    """Names of fields of every request there is, and what else we call one."""
    found = {"(message)", "selfdraft-tenant"}
    for file in (selfdraft_pb2, admin_pb2, vllm_engine_pb2, common_pb2):
        for message in file.DESCRIPTOR.message_types_by_name.values():
            found.update(message.fields_by_name, message.oneofs_by_name)
    return frozenset(found)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
