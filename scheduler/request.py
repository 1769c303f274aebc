"""What goes into the scheduler and what comes out: requests, events, errors. Plain values.

The service turns an RPC into a `GenerationRequest` (token ids only, no text) and reads `Event`s:
any number of `Tokens`, then exactly one `Finished`. The scheduler raises one of the errors below
from `submit`, before anything was queued, or tells the end of an accepted request by `Finished`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from engine.plan import Constraint, Logprobs, SamplingParams


class FinishReason(StrEnum):
    """First cause that ended a request; later causes never replace it."""

    STOP = "stop"
    """A stop token was emitted."""
    LENGTH = "length"
    """max_tokens reached."""
    STOP_STRING = "stop_string"
    """The service matched a stop string (or otherwise had enough) and ended the request."""
    CANCELLED = "cancelled"
    """The client left."""
    ABORTED = "aborted"
    """`Abort` was called."""
    DEADLINE = "deadline"
    """The request's deadline passed while it was queued or running."""
    SLOW_READER = "slow_reader"
    """The client left its stream unread for longer than the limit."""
    FAULT = "fault"
    """This row's numbers went bad (NaN) or its memory could not be had; others go on."""
    SHUTDOWN = "shutdown"
    """The server is stopping and its drain time is over."""
    ENGINE_FAILED = "engine_failed"
    """The engine is beyond use."""


class Priority(IntEnum):
    """Class of a request; a higher one goes first, and ageing lifts who waits."""

    BATCH = 0
    """Nobody waits for it: it takes what others leave."""
    DEFAULT = 1
    INTERACTIVE = 2
    """Somebody reads along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. Ids are unique among live requests."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """At least one token."""
    sampling: SamplingParams
    max_tokens: int
    """>= 1; prompt plus max_tokens fits the context."""
    stop_ids: tuple[int, ...] = ()
    """At most `MAX_STOP_IDS`, end-of-sequence ids included: the scheduler adds none."""
    depth_cap: int | None = None
    """Most drafts per cycle, >= 0; None leaves it to the server, 0 turns speculation off. More than
    the server offers means what it offers."""
    deadline: float | None = None
    """In seconds of the scheduler's clock. A request that would not start before it, by what was
    measured, is refused. One that has passed is accepted and ends with DEADLINE before anything
    runs."""
    min_tokens: int = 0
    """No stop id is drawn before this many tokens, 0 … max_tokens."""
    logprobs: int | None = None
    """As in `RowSpec`: alternatives reported with each token, 0 … `MAX_LOGPROBS`; None for none."""
    prompt_logprobs: int | None = None
    """The same for the prompt. Such a request prefills its whole prompt itself."""
    constraint: Constraint | None = None
    """A form the output must have. The request owns it; give no two requests the same object."""
    reuse_prefix: bool = True
    """May start from a prefix that an earlier request left, and leave some. Never changes a token
    beyond what the engine promises of equal prefixes (design, 3.6)."""
    session_id: str | None = None
    """Keep the end of this request for the session's next turn, until TTL or pressure end it."""
    priority: Priority = Priority.DEFAULT
    tenant: str = ""
    """On whose account its tokens go: fair share and limits are per tenant. "" is everybody who
    names none."""
    cache_salt: str = ""
    """Requests with different salts share no prefix, and none can tell from its own time what
    another has sent. "" is a salt like any other."""
    group: str | None = None
    """Requests of one group have the same prompt (parallel samples): the first one's prefill is
    shared, and the others wait for it. None: no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Everything countable about a request, final in `Finished`. Times: scheduler-clock seconds."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens taken from a saved prefix; the others were prefilled."""
    completion_tokens: int = 0
    """Tokens handed to the stream, a stop token included, whether or not they were read."""
    cycles: int = 0
    """Decode cycles that emitted something for this request; its first token comes from prefill."""
    draft_tokens: int = 0
    """Drafts that were up for acceptance."""
    accepted_tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    """[j]: cycles in which draft j+1 was up for acceptance."""
    accepted_per_position: tuple[int, ...] = ()
    """[j]: cycles in which draft j+1 was accepted; as long as `drafted_per_position`."""
    preemptions: int = 0
    """Times it gave up its row and was recomputed later."""
    submitted_at: float = 0.0
    started_at: float | None = None
    """When its first prefill chunk was planned."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A burst: tokens one cycle emitted, in order, with the cycle's counts for this row."""

    ids: tuple[int, ...]
    """At least one; the last may be a stop token."""
    logprobs: Logprobs | None = None
    """One position per id, when the request asked."""
    prompt_logprobs: Logprobs | None = None
    """With the first `Tokens` only, when the request asked: of every prompt token but the first."""
    drafted: int
    accepted: int
    at: float
    """When the host learnt of it, in seconds of the scheduler's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a request."""

    reason: FinishReason
    usage: Usage
    detail: str = ""


Event = Tokens | Finished


class SubmitError(Exception):
    """A request was not accepted; nothing of it remains in the scheduler."""


class Refusal(StrEnum):
    """Why a request that could run here may not wait now. Stable names."""

    MAX_QUEUE = "max_queue"
    """As many requests wait as may."""
    MAX_QUEUED_TOKENS = "max_queued_tokens"
    """Its prompt does not fit beside those that wait."""
    TENANT_QUEUED_TOKENS = "tenant_queued_tokens"
    """The same, of its tenant's own limit."""
    DEADLINE = "deadline"
    """It would not start before its deadline."""


@dataclass(eq=False)
class QueueFullError(SubmitError):
    """Refused at the door; the client may try again after `retry_after_s`."""

    reason: Refusal
    limit: str
    """Which bound was hit, e.g. 'max_queue (64 requests)'."""
    retry_after_s: float

    def __str__(self) -> str:
        what = "too late" if self.reason is Refusal.DEADLINE else "queue is full"
        return f"{what}: {self.limit}; retry in {self.retry_after_s:.1f} s"


@dataclass(eq=False)
class InvalidRequestError(SubmitError):
    """The request can never run on this server. `field` is its name in `GenerationRequest`."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(eq=False)
class NotRunningError(SubmitError):
    """The scheduler is draining, stopped, or its engine failed."""

    message: str = field(default="the scheduler is not running")

    def __str__(self) -> str:
        return self.message
