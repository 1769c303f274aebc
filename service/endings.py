"""How a call ends: its last message, its status, and what the scheduler is told."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.request import Finished, FinishReason
from service.errors import Reason, ServiceError
from service.prompt import Prepared
from service.stream import TextStream

Context = grpc.aio.ServicerContext[Any, Any]

_DEADLINE_SLACK_S: Final = 0.05
"""A client whose own deadline passes cancels a little before the server's clock says so: the
deadline travels rounded, and starts again on arrival."""


@dataclass(slots=True)
class Ending:
    """How the call of this task ends, as far as it is known."""

    reason: Reason | None = None


_ending: ContextVar[Ending | None] = ContextVar("ending", default=None)


def ending_of_call() -> Ending:
    """Begins to note how the call of this task, or of one it starts, ends."""
    ending = Ending()
    _ending.set(ending)
    return ending


async def abort(context: Context, error: ServiceError) -> NoReturn:
    """Ends the call with `error` and its details."""
    if (ending := _ending.get()) is not None:
        ending.reason = error.reason
    status = error.to_status()
    await context.abort(status.code, status.details, status.trailing_metadata)


def cause(error: BaseException, context: Context) -> FinishReason:
    """Why a generation whose handler ends with `error` has to end."""
    if isinstance(error, asyncio.CancelledError):
        error = gone(context)
    match error:
        case ServiceError(reason=Reason.SLOW_READER):
            return FinishReason.SLOW_READER
        case ServiceError(reason=Reason.DEADLINE_EXCEEDED):
            return FinishReason.DEADLINE
        case ServiceError(reason=Reason.ABORTED):
            return FinishReason.ABORTED
    return FinishReason.CANCELLED


def gone(context: Context) -> ServiceError:
    """Why gRPC cancelled the handler: the call's deadline, or the client. The first answer stands,
    whoever asks."""
    ending = _ending.get() or Ending()
    if ending.reason not in (Reason.DEADLINE_EXCEEDED, Reason.CANCELLED):
        remaining: float | None = context.time_remaining()
        late = remaining is not None and remaining <= _DEADLINE_SLACK_S
        ending.reason = Reason.DEADLINE_EXCEEDED if late else Reason.CANCELLED
    if ending.reason is Reason.DEADLINE_EXCEEDED:
        return ServiceError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed")
    return ServiceError(Reason.CANCELLED, "the client left")


def complete_message(
    end: Finished, stream: TextStream, prepared: Prepared, index: int
) -> pb.GenerateComplete:
    """The last message of a sequence that ended well."""
    usage = end.usage
    start, first, done = usage.submitted_at, usage.first_token_at, usage.finished_at
    stopped = stream.ended or end.reason is not FinishReason.LENGTH
    complete = pb.GenerateComplete(
        finish_reason="stop" if stopped else "length",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=stream.completion_tokens,
        spec_draft_tokens=usage.draft_tokens,
        spec_accepted_tokens=usage.accepted_tokens,
        spec_draft_tokens_per_pos=usage.drafted_per_position,
        spec_accepted_tokens_per_pos=usage.accepted_per_position,
        spec_cycles=usage.cycles,
        queue_seconds=(usage.started_at if usage.started_at is not None else start) - start,
        time_to_first_token_seconds=(first if first is not None else start) - start,
        e2e_seconds=(done if done is not None else start) - start,
        seed=prepared.options.sampling.seed,
        speculation_mode=prepared.options.mode,
        index=index,
        preemptions=usage.preemptions,
    )
    if stream.stop_id is not None:
        complete.matched_token_id = stream.stop_id
    elif stream.stop_string is not None:
        complete.matched_stop_str = stream.stop_string
    return complete
