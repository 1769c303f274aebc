"""The scheduler as a deterministic machine: explicit state, explicit time, no I/O.

    submit / cancel / acknowledge     the world changes something
    plan(now)   -> StepPlan           decide one engine step; counts as submitted from here on
    commit(result, now) -> events     learn what the oldest step in flight brought

`plan` may be called again before the previous result is known (pipelining): page tables and
`max_tokens` are then reckoned with what the steps in flight may add. Results come back in order.

Life of a request: queued → running (a row; prefilling, then decoding) → ended → reaped. It *ends*
at once for its client, with the first cause, and emits nothing after it. Its row, slot and pages
are *reaped* in one place, `_reap`, at the first plan after the last step in flight that names the
row has come back; that same plan tells the engine to release it.

Each step carries prefill chunks and the decode cohort side by side, so neither starves the other.
A prompt is cut at multiples of `prefill_chunk` from its own start, whoever its neighbours are.

Bounds (`SchedulerConfig`, defaults in parentheses; None follows the engine):

    what                    limit                     beyond it
    ----------------------  ------------------------  -------------------------------------------
    waiting requests        max_queue (64)            QueueFullError with a measured retry delay
    waiting prompt tokens   max_queued_tokens (256k)  the same
    rows at once            max_rows (256), engine's  wait in the queue
    KV pages                engine's pool             wait in the queue; InvalidRequestError when
                                                      the worst case exceeds the whole pool
    prompt length           max_prompt_tokens (None)  InvalidRequestError
    max_tokens              max_completion_tokens     InvalidRequestError
                            (None); context
    prompt tokens per step  prefill_chunk (engine's)  the next step
    unread tokens           stream_buffer (256)       the row pauses; SLOW_READER after
                                                      slow_reader_timeout_s (30)
    steps in flight         engine.max_in_flight (2)  IntegrityError: the caller's mistake
"""

from __future__ import annotations

from collections import deque

from engine.plan import (
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    Finish,
    PrefillChunk,
    RowResult,
    StepPlan,
    StepResult,
    pages_needed,
)
from scheduler.admission import Limits, validate
from scheduler.books import check_books
from scheduler.config import SchedulerConfig
from scheduler.depth import depth_policy
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.queue import WaitingQueue
from scheduler.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
    Tokens,
)
from scheduler.sequence import Sequence
from scheduler.statistics import Meter, Statistics
from scheduler.ticket import Ticket, breach

RETRY_BOUNDS_S = (0.1, 60.0)
"""Retry delays are clamped to this."""
DEADLINE_SLACK_S = 0.05
"""How close to its deadline a client's leaving counts as the deadline's doing."""


class SchedulerCore:
    """All scheduling state. Not thread-safe; one owner calls it."""

    def __init__(self, *, info: EngineInfo, config: SchedulerConfig, max_in_flight: int) -> None:
        self.config = config
        self.limits = Limits.of(info, config)
        self._prefill_chunk = config.prefill_chunk or info.prefill_chunk
        self._max_depth = info.max_depth if config.depth == "auto" else config.depth
        self._max_depth = min(self._max_depth, info.max_depth)
        self._max_in_flight = max_in_flight
        self._max_rows = min(config.max_rows, info.max_rows)
        self._depth = depth_policy(config.depth, info.max_depth)
        self._queue = WaitingQueue(
            max_requests=config.max_queue, max_tokens=config.max_queued_tokens
        )
        self._pool = PagePool(pages=info.pages)
        self._tables = PageTables(slots=self._max_rows, width=self.limits.pages_per_row)
        self._live: dict[str, Sequence] = {}
        """Accepted requests that have not ended, by id."""
        self._rows: dict[int, Sequence] = {}
        """Sequences that hold device state, by row id, oldest first."""
        self._tickets: deque[Ticket] = deque()
        self._outbox: list[tuple[str, Event]] = []
        self._meter = Meter(window_s=config.rate_window_s)
        self._next_step = 0
        self._next_row = 1
        self._closed: str | None = None

    # --- the world changes something -------------------------------------------------------------

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._tickets)

    @property
    def is_empty(self) -> bool:
        """No request, no row, no step in flight, no event left to take."""
        return not (self._live or self._rows or self._tickets or self._outbox)

    def submit(self, request: GenerationRequest, now: float) -> None:
        """Queue a request.

        Raises InvalidRequestError (it can never run), QueueFullError (not now) or NotRunningError;
        nothing of the request remains then.
        """
        if self._closed is not None:
            self._meter.refused["not_running"] += 1
            raise NotRunningError(self._closed)
        try:
            if request.request_id in self._live:
                raise InvalidRequestError("request_id", "a live request has this id")
            prompt = validate(request, self.limits)
        except InvalidRequestError:
            self._meter.refused["invalid"] += 1
            raise
        if refusal := self._queue.refusal(len(prompt)):
            reason, limit, leaving = refusal
            self._meter.refused[reason] += 1
            raise QueueFullError(limit, self._retry_after(leaving, now))
        cap = self._max_depth if request.depth_cap is None else request.depth_cap
        sequence = Sequence(
            request=request,
            prompt=prompt,
            submitted_at=now,
            depth_cap=min(cap, self._max_depth),
        )
        self._live[request.request_id] = sequence
        self._queue.push(sequence)
        self._meter.submitted += 1

    def cancel(self, request_id: str, reason: FinishReason, now: float, detail: str = "") -> bool:
        """End a request for `reason`; False when no live request has this id.

        Its `Finished` is in the outbox at once, and tokens of steps in flight are dropped. A queued
        request is gone; a running one is in no further plan, and its row is reaped when its last
        step has come back. A client that leaves just as its deadline passes left because of it: its
        stream is cut at the deadline, often a moment before `plan` would have seen it.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        deadline = sequence.request.deadline
        if reason is FinishReason.CANCELLED and deadline is not None:
            reason = FinishReason.DEADLINE if now >= deadline - DEADLINE_SLACK_S else reason
        self._end(sequence, reason, now, detail)
        return True

    def acknowledge(self, request_id: str, tokens: int, now: float) -> bool:
        """The reader took `tokens`. True when that resumes a paused row."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        sequence.unread -= tokens
        if sequence.paused_at is None:
            return False
        resumed = sequence.unread < self.config.stream_buffer
        sequence.paused_at = None if resumed else now
        return resumed

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def close(self, message: str) -> None:
        """Refuse new requests from now on, with NotRunningError(message). The first one stays."""
        self._closed = self._closed or message

    def abandon(self, detail: str, now: float) -> list[tuple[str, Event]]:
        """The engine is gone: end every request with ENGINE_FAILED and forget all rows; returns
        `take_events()`."""
        self.close(detail)
        for sequence in list(self._live.values()):
            self._end(sequence, FinishReason.ENGINE_FAILED, now, detail)
        self._tickets.clear()
        for sequence in self._rows.values():
            sequence.tickets = sequence.ceiling = sequence.floor = 0
        self._reap()
        return self.take_events()

    def take_events(self) -> list[tuple[str, Event]]:
        """Events not taken yet, in order. `commit` includes them; ends outside of it do not."""
        events, self._outbox = self._outbox, []
        return events

    def next_due(self) -> float | None:
        """The next time at which `plan` has something to end: a deadline or a slow reader."""
        due = [s.request.deadline for s in self._live.values() if s.request.deadline is not None]
        timeout = self.config.slow_reader_timeout_s
        due += [s.paused_at + timeout for s in self._live.values() if s.paused_at is not None]
        return min(due, default=None)

    # --- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide one step. An empty plan is not in flight; any other must be submitted.

        Raises IntegrityError when the engine takes no further step; nothing has changed then.
        """
        if len(self._tickets) >= self._max_in_flight:
            raise IntegrityError(f"{self._max_in_flight} steps are in flight already")
        self._expire(now)
        release = self._reap()
        cohort = [s for s in self._rows.values() if s.can_decode]
        ticket = Ticket(step=self._next_step)
        ticket.chunks = self._prefill(now)
        decode = self._decode(cohort, ticket) if cohort else None
        plan = StepPlan(
            step=ticket.step,
            release=release,
            prefill=tuple(chunk for _, chunk in ticket.chunks),
            decode=decode,
        )
        if not plan.is_empty:
            self._tickets.append(ticket)
            self._next_step += 1
        return plan

    def _expire(self, now: float) -> None:
        """End what is past its deadline, and readers that are too slow."""
        timeout = self.config.slow_reader_timeout_s
        for sequence in list(self._live.values()):
            deadline = sequence.request.deadline
            if deadline is not None and now >= deadline:
                self._end(sequence, FinishReason.DEADLINE, now, "")
            elif sequence.paused_at is not None and now >= sequence.paused_at + timeout:
                detail = f"{sequence.unread} tokens unread for {timeout:g} s"
                self._end(sequence, FinishReason.SLOW_READER, now, detail)

    def _reap(self) -> tuple[int, ...]:
        """Free everything of ended rows that no step in flight names; the only place that does."""
        ended = [row for row, s in self._rows.items() if s.cause is not None and not s.tickets]
        for row in ended:
            sequence = self._rows.pop(row)
            self._tables.give_back(sequence.slot)
            self._pool.free(row)
        return tuple(ended)

    def _prefill(self, now: float) -> list[tuple[Sequence, PrefillChunk]]:
        """One budget's worth of chunks: prompts already begun first, then from the queue."""
        chunks: list[tuple[Sequence, PrefillChunk]] = []
        budget = self._prefill_chunk
        for sequence in [s for s in self._rows.values() if s.prefilling and s.cause is None]:
            if self._next_chunk(sequence) > budget:
                return chunks
            budget -= self._next_chunk(sequence)
            chunks.append((sequence, self._chunk(sequence)))
        while (head := self._queue.head()) and self._can_start(head):
            if self._next_chunk(head) > budget:
                break
            self._start(head, now)
            budget -= self._next_chunk(head)
            chunks.append((head, self._chunk(head)))
        return chunks

    def _can_start(self, sequence: Sequence) -> bool:
        pages = sequence.pages_at_worst(self.limits.page_size)
        return self._tables.free_slots > 0 and self._pool.can_reserve(pages)

    def _start(self, sequence: Sequence, now: float) -> None:
        self._queue.remove(sequence)
        sequence.row, self._next_row = self._next_row, self._next_row + 1
        sequence.slot = self._tables.take_slot()
        sequence.started_at = now
        self._pool.reserve(sequence.row, sequence.pages_at_worst(self.limits.page_size))
        self._rows[sequence.row] = sequence

    def _next_chunk(self, sequence: Sequence) -> int:
        """Tokens of the next chunk; cuts are multiples of `prefill_chunk`."""
        return min(self._prefill_chunk, len(sequence.prompt) - sequence.cursor)

    def _chunk(self, sequence: Sequence) -> PrefillChunk:
        start = sequence.cursor
        end = start + self._next_chunk(sequence)
        last = end == len(sequence.prompt)
        self._grow(sequence, end)
        sequence.cursor = end
        sequence.tickets += 1
        if last:
            sequence.ceiling += 1
            sequence.floor += 1
        return PrefillChunk(
            row=sequence.row,
            tokens=sequence.prompt[start:end],
            start=start,
            pages=self._tables.table(sequence.slot),
            last=last,
            spec=sequence.spec() if start == 0 else None,
        )

    def _decode(self, cohort: list[Sequence], ticket: Ticket) -> DecodeBatch:
        caps = [sequence.depth_cap for sequence in cohort]
        depth = self._depth.choose(caps, prefilling=bool(ticket.chunks))
        limits = [min(cap, depth) for cap in caps]
        for sequence, limit in zip(cohort, limits, strict=True):
            self._grow(sequence, sequence.reach(depth))
            sequence.tickets += 1
            sequence.ceiling += limit + 1
            sequence.floor += 1
            ticket.decode.append((sequence, limit + 1))
        ticket.depth = depth
        self._meter.cohort(depth=depth, rows=len(cohort))
        return DecodeBatch(
            rows=tuple(sequence.row for sequence in cohort),
            pages=self._tables.gather([sequence.slot for sequence in cohort]),
            depth=depth,
            limits=tuple(limits),
        )

    def _grow(self, sequence: Sequence, positions: int) -> None:
        """Extend a row's table to cover `positions`."""
        held = self._tables.length(sequence.slot)
        missing = pages_needed(positions, self.limits.page_size) - held
        if missing > 0:
            self._tables.extend(sequence.slot, self._pool.allocate(sequence.row, missing))

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[tuple[str, Event]]:
        """Take the result of the oldest step in flight; returns `take_events()`.

        Raises EngineFailedError when it is not the result of that step.
        """
        ticket = self._tickets.popleft() if self._tickets else None
        if ticket is None or ticket.step != result.step:
            raise EngineFailedError(f"the result of step {result.step} is out of order")
        rows = {row.row: row for row in result.rows}
        tokens = 0
        for sequence, chunk in ticket.chunks:
            sequence.tickets -= 1
            sequence.ceiling -= chunk.last
            sequence.floor -= chunk.last
            row = rows.pop(sequence.row, None)
            if chunk.last or row is not None:
                tokens += self._apply(sequence, row, 1, now)
        decoded = [rows.pop(s.row, None) for s, _ in ticket.decode]
        for (sequence, most), row in zip(ticket.decode, decoded, strict=True):
            sequence.tickets -= 1
            sequence.ceiling -= most
            sequence.floor -= 1
            tokens += self._apply(sequence, row, most, now)
        if rows:
            raise EngineFailedError(f"step {result.step} has results for rows it did not run")
        if ticket.decode:
            self._depth.observe(
                [row for row in decoded if row],
                depth=ticket.depth,
                rows=len(ticket.decode),
                device_s=None if ticket.chunks else result.device_s,
            )
        self._meter.step(result, prompt_tokens=ticket.prompt_tokens, tokens=tokens, now=now)
        return self.take_events()

    def _apply(self, sequence: Sequence, row: RowResult | None, most: int, now: float) -> int:
        """Give a row what a step brought; returns the tokens handed to its stream."""
        if sequence.cause is not None:
            self._discard(row)
            return 0
        if problem := breach(sequence, row, most):
            self._end(
                sequence, FinishReason.FAULT, now, f"the engine broke its contract: {problem}"
            )
            return 0
        assert row is not None
        if row.fault is not None:
            self._end(sequence, FinishReason.FAULT, now, row.fault)
            return 0
        sequence.record(row, now)
        self._meter.row(row)
        self._outbox.append(
            (
                sequence.request_id,
                Tokens(
                    ids=row.tokens,
                    logprobs=row.logprobs,
                    prompt_logprobs=row.prompt_logprobs,
                    drafted=row.drafted,
                    accepted=row.accepted,
                    at=now,
                ),
            )
        )
        if row.finish is not None:
            reason = FinishReason.STOP if row.finish is Finish.STOP else FinishReason.LENGTH
            self._end(sequence, reason, now, "")
        elif sequence.unread >= self.config.stream_buffer and sequence.paused_at is None:
            sequence.paused_at = now
        return len(row.tokens)

    def _discard(self, row: RowResult | None) -> None:
        """A result for a request that has ended."""
        if row is None or not row.tokens:
            self._meter.wasted_rows += 1
        else:
            self._meter.row(row)
            self._meter.discarded_tokens += len(row.tokens)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, detail: str) -> None:
        """Record the first cause and tell the client; the only place that does."""
        if not sequence.started:
            self._queue.remove(sequence)
        sequence.cause = reason
        sequence.paused_at = None
        del self._live[sequence.request_id]
        self._meter.end(reason, sequence.emitted)
        finished = Finished(reason=reason, usage=sequence.usage(now), detail=detail)
        self._outbox.append((sequence.request_id, finished))

    # --- looking in ------------------------------------------------------------------------------

    def _retry_after(self, leaving: int, now: float) -> float:
        """Seconds until `leaving` requests have left the queue, at the measured throughput."""
        low, high = RETRY_BOUNDS_S
        return min(max(leaving * self._meter.seconds_per_request(now), low), high)

    def integrity(self, *, idle: bool = False) -> None:
        """Account for every page, slot, row and registry entry. `idle`: after an empty plan with
        nothing in flight, when no ended row may be left either. Raises IntegrityError."""
        check_books(
            live=self._live,
            rows=self._rows,
            tickets=self._tickets,
            queue=self._queue,
            pool=self._pool,
            tables=self._tables,
            idle=idle,
        )

    def statistics(self, now: float) -> Statistics:
        """A snapshot; costs one pass over the running rows."""
        running = [s for s in self._rows.values() if s.cause is None]
        head = self._queue.head()
        return Statistics(
            at=now,
            queued_requests=len(self._queue),
            queued_tokens=self._queue.tokens,
            running=len(running),
            prefilling=sum(s.first_token_at is None for s in running),
            paused=sum(s.paused_at is not None for s in running),
            rows_held=len(self._rows),
            max_rows=self._max_rows,
            in_flight=len(self._tickets),
            pages_total=self._pool.total,
            pages_used=self._pool.used,
            pages_reserved=self._pool.reserved,
            pages_peak=self._pool.peak,
            tokens_per_second=self._meter.generated.per_second(now),
            prompt_tokens_per_second=self._meter.prefilled.per_second(now),
            depth=self._meter.depth,
            step_s=self._meter.step_s,
            step_times=self._depth.step_times(),
            oldest_wait_s=now - head.submitted_at if head else 0.0,
            **self._meter.snapshot(),
        )
