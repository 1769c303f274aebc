"""Live requests: how they are accepted, what their clients do, how they end."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np
from numpy.typing import NDArray

from scheduler.admission import Limits, validate
from scheduler.config import SchedulerConfig
from scheduler.door import Door
from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.queue import WaitingQueue
from scheduler.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
)
from scheduler.sequence import Sequence
from scheduler.statistics import Meter
from scheduler.timers import Timers

DEADLINE_SLACK_S = 0.05
"""How close to its deadline a client's leaving counts as the deadline's doing."""


class Registry:
    """Keeps `live` (requests that have not ended, by id) and what must agree with it, over state
    that `SchedulerCore` owns. Its methods are those of the core, which says what they do."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        limits: Limits,
        max_depth: int,
        live: dict[str, Sequence],
        outbox: list[tuple[str, Event]],
        door: Door,
        queue: WaitingQueue,
        groups: Groups,
        timers: Timers,
        keeping: Keeping,
        meter: Meter,
    ) -> None:
        self._buffer = config.stream_buffer
        self._limits = limits
        self._max_depth = max_depth
        self._live = live
        self._outbox = outbox
        self._door = door
        self._queue = queue
        self._groups = groups
        self._timers = timers
        self._keeping = keeping
        self._meter = meter
        self._turns = 0
        self.closed: str | None = None
        """Why no new request is taken."""

    def submit(self, requests: Values[GenerationRequest], now: float) -> None:
        """All of them or none: one, or those of one group. Raises InvalidRequestError,
        QueueFullError or NotRunningError, which counts as one refusal; nothing of them remains
        then."""
        first = requests[0]
        label = self._queue.tenants.label(first.tenant)
        if self.closed is not None:
            self._meter.refuse("not_running", label)
            raise NotRunningError(self.closed)
        try:
            prompt = self._prompt(requests)
            self._groups.check(first.group, prompt)
            self._door.fits(first, len(prompt), len(requests))
        except InvalidRequestError:
            self._meter.refuse("invalid", label)
            raise
        if refusal := self._door.refusal(requests, len(prompt), now):
            self._meter.refuse(refusal.reason, label)
            raise refusal
        for request in requests:
            self._take(request, prompt, now)

    def _prompt(self, requests: Values[GenerationRequest]) -> NDArray[np.int32]:
        """Of each of them. Raises InvalidRequestError.

        Samples of one long prompt have the very same ids, and making them an array 16 times would
        take a tenth of a second."""
        prompt: NDArray[np.int32] | None = None
        ids: set[str] = set()
        first = requests[0]
        for request in requests:
            if request.request_id in self._live or request.request_id in ids:
                raise InvalidRequestError("request_id", "a live request has this id")
            ids.add(request.request_id)
            if (request.group, request.tenant) != (first.group, first.tenant):
                raise InvalidRequestError("group", "all are to be of one group and tenant")
            if prompt is not None and request.prompt_ids != first.prompt_ids:
                raise InvalidRequestError("group", "its requests must have the same prompt")
            prompt = validate(request, self._limits, prompt)
        assert prompt is not None
        return prompt

    def _take(self, request: GenerationRequest, prompt: NDArray[np.int32], now: float) -> None:
        """The door has let it in."""
        sequence = self._sequence(request, prompt, now)
        if request.session_id is not None:
            self._keeping.sessions.touch(request.session_id, now)
        self._live[request.request_id] = sequence
        self._queue.push(sequence)
        self._timers.add(sequence)
        self._meter.submitted += 1

    def _sequence(
        self, request: GenerationRequest, prompt: NDArray[np.int32], now: float
    ) -> Sequence:
        cap = self._max_depth if request.depth_cap is None else request.depth_cap
        sequence = Sequence(
            request=request,
            prompt=prompt,
            submitted_at=now,
            depth_cap=min(cap, self._max_depth),
        )
        self._groups.join(sequence)
        sequence.work = 1 if self._groups.follows(sequence) else len(prompt)
        return sequence

    def cancel(self, request_id: str, reason: FinishReason, now: float, detail: str) -> bool:
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        deadline = sequence.request.deadline
        if reason is FinishReason.CANCELLED and deadline is not None:
            reason = FinishReason.DEADLINE if now >= deadline - DEADLINE_SLACK_S else reason
        self.end(sequence, reason, now, detail)
        return True

    def acknowledge(self, request_id: str, tokens: int, now: float) -> bool:
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        sequence.unread -= tokens
        if sequence.paused_at is None:
            return False
        if sequence.unread >= self._buffer:
            self._timers.pause(sequence, now)
            return False
        self._timers.resume(sequence)
        return True

    def expire(self, now: float) -> None:
        """End requests past their deadline and those whose readers are too slow."""
        for sequence, reason, detail in self._timers.due(now):
            self.end(sequence, reason, now, detail)

    def end_all(self, reason: FinishReason, now: float, detail: str) -> None:
        for sequence in list(self._live.values()):
            self.end(sequence, reason, now, detail)

    def end(self, sequence: Sequence, reason: FinishReason, now: float, detail: str) -> None:
        """Record the first cause and tell the client; the only place that does."""
        if not sequence.started:
            self._queue.remove(sequence)
        self._groups.end(sequence)
        sequence.cause = reason
        sequence.turn = self.next_turn()
        sequence.leaving = None
        self._timers.forget(sequence)
        self._keeping.end_waiting(sequence, now)
        del self._live[sequence.request_id]
        self._meter.end(reason, sequence.emitted)
        finished = Finished(reason=reason, usage=sequence.usage(now), detail=detail)
        self._outbox.append((sequence.request_id, finished))

    def next_turn(self) -> int:
        """A number above all before: of two ends of a session, the later one counts."""
        self._turns += 1
        return self._turns
