"""The scheduler as a deterministic machine: explicit state, explicit time, no I/O.

    submit / cancel / acknowledge     the world changes something
    plan(now)   -> StepPlan           decide one engine step; counts as submitted from here on
    commit(result, now) -> events     learn what the oldest step in flight brought

`plan` may be called again before the previous result is known (pipelining): page tables and
`max_tokens` are then reckoned with what the steps in flight may add. Results come back in order.

Life of a request: queued → running (a row; prefilling, then decoding) → ended → reaped. It *ends*
at once for its client, with the first cause, and emits nothing after it. Its row, slot and pages
are *reaped* in one place, at the first plan after the last step in flight that names the row has
come back; that same plan tells the engine to release it, and to keep its end as a prefix for later
requests when there is one to keep. A row that is *preempted* is planned no more, gets what steps in
flight bring, is reaped in the same way, and is queued again with its output as the end of its
prompt.

Each step carries prefill chunks and the decode cohorts side by side, so none starves another. Rows
with a constraint are a cohort of their own, planned only when no step in flight names them.

The parts, over state that is here: `scheduler.registry` (live requests), `scheduler.door` and
`scheduler.queue` (who is refused, who waits), `scheduler.prefill` (who starts, and from what),
`scheduler.pace` (how much of the prompts a step carries), `scheduler.cohorts` and `scheduler.depth`
(who decodes how deep), `scheduler.preemption` (who leaves), `scheduler.results` and
`scheduler.delivery` (what becomes of results), `scheduler.reaper` (what becomes of rows),
`scheduler.prefix` and `scheduler.sessions` (what is kept), `scheduler.books` (whether all of it
adds up). `scheduler.config` lists what is bounded, and what happens beyond.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Values

from engine.plan import EngineFailedError, EngineInfo, SavedPrefix, StepPlan, StepResult
from scheduler.admission import Limits
from scheduler.books import Books
from scheduler.cohorts import CohortPlanner, Cohorts
from scheduler.config import SchedulerConfig
from scheduler.delivery import Delivery
from scheduler.depth import depth_policy
from scheduler.door import Door
from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pace import Budget, Pace
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.preemption import Preemption
from scheduler.prefill import PrefillPlanner
from scheduler.prefix import Entry
from scheduler.queue import WaitingQueue
from scheduler.reaper import Reaper
from scheduler.registry import Registry
from scheduler.request import Event, FinishReason, GenerationRequest
from scheduler.results import Results
from scheduler.sequence import Sequence
from scheduler.sessions import SessionInfo
from scheduler.statistics import Meter, Statistics
from scheduler.throughput import Throughput
from scheduler.ticket import Ticket
from scheduler.timers import Timers


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
        self._groups = Groups()
        self._live: dict[str, Sequence] = {}
        self._rows: dict[int, Sequence] = {}
        self._tickets: deque[Ticket] = deque()
        self._outbox: list[tuple[str, Event]] = []
        self._meter = Meter(window_s=config.rate_window_s)
        self._timers = Timers(slow_reader_timeout_s=config.slow_reader_timeout_s)
        self._books = Books(
            live=self._live,
            rows=self._rows,
            tickets=self._tickets,
            queue=self._queue,
            pool=self._pool,
            tables=self._tables,
            memory=self._memory,
            keeping=self.keeping,
            groups=self._groups,
            timers=self._timers,
        )
        self._next_step = 0
        self._appoint(info)

    def _appoint(self, info: EngineInfo) -> None:
        """The parts that decide, over the state that is here."""
        config = self.config
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
        self._registry = Registry(
            config=config,
            limits=self.limits,
            max_depth=self._max_depth,
            live=self._live,
            outbox=self._outbox,
            door=self._door,
            queue=self._queue,
            groups=self._groups,
            timers=self._timers,
            keeping=self.keeping,
            meter=self._meter,
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
        free, guided = (
            CohortPlanner(
                policy=depth_policy(config.depth, info.max_depth, table),
                tables=self._tables,
                memory=self._memory,
            )
            # A guided cycle waits for the host at every draft: it has costs of its own.
            for table in (config.costs_of(info), None)
        )
        self._cohorts = Cohorts(rows=self._rows, free=free, guided=guided)
        self._results = Results(
            delivery=Delivery(
                config=config,
                meter=self._meter,
                keeping=self.keeping,
                outbox=self._outbox,
                end=self._registry.end,
                queue=self._queue,
                timers=self._timers,
            ),
            prefill=self._prefill,
            cohorts=self._cohorts,
            pace=self._pace,
            meter=self._meter,
        )
        self._reaper = Reaper(
            rows=self._rows,
            tables=self._tables,
            memory=self._memory,
            keeping=self.keeping,
            queue=self._queue,
            groups=self._groups,
            meter=self._meter,
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
        self._registry.submit((request,), now)

    def submit_together(self, requests: Values[GenerationRequest], now: float) -> None:
        """The same for requests of one group and tenant: all of them, or none. A refusal counts
        once, and those that would have been let in alone have never been."""
        self._registry.submit(requests, now)

    def cancel(self, request_id: str, reason: FinishReason, now: float, detail: str = "") -> bool:
        """End a request for `reason`; False when no live request has this id.

        Its `Finished` is in the outbox at once, and tokens of steps in flight are dropped. A queued
        request is gone; a running one is in no further plan, and its row is reaped when its last
        step has come back. A client that leaves just as its deadline passes left because of it: its
        stream is cut at the deadline, often a moment before `plan` would have seen it.
        """
        return self._registry.cancel(request_id, reason, now, detail)

    def acknowledge(self, request_id: str, tokens: int, now: float) -> bool:
        """The reader took `tokens`. True when that resumes a paused row."""
        return self._registry.acknowledge(request_id, tokens, now)

    @property
    def closed(self) -> bool:
        return self._registry.closed is not None

    def close(self, message: str) -> None:
        """Refuse new requests from now on, with NotRunningError(message). The first one stays."""
        self._registry.closed = self._registry.closed or message

    def abandon(self, detail: str, now: float) -> list[tuple[str, Event]]:
        """The engine is gone: end every request with ENGINE_FAILED and forget all rows; returns
        `take_events()`."""
        self.close(detail)
        self._registry.end_all(FinishReason.ENGINE_FAILED, now, detail)
        self._tickets.clear()
        for sequence in self._rows.values():
            sequence.tickets = sequence.ceiling = sequence.floor = 0
        self._reaper.reap(now)
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
        keep, release = self._reaper.reap(now)

        def reap() -> None:
            nonlocal keep, release
            more_kept, more = self._reaper.reap(now)
            keep, release = keep + more_kept, release + more

        served = self._preemption.serve([s for s in self._rows.values() if s.can_decode], reap)
        ticket = Ticket(step=self._next_step)
        self._prefill.blocked = None
        budget = self._prompt_budget(*self._cohorts.ready(served))
        copies = self._prefill.plan(ticket, now, budget)
        waiting = self._prefill.blocked
        if waiting is not None and self._preemption.displace(waiting, ticket):
            reap()
        decode, guided = self._cohorts.plan(ticket, *self._cohorts.ready(served))
        plan = StepPlan(
            step=ticket.step,
            keep=tuple(row for row in keep if self.keeping.cache.holds(row.boundary)),
            release=release,
            copies=copies,
            prefill=tuple(chunk for _, chunk in ticket.chunks),
            decode=decode,
            guided=guided,
            drop=self.keeping.cache.planned(),
        )
        ticket.load = self._pace.planned(budget, ticket.shapes, mixed=ticket.decodes)
        self._meter.cohorts(plan)
        return self._planned(plan, ticket)

    def plan_ends(self, now: float) -> StepPlan:
        """A step that runs nothing: it keeps and releases ended rows and drops evicted boundaries.
        Empty when there are none."""
        ticket = Ticket(step=self._next_step)
        keep, release = self._reaper.reap(now)
        drop = self.keeping.cache.planned()
        plan = StepPlan(step=ticket.step, keep=keep, release=release, drop=drop)
        return self._planned(plan, ticket)

    def _planned(self, plan: StepPlan, ticket: Ticket) -> StepPlan:
        if not plan.is_empty:
            self._tickets.append(ticket)
            self._next_step += 1
        return plan

    def _prompt_budget(self, free: list[Sequence], guided: list[Sequence]) -> Budget:
        """What prompts may take of a step with these cohorts."""
        pace = self._pace
        prompts = self._queue or any(s.prefilling for s in self._rows.values())
        if pace.gap_s is None or not prompts:
            return pace.unbounded()
        cycles = self._cohorts.estimates(free, guided)
        late = any(s.guided and s.streams for s in self._rows.values())
        if not cycles and not late:
            return pace.unbounded()
        return pace.budget(cycles, every=self._max_in_flight if late else 1)

    def _expire(self, now: float) -> None:
        """End what is past its time: requests, readers that are too slow, sessions."""
        self.keeping.sessions.expire(now)
        self._registry.expire(now)

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> list[tuple[str, Event]]:
        """Take the result of the oldest step in flight; returns `take_events()`.

        Raises EngineFailedError when it is not the result of that step.
        """
        ticket = self._tickets.popleft() if self._tickets else None
        if ticket is None or ticket.step != result.step:
            raise EngineFailedError(f"the result of step {result.step} is out of order")
        self._results.apply(ticket, result, now)
        return self.take_events()

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
        turn = self._registry.next_turn()
        self.keeping.finish_import(entry, session_id, turn=turn, now=now)
        return self.keeping.sessions.list()[-1]

    # --- looking in ------------------------------------------------------------------------------

    def integrity(self, *, idle: bool = False) -> None:
        """Account for every page, slot, row and registry entry. `idle`: after an empty plan with
        nothing in flight, when no ended row may be left either. Raises IntegrityError."""
        self._books.check(idle=idle)

    def statistics(self, now: float) -> Statistics:
        """A snapshot; costs one pass over the running rows."""
        self.keeping.sessions.expire(now)
        return Statistics(
            max_rows=self._max_rows,
            step_times=self._cohorts.free.step_times(),
            recomputed_tokens=self._prefill.recomputed,
            **self._books.snapshot(now),
            **self._meter.snapshot(now),
            **self._pace.snapshot(),
            **self.keeping.snapshot(),
        )
