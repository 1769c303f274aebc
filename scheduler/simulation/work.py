"""One request as its client sees it, from arrival to its end, over all attempts and machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from engine.plan import SamplingParams
from scheduler.request import Finished, FinishReason, GenerationRequest, Priority, Tokens
from scheduler.simulation.engine import OUTPUT, STOP, work_seed

SAMPLING_TEMPERATURE = 0.7


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """A request and what became of it. Times are seconds of virtual time."""

    serial: int
    arrived_at: float
    prompt: tuple[int, ...]
    output_tokens: int
    """Length of its text, if it gets that far."""
    max_tokens: int
    session: str | None = None
    priority: Priority = Priority.DEFAULT
    tenant: str = ""
    user: str = ""
    deadline: float | None = None
    on_end: Callable[[Work], None] | None = None
    reads_per_s: float | None = None
    """Tokens per second its reader takes; None reads at once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    machine: int = -1
    """Where it is, or was last."""
    attempts: int = 0
    """Times it was offered to a machine."""
    refusals: int = 0
    tokens: list[int] = field(default_factory=list)
    submitted_at: float = 0.0
    """When a machine accepted it."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None
    """A `FinishReason`, or why it was refused for good."""
    cached: int = 0
    """Prompt tokens taken from a kept prefix."""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    read_until: float = 0.0
    """When a slow reader has taken all it was sent."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)

    @property
    def request_id(self) -> str:
        return f"{self.serial}.{self.attempts}"

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            sampling=SamplingParams(
                temperature=SAMPLING_TEMPERATURE, seed=work_seed(self.serial, self.output_tokens)
            ),
            max_tokens=self.max_tokens,
            stop_ids=(STOP,),
            deadline=self.deadline,
            session_id=self.session,
            priority=self.priority,
            tenant=self.tenant,
        )

    def take(self, burst: Tokens) -> float | None:
        """A burst has come. Returns the seconds since the one before, None for the first."""
        gap = None if self.last_token_at is None else burst.at - self.last_token_at
        if self.first_token_at is None:
            self.first_token_at = burst.at
        self.last_token_at = burst.at
        self.tokens += burst.ids
        self.completion_tokens += len(burst.ids)
        return gap

    def finish(self, end: Finished, now: float) -> None:
        """A machine has ended it."""
        usage = end.usage
        self.started_at = usage.started_at
        self.cached = usage.cached_tokens
        self.drafted, self.accepted = usage.draft_tokens, usage.accepted_tokens
        self.preemptions = usage.preemptions
        self.outcome = end.reason.value
        self.ended_at = now

    def forget_text(self) -> None:
        """Keep the numbers only: a run has many requests."""
        self.prompt, self.tokens, self.on_end = (), [], None

    @property
    def complete(self) -> bool:
        """It got its whole text."""
        return self.outcome in (FinishReason.STOP, FinishReason.LENGTH)


class Content:
    """Token ids of prompts: text that nobody has seen before, and text that everybody shares."""

    def __init__(self, rng: random.Random) -> None:
        self._next = 1 + rng.randrange(1 << 16)
        self._serials = count(1)
        self._shared: dict[tuple[str, int], tuple[int, ...]] = {}

    def serial(self) -> int:
        """Of a new request."""
        return next(self._serials)

    def fresh(self, tokens: int) -> tuple[int, ...]:
        first = self._next
        if first + tokens >= OUTPUT:  # after half a billion tokens, begin again
            first = 1
        self._next = first + tokens
        return tuple(range(first, first + tokens))

    def shared(self, name: str, tokens: int) -> tuple[int, ...]:
        """A system prompt: the same for the same name."""
        key = (name, tokens)
        if key not in self._shared:
            self._shared[key] = self.fresh(tokens)
        return self._shared[key]
