"""The scheduler as a deterministic machine: explicit state, explicit time, no I/O.

    submit / cancel / acknowledge     the world changes something
    plan(now)   -> StepPlan           decide one engine step; counts as submitted from here on
    commit(result, now) -> events     learn what the oldest step in flight brought

`plan` may be called again before the previous result is known (pipelining): page tables and
`max_tokens` are then reckoned with what the steps in flight may add. Results come back in order.

Life of a request: queued → running (a row; prefilling, then decoding) → ended → reaped. It *ends*
at once for its client, with the first cause, and emits nothing after it. Its row, slot and pages
are *reaped* in one place, `_reap`, at the first plan after the last step in flight that names the
row has come back; that same plan tells the engine to release it, and to keep its end as a prefix
for later requests when there is one to keep. A row that is *preempted* (`scheduler.preemption`) is
planned no more, gets what steps in flight bring, is reaped in the same way, and is queued again
with its output as the end of its prompt.

Each step carries prefill chunks and the decode cohorts side by side, so none starves another. Rows
with a constraint are a cohort of their own, planned only when no step in flight names them.

The parts: `scheduler.prefill` (who starts, and from what), `scheduler.prefix` and
`scheduler.sessions` (what is kept), `scheduler.cohorts` and `scheduler.depth` (who decodes how
deep), `scheduler.delivery` (what becomes of results).

Bounds (`SchedulerConfig`, defaults in parentheses; None follows the engine):

    what                    limit                     beyond it
    ----------------------  ------------------------  -------------------------------------------
    waiting requests        max_queue (64)            QueueFullError with a measured retry delay
    waiting prompt tokens   max_queued_tokens (256k)  the same
    the same of a tenant    its max_queued_tokens     the same; InvalidRequestError when the prompt
                            (None)                    alone exceeds it
    time until it starts    the request's deadline    the same, once enough was measured
                            (None)
    time in a lower class   ageing_s (30) per class   counts as the next higher class
    rows of a tenant        its max_rows (None)       wait in the queue; other tenants pass
    rows at once            max_rows (256), engine's  wait in the queue
    KV pages                engine's pool             kept prefixes go (LRU); then new rows wait
                                                      in the queue, and the most junior ones are
                                                      preempted; InvalidRequestError when the
                                                      worst case exceeds the whole pool
    kept prefixes           engine's boundaries       the least recently used one goes
    sessions                max_sessions (256),       the least recently used one is unpinned
                            session_ttl_s (600)
    prompt length           max_prompt_tokens (None)  InvalidRequestError
    max_tokens              max_completion_tokens     InvalidRequestError
                            (None); context
    prompt tokens per step  prefill_chunk (engine's)  the next step
    seconds per step        max_token_gap_s (None)    the next step, but prefill_share (0.25) of the
                                                      time is the prompts'
    unread tokens           stream_buffer (256)       the row pauses; SLOW_READER after
                                                      slow_reader_timeout_s (30)
    steps in flight         engine.max_in_flight (2)  IntegrityError: the caller's mistake
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    EngineFailedError,
    EngineInfo,
    KeepRow,
    SavedPrefix,
    StepPlan,
    StepResult,
)
from scheduler.admission import Limits, validate
from scheduler.books import check_books
from scheduler.cohorts import CohortPlanner
from scheduler.config import SchedulerConfig
from scheduler.delivery import Delivery
from scheduler.depth import depth_policy
from scheduler.door import Door
from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pace import Budget, Pace
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.preemption import Preemption, seniority
from scheduler.prefill import PrefillPlanner
from scheduler.prefix import Entry
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
from scheduler.sessions import SessionInfo
from scheduler.statistics import Meter, Statistics
from scheduler.throughput import Throughput
from scheduler.ticket import Ticket
from scheduler.timers import Timers

Prompt = NDArray[np.int32]

DEADLINE_SLACK_S = 0.05
"""How close to its deadline a client's leaving counts as the deadline's doing."""


class SchedulerCore:
    """All scheduling state. Not thread-safe; one owner calls it."""

    def __init__(self, *, info: EngineInfo, config: SchedulerConfig, max_in_flight: int) -> None:
        self.config = config
        self.limits = Limits.of(info, config)
        self._max_depth = info.max_depth if config.depth == "auto" else config.depth
        self._max_depth = min(self._max_depth, info.max_depth)
        self._max_in_flight = max_in_flight
        self._max_rows = min(config.max_rows, info.max_rows)
        self._queue = WaitingQueue(config)
        self._pool = PagePool(pages=info.pages)
        self._tables = PageTables(slots=self._max_rows, width=self.limits.pages_per_row)
        self.keeping = Keeping(info=info, config=config, pool=self._pool)
        """Prefixes and sessions."""
        self._memory = RowMemory(
            pool=self._pool,
            tables=self._tables,
            cache=self.keeping.cache,
            page_size=info.page_size,
            watermark=math.ceil(config.page_watermark * info.pages),
        )
        self._free, self._guided = (
            CohortPlanner(
                policy=depth_policy(config.depth, info.max_depth, table),
                tables=self._tables,
                memory=self._memory,
            )
            # A guided cycle waits for the host at every draft: it has costs of its own.
            for table in (config.costs_of(info), None)
        )
        self._groups = Groups()
        self._live: dict[str, Sequence] = {}
        """Accepted requests that have not ended, by id."""
        self._rows: dict[int, Sequence] = {}
        """Sequences that hold device state, by row id, oldest first."""
        self._tickets: deque[Ticket] = deque()
        self._outbox: list[tuple[str, Event]] = []
        self._meter = Meter(window_s=config.rate_window_s)
        self._timers = Timers(slow_reader_timeout_s=config.slow_reader_timeout_s)
        self._delivery = Delivery(
            config=config,
            meter=self._meter,
            keeping=self.keeping,
            outbox=self._outbox,
            end=self._end,
            queue=self._queue,
            timers=self._timers,
        )
        self._next_step = 0
        self._newest = ""
        """Id of the last request submitted."""
        self._next_turn = 1
        self._closed: str | None = None
        chunk = config.prefill_chunk or info.prefill_chunk
        throughput = Throughput()
        self._door = Door(
            config=config,
            chunk=chunk,
            queue=self._queue,
            rows=self._rows,
            tables=self._tables,
            meter=self._meter,
            throughput=throughput,
        )
        self._pace = Pace(gap_s=config.max_token_gap_s, share=config.prefill_share, chunk=chunk)
        self._prefill = PrefillPlanner(
            chunk=chunk,
            rows=self._rows,
            queue=self._queue,
            pool=self._pool,
            tables=self._tables,
            memory=self._memory,
            cache=self.keeping.cache,
            groups=self._groups,
            throughput=throughput,
        )
        self._preemption = Preemption(
            rows=self._rows,
            pool=self._pool,
            tables=self._tables,
            memory=self._memory,
            cache=self.keeping.cache,
            max_displacements=config.max_displacements,
        )

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
            prompt = validate(request, self.limits, self._known_prompt(request))
            self._door.fits(request, len(prompt))
        except InvalidRequestError:
            self._meter.refused["invalid"] += 1
            raise
        if refusal := self._door.refusal(request, len(prompt), now):
            self._meter.refused[refusal.reason] += 1
            raise refusal
        sequence = self._sequence(request, prompt, now)
        if request.session_id is not None:
            self.keeping.sessions.touch(request.session_id, now)
        self._live[request.request_id] = sequence
        self._queue.push(sequence)
        self._timers.add(sequence)
        self._meter.submitted += 1
        self._newest = request.request_id

    def _known_prompt(self, request: GenerationRequest) -> Prompt | None:
        """That of the request submitted before, if they share it: the samples of one long prompt
        come together, and making it an array 16 times takes a tenth of a second."""
        newest = self._live.get(self._newest)
        same = newest is not None and newest.request.prompt_ids is request.prompt_ids
        return newest.asked if newest is not None and same else None

    def _sequence(self, request: GenerationRequest, prompt: Prompt, now: float) -> Sequence:
        """Raises InvalidRequestError when it does not fit its group."""
        cap = self._max_depth if request.depth_cap is None else request.depth_cap
        sequence = Sequence(
            request=request,
            prompt=prompt,
            submitted_at=now,
            depth_cap=min(cap, self._max_depth),
        )
        try:
            self._groups.join(sequence)
        except InvalidRequestError:
            self._meter.refused["invalid"] += 1
            raise
        sequence.work = 1 if self._groups.follows(sequence) else len(prompt)
        return sequence

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
        if sequence.unread >= self.config.stream_buffer:
            self._timers.pause(sequence, now)
            return False
        self._timers.resume(sequence)
        return True

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
        self._reap(now)
        self.keeping.cache.clear("engine_failed")
        return self.take_events()

    def take_events(self) -> list[tuple[str, Event]]:
        """Events not taken yet, in order. `commit` includes them; ends outside of it do not."""
        events = self._outbox.copy()
        self._outbox.clear()
        return events

    def next_due(self) -> float | None:
        """The next time at which `plan` has something to end: a deadline or a slow reader."""
        return self._timers.next()

    # --- plan ------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide one step. An empty plan is not in flight; any other must be submitted.

        Raises IntegrityError when the engine takes no further step; nothing has changed then.
        """
        if len(self._tickets) >= self._max_in_flight:
            raise IntegrityError(f"{self._max_in_flight} steps are in flight already")
        self._expire(now)
        keep, release = self._reap(now)

        def reap() -> None:
            nonlocal keep, release
            more_kept, more = self._reap(now)
            keep, release = keep + more_kept, release + more

        served = self._preemption.serve([s for s in self._rows.values() if s.can_decode], reap)
        ticket = Ticket(step=self._next_step)
        self._prefill.blocked = None
        budget = self._prompt_budget(*self._cohorts(served))
        copies = self._prefill.plan(ticket, now, budget)
        waiting = self._prefill.blocked
        if waiting is not None and self._preemption.displace(waiting, ticket):
            reap()
        free, guided = self._cohorts(served)
        alone = not (ticket.chunks or (free and guided))
        plan = StepPlan(
            step=ticket.step,
            keep=tuple(row for row in keep if self.keeping.cache.holds(row.boundary)),
            release=release,
            copies=copies,
            prefill=tuple(chunk for _, chunk in ticket.chunks),
            decode=self._free.plan(free, ticket.decode, alone=alone),
            guided=self._guided.plan(guided, ticket.guided, alone=alone),
            drop=self.keeping.cache.planned(),
        )
        ticket.load = self._pace.planned(budget, ticket.shapes, mixed=ticket.decodes)
        self._meter.cohorts(plan)
        return self._planned(plan, ticket)

    def plan_ends(self, now: float) -> StepPlan:
        """A step that runs nothing: it keeps and releases ended rows and drops evicted boundaries.
        Empty when there are none."""
        ticket = Ticket(step=self._next_step)
        keep, release = self._reap(now)
        drop = self.keeping.cache.planned()
        plan = StepPlan(step=ticket.step, keep=keep, release=release, drop=drop)
        return self._planned(plan, ticket)

    def _planned(self, plan: StepPlan, ticket: Ticket) -> StepPlan:
        if not plan.is_empty:
            self._tickets.append(ticket)
            self._next_step += 1
        return plan

    def _cohorts(self, served: set[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Rows that decode now, of those that have pages for it: free ones and guided ones."""
        ready = [s for s in self._rows.values() if s in served and s.can_decode]
        guided = [s for s in ready if s.request.constraint is not None]
        return ([s for s in ready if not s.guided] if guided else ready), guided

    def _prompt_budget(self, free: list[Sequence], guided: list[Sequence]) -> Budget:
        """What prompts may take of a step with these cohorts."""
        pace = self._pace
        prompts = self._queue or any(s.prefilling for s in self._rows.values())
        if pace.gap_s is None or not prompts:
            return pace.unbounded()
        cohorts = ((self._free, free), (self._guided, guided))
        cycles = [planner.estimate(rows) for planner, rows in cohorts if rows]
        late = any(s.guided and s.streams for s in self._rows.values())
        if not cycles and not late:
            return pace.unbounded()
        return pace.budget(cycles, every=self._max_in_flight if late else 1)

    def _expire(self, now: float) -> None:
        """End what is past its time: requests, readers that are too slow, sessions."""
        self.keeping.sessions.expire(now)
        for sequence, reason, detail in self._timers.due(now):
            self._end(sequence, reason, now, detail)

    def _reap(self, now: float) -> tuple[tuple[KeepRow, ...], tuple[int, ...]]:
        """Free everything of rows that have ended or were preempted and that no step in flight
        names, after what is worth it was kept; the only place that does."""
        gone = [s for s in self._rows.values() if s.is_gone and not s.tickets]
        ids = tuple(sequence.row for sequence in gone)
        ended = sorted((s for s in gone if s.cause is not None), key=lambda s: s.turn)
        preempted = sorted((s for s in gone if s.cause is None), key=seniority, reverse=True)
        keep = []
        for sequence in ended + preempted:
            table = self._tables.table(sequence.slot)
            if sequence.cause is not None:
                entry = self.keeping.end(sequence, table, now)
            else:
                entry = self.keeping.leave(sequence, table)
            if entry is not None:
                keep.append(KeepRow(row=sequence.row, boundary=entry.boundary, pages=entry.pages))
            del self._rows[sequence.row]
            self._memory.free(sequence)
            self._queue.row_freed(sequence)
        for sequence in preempted:
            self._requeue(sequence, now)
        return tuple(keep), ids

    def _requeue(self, sequence: Sequence, now: float) -> None:
        """A preempted row is freed: it waits to be computed again."""
        assert sequence.leaving is not None
        self._meter.preempted[sequence.leaving] += 1
        sequence.suspend(now)
        if sequence.hashes is not None:
            sequence.hashes = self.keeping.cache.hashes(sequence.prompt, sequence.hashes)
        self._groups.requeue(sequence)
        self._queue.requeue(sequence)

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
            tokens += self._delivery.chunk(sequence, chunk, rows.pop(sequence.row, None), now)
        self._prefill.saved(ticket)
        alone = not (ticket.chunks or (ticket.decode.rows and ticket.guided.rows))
        time = result.device_s if alone else None
        for planner, cohort in ((self._free, ticket.decode), (self._guided, ticket.guided)):
            decoded = [rows.pop(sequence.row, None) for sequence, _ in cohort.rows]
            tokens += self._delivery.cohort(cohort, decoded, now)
            planner.observe(cohort, decoded, device_s=time)
        if rows:
            raise EngineFailedError(f"step {result.step} has results for rows it did not run")
        self._pace.observe(ticket.load, result.device_s, decoded=ticket.decodes)
        self._meter.step(result, prompt_tokens=ticket.prompt_tokens, tokens=tokens, now=now)
        return self.take_events()

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, detail: str) -> None:
        """Record the first cause and tell the client; the only place that does."""
        if not sequence.started:
            self._queue.remove(sequence)
        self._groups.end(sequence)
        sequence.cause = reason
        sequence.turn, self._next_turn = self._next_turn, self._next_turn + 1
        sequence.leaving = None
        self._timers.forget(sequence)
        self.keeping.end_waiting(sequence, now)
        del self._live[sequence.request_id]
        self._meter.end(reason, sequence.emitted)
        finished = Finished(reason=reason, usage=sequence.usage(now), detail=detail)
        self._outbox.append((sequence.request_id, finished))

    # --- sessions --------------------------------------------------------------------------------

    def release_session(self, session_id: str) -> bool:
        """Unpin what a session keeps; False when it keeps nothing. A turn that still runs pins its
        end anew."""
        return self.keeping.sessions.release(session_id)

    def sessions(self, now: float) -> list[SessionInfo]:
        """Sessions that keep something, least recently used first."""
        self.keeping.sessions.expire(now)
        return self.keeping.sessions.list()

    def begin_import(self, saved: SavedPrefix, salt: str = "") -> Entry:
        """Room for a file's prefix; then `plan_ends`, the engine's import unless it is ready, and
        `finish_import` or `keeping.cancel_import`, all with no other plan in between.

        Raises NoRoomError, with the numbers.
        """
        return self.keeping.begin_import(saved, rows=bool(self._rows), salt=salt)

    def finish_import(self, entry: Entry, session_id: str, now: float) -> SessionInfo:
        """The engine has it: pin it."""
        turn, self._next_turn = self._next_turn, self._next_turn + 1
        self.keeping.finish_import(entry, session_id, turn=turn, now=now)
        return self.keeping.sessions.list()[-1]

    # --- looking in ------------------------------------------------------------------------------

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
            memory=self._memory,
            keeping=self.keeping,
            idle=idle,
        )
        self._groups.integrity(self._live)
        self._timers.integrity(self._live.values())

    def statistics(self, now: float) -> Statistics:
        """A snapshot; costs one pass over the running rows."""
        running = [s for s in self._rows.values() if s.cause is None]
        oldest = self._queue.oldest(now)
        self.keeping.sessions.expire(now)
        return Statistics(
            at=now,
            queued_requests=len(self._queue),
            queued_tokens=self._queue.tokens,
            running=len(running),
            prefilling=sum(not s.produced for s in running),
            prefilling_tokens=sum(len(s.prompt) - s.cursor for s in running if not s.produced),
            paused=sum(s.paused_at is not None for s in running),
            guided_rows=sum(s.guided for s in running),
            rows_held=len(self._rows),
            max_rows=self._max_rows,
            in_flight=len(self._tickets),
            pages_total=self._pool.total,
            pages_used=self._pool.used,
            pages_cached=self._pool.cached,
            pages_peak=self._pool.peak,
            tokens_per_second=self._meter.generated.per_second(now),
            prompt_tokens_per_second=self._meter.prefilled.per_second(now),
            depth=self._meter.depth,
            step_s=self._meter.step_s,
            step_times=self._free.step_times(),
            queued_by_class=self._queue.by_class(),
            oldest_wait_by_class=oldest,
            oldest_wait_s=max(oldest.values()),
            served=dict(self._queue.tenants.served),
            preempted_waiting=self._queue.returned,
            recomputed_tokens=self._prefill.recomputed,
            **self._meter.snapshot(),
            **self._pace.snapshot(),
            **self.keeping.snapshot(),
        )
