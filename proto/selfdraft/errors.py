"""What a failed call tells its client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request at fault."""

    field: str
    description: str


class SelfdraftError(Exception):
    """An RPC that failed, with the details the server gave."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: Sequence[Violation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        """`ErrorInfo.reason`; empty when the error is not the server's own (no connection, …)."""
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        """Seconds after which trying again makes sense; None when it does not."""

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """The same as gRPC's error, with its details read.

        A stream that was reset without a status is UNAVAILABLE: a load balancer can say no more
        when the server behind it is gone. gRPC calls that INTERNAL, as it does defects; of those
        the server tells with details.
        """
        details = _Details()
        try:
            status = rpc_status.from_call(error)  # type: ignore[arg-type]
        except ValueError:  # details of someone else's status
            status = None
        for detail in status.details if status is not None else ():
            details.read(detail)
        code, message = error.code(), error.details() or ""
        if code is grpc.StatusCode.INTERNAL and not details.reason and "RST_STREAM" in message:
            code = grpc.StatusCode.UNAVAILABLE
        return cls(
            code,
            message,
            reason=details.reason,
            violations=details.violations,
            retry_after_s=details.retry_after_s,
        )


class _Details:
    def __init__(self) -> None:
        self.reason = ""
        self.violations: list[Violation] = []
        self.retry_after_s: float | None = None

    def read(self, detail: Any) -> None:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            self.reason = info.reason
        elif detail.Unpack(bad):
            self.violations += [Violation(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(retry):
            self.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
