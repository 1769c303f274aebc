"""What steps brought, given to the rows they name: checked, counted, and passed on to streams."""

from __future__ import annotations

from typing import Protocol

from engine.plan import Finish, PrefillChunk, RowResult
from scheduler.config import SchedulerConfig
from scheduler.keeping import Keeping
from scheduler.queue import WaitingQueue
from scheduler.request import Event, FinishReason, Tokens
from scheduler.sequence import Sequence, joined
from scheduler.statistics import Meter
from scheduler.ticket import Cohort, breach, chunk_breach
from scheduler.timers import Timers


class End(Protocol):
    """Records why a sequence ends and tells its client."""

    def __call__(
        self, sequence: Sequence, reason: FinishReason, now: float, detail: str
    ) -> None: ...


class Delivery:
    """Applies results over state that `SchedulerCore` owns."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        meter: Meter,
        keeping: Keeping,
        outbox: list[tuple[str, Event]],
        end: End,
        queue: WaitingQueue,
        timers: Timers,
    ) -> None:
        self._buffer = config.stream_buffer
        self._meter = meter
        self._keeping = keeping
        self._outbox = outbox
        self._end = end
        self._queue = queue
        self._timers = timers

    def chunk(
        self, sequence: Sequence, chunk: PrefillChunk, row: RowResult | None, now: float
    ) -> int:
        """Give a row what a chunk of its prompt brought; returns the tokens handed to its
        stream."""
        sequence.tickets -= 1
        sequence.ceiling -= chunk.last
        sequence.floor -= chunk.last
        if sequence.cause is None and (problem := chunk_breach(sequence, chunk, row)):
            self._breach(sequence, problem, now)
            return 0
        if row is not None and row.prompt_logprobs is not None:
            sequence.prompt_logprobs.append(row.prompt_logprobs)
        if not chunk.last and (row is None or row.fault is None):
            return 0
        return self._apply(sequence, row, 1, now)

    def cohort(self, cohort: Cohort, decoded: list[RowResult | None], now: float) -> int:
        """Give a cohort its results; returns the tokens handed to streams."""
        tokens = 0
        for (sequence, most), row in zip(cohort.rows, decoded, strict=True):
            sequence.tickets -= 1
            sequence.ceiling -= most
            sequence.floor -= 1
            tokens += self._apply(sequence, row, most, now)
        return tokens

    def _apply(self, sequence: Sequence, row: RowResult | None, most: int, now: float) -> int:
        """Give a row what a step brought; returns the tokens handed to its stream."""
        if row is not None:
            sequence.output += row.tokens
            if row.fault is not None:
                self._distrust(sequence)
        if sequence.cause is not None:
            self._discard(row)
            return 0
        if problem := breach(sequence, row, most):
            self._breach(sequence, problem, now)
            return 0
        assert row is not None
        if row.fault is not None:
            self._end(sequence, FinishReason.FAULT, now, row.fault)
            return 0
        sequence.record(row, now)
        self._queue.charge(sequence, len(row.tokens))
        self._meter.row(row)
        self._outbox.append((sequence.request_id, self._burst(sequence, row, now)))
        if row.finish is not None:
            reason = FinishReason.STOP if row.finish is Finish.STOP else FinishReason.LENGTH
            self._end(sequence, reason, now, "")
        elif sequence.unread >= self._buffer and sequence.paused_at is None:
            self._timers.pause(sequence, now)
        return len(row.tokens)

    def _burst(self, sequence: Sequence, row: RowResult, now: float) -> Tokens:
        prompt = None
        if sequence.request.prompt_logprobs is not None and sequence.emitted == len(row.tokens):
            prompt = joined(sequence.prompt_logprobs)
        return Tokens(
            ids=row.tokens,
            logprobs=row.logprobs,
            prompt_logprobs=prompt,
            drafted=row.drafted,
            accepted=row.accepted,
            at=now,
        )

    def _breach(self, sequence: Sequence, problem: str, now: float) -> None:
        self._distrust(sequence)
        detail = f"the engine broke its contract: {problem}"
        self._end(sequence, FinishReason.FAULT, now, detail)

    def _distrust(self, sequence: Sequence) -> None:
        """Its numbers are bad: neither it nor what it left or started from is kept."""
        sequence.spoiled = True
        self._keeping.cache.distrust(sequence.row, sequence.origin)

    def _discard(self, row: RowResult | None) -> None:
        """A result for a request that has ended."""
        if row is None or not row.tokens:
            self._meter.wasted_rows += 1
        else:
            self._meter.row(row)
            self._meter.discarded_tokens += len(row.tokens)
