"""The sequences of one request, handed to the scheduler together and found again by its key."""

from __future__ import annotations

from typing import Final

from scheduler.loop import RequestHandle, Scheduler
from scheduler.request import (
    FinishReason,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
    Refusal,
    SubmitError,
)
from service.errors import Reason, ServiceError, Violation, invalid
from service.prompt import Prepared

Handles = tuple[RequestHandle, ...]
"""One per sequence, by index."""

_PATHS: Final = {
    "stop_ids": "sampling_params.stop_token_ids",
    "depth_cap": "speculation.max_depth",
    "session_id": "session_id",
    "reuse_prefix": "reuse_prefix",
}
"""Fields of GenerationRequest whose name is another one for the client."""


_BOUNDS: Final = {
    Refusal.MAX_QUEUE: Reason.QUEUE_FULL,
    Refusal.MAX_QUEUED_TOKENS: Reason.QUEUE_FULL,
    Refusal.TENANT_QUEUED_TOKENS: Reason.TENANT_LIMIT,
    Refusal.DEADLINE: Reason.DEADLINE_UNREACHABLE,
}


class Submissions:
    """The requests that are being answered. Used on the event loop only."""

    def __init__(self, *, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._live: dict[str, Handles] = {}

    def submit(self, scheduler: Scheduler, prepared: Prepared) -> Handles:
        """Queues all sequences of a request, or none. Raises ServiceError when one is refused.

        Nothing is planned between them, and a refusal is that of the request.
        """
        if self._is_live(prepared.key):
            raise _duplicate("a live request has this id")
        try:
            handles = scheduler.submit_together(prepared.requests)
        except SubmitError as refusal:
            raise self._refusal(refusal, scheduler, prepared) from refusal
        self._live[prepared.key] = handles
        return handles

    def abort(self, key: str) -> bool:
        """Ends all sequences of a request; False when none is live. `key` as in `Prepared`."""
        handles = self._live.get(key, ())
        ended = [handle.cancel(FinishReason.ABORTED) for handle in handles]
        return any(ended)

    def forget(self, key: str, handles: Handles) -> None:
        """The request is answered. Its key may be another one's by now."""
        if self._live.get(key) == handles:
            del self._live[key]

    def _is_live(self, key: str) -> bool:
        return any(handle.finished is None for handle in self._live.get(key, ()))

    def _refusal(
        self, refusal: SubmitError, scheduler: Scheduler, prepared: Prepared
    ) -> ServiceError:
        match refusal:
            case QueueFullError(reason=bound, limit=limit, retry_after_s=delay):
                return ServiceError(
                    _BOUNDS[bound],
                    str(refusal),
                    retry_after_s=delay,
                    metadata={"bound": bound, "limit": limit},
                )
            case NotRunningError():
                if scheduler.failed.is_set():
                    return ServiceError(Reason.ENGINE_FAILED, "the engine failed")
                return ServiceError(
                    Reason.DRAINING, str(refusal), retry_after_s=self._retry_after_s
                )
            case InvalidRequestError(field="request_id", message=message):
                return _duplicate(message)
            case InvalidRequestError(field=field, message=message):
                return invalid([Violation(_path(field, prepared), message)])
        raise refusal


def _duplicate(message: str) -> ServiceError:
    return ServiceError(
        Reason.DUPLICATE_REQUEST,
        f"request_id: {message}",
        violations=[Violation("request_id", message)],
    )


def _path(field: str, prepared: Prepared) -> str:
    """A field of GenerationRequest as the client knows it."""
    if field == "prompt_ids":
        return prepared.input
    if field == "constraint" and prepared.options.form is not None:
        return f"sampling_params.{prepared.options.form}"
    return _PATHS.get(field) or f"sampling_params.{field.removeprefix('sampling.')}"
