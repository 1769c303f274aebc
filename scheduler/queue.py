"""Who waits for a row, in which order, and how many may.

Order is by class, then arrival.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.pages import IntegrityError
from scheduler.sequence import Sequence


class WaitingQueue:
    """Bounded in requests and in prompt tokens, except for those that come back."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.tokens = 0
        """Prompt tokens waiting."""
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._waiting.values(), key=lambda s: -s.priority))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def refusal(self, prompt_tokens: int) -> tuple[str, str, int] | None:
        """None when a prompt of this length fits now. Otherwise which bound is hit (its name and
        its text), and how many requests must leave before it would fit."""
        if len(self) >= self.max_requests:
            return "max_queue", f"max_queue ({self.max_requests} requests)", 1
        excess = self.tokens + prompt_tokens - self.max_tokens
        if excess <= 0:
            return None
        leaving = 0
        for sequence in self:
            leaving += 1
            excess -= len(sequence.prompt)
            if excess <= 0:
                break
        limit = f"max_queued_tokens ({self.max_tokens} prompt tokens)"
        return "max_queued_tokens", limit, leaving

    def push(self, sequence: Sequence) -> None:
        """Only after `refusal` said None."""
        self._waiting[sequence.request_id] = sequence
        self.tokens += len(sequence.prompt)

    def requeue(self, sequence: Sequence) -> None:
        """A preempted one is back: it is the first of its class. No bound refuses it."""
        self._waiting = {sequence.request_id: sequence, **self._waiting}
        self.tokens += len(sequence.prompt)

    def head(self) -> Sequence | None:
        """Who starts next."""
        return next(iter(self), None)

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.request_id]
        self.tokens -= len(sequence.prompt)

    def integrity(self) -> None:
        """Raises IntegrityError."""
        new = [len(s.prompt) for s in self if not s.preemptions]
        tokens = sum(len(sequence.prompt) for sequence in self)
        if self.tokens != tokens or len(new) > self.max_requests or sum(new) > self.max_tokens:
            raise IntegrityError("the queue's counts are off or beyond its bounds")
        if any(sequence.started or sequence.cause for sequence in self):
            raise IntegrityError("a started or ended sequence is still queued")
