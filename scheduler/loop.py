"""The scheduler as a running thing: streams, the engine's thread, the clock.

    async with Scheduler(engine_factory=load, config=SchedulerConfig()) as scheduler:
        async with scheduler.submit(request) as handle:
            async for event in handle:
                ...

Decisions are `SchedulerCore`'s. Here are two loops over it. `_plain` is the specification: plan,
run, commit. `_pipelined` hands step n + 1 to the device before it reads step n, one hop to the
engine's thread per step. Both give the same tokens. A step whose rows the host must hear from first
(guided ones) is followed by a plan without them; when that plan is empty, its result is awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from engine.plan import (
    Engine,
    EngineInfo,
    ForeignFileError,
    SavedPrefix,
    StepPlan,
    StepResult,
)
from scheduler.admission import Limits
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.keeping import SESSION_KEY, Export, Flushed
from scheduler.kv_events import KvEvent, Stored
from scheduler.prefix import Entry
from scheduler.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    NotRunningError,
    Tokens,
)
from scheduler.sessions import NoRoomError, SessionInfo, UnknownSessionError
from scheduler.statistics import Statistics
from scheduler.thread import Errand, OwnerThread

T = TypeVar("T")

CALLERS_ERRORS = (UnknownSessionError, NoRoomError, ForeignFileError, OSError)
"""What an export or import may raise without harm to anybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step as it was committed, for metrics. Times in seconds."""

    step: int
    prompt_tokens: int
    rows: int
    """Rows of the decode cohort; 0 when the step only prefilled or released."""
    depth: int
    guided_rows: int
    """Rows of the guided cohort."""
    guided_depth: int
    tokens: int
    """Tokens the device emitted."""
    drafted: int
    accepted: int
    build_s: float
    wait_s: float
    device_s: float
    gap_s: float | None
    """As in `StepResult`: how long the device sat idle before this step."""
    host_s: float
    """Event-loop time between the previous result's arrival and the next plan's departure: what
    the device would have waited for without pipelining. 0 after an idle pause."""

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult, host_s: float) -> StepRecord:
        return cls(
            step=plan.step,
            prompt_tokens=sum(len(chunk.tokens) for chunk in plan.prefill),
            rows=len(plan.decode.rows) if plan.decode else 0,
            depth=plan.decode.depth if plan.decode else 0,
            guided_rows=len(plan.guided.rows) if plan.guided else 0,
            guided_depth=plan.guided.depth if plan.guided else 0,
            tokens=sum(len(row.tokens) for row in result.rows),
            drafted=sum(row.drafted for row in result.rows),
            accepted=sum(row.accepted for row in result.rows),
            build_s=result.build_s,
            wait_s=result.wait_s,
            device_s=result.device_s,
            gap_s=result.gap_s,
            host_s=host_s,
        )


class RequestHandle:
    """The stream of one request, for one reader: any number of `Tokens`, then one `Finished`.

    Use it as `async with`: leaving the block cancels a request that has not finished, whatever
    the reason (the client left, an exception, cancellation of the task). Cancelling a task that
    waits for the next event does the same, so do not put a timeout around `__anext__` unless the
    request is to end with it.

    What is not read counts against `SchedulerConfig.stream_buffer`: at the limit the row pauses.
    """

    def __init__(self, *, scheduler: Scheduler, request_id: str) -> None:
        self.request_id = request_id
        self.finished: Finished | None = None
        """The last event, as soon as it is known, read or not."""
        self._scheduler = scheduler
        self._events: deque[Event] = deque()
        self._ready = anyio.Event()
        self._exhausted = False

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End the request; False when it had ended. Tokens already buffered stay readable, then
        `Finished` follows."""
        return self.finished is None and self._scheduler.cancel(self.request_id, reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._exhausted:
            raise StopAsyncIteration
        while not self._events:
            self._ready = anyio.Event()
            try:
                await self._ready.wait()
            except anyio.get_cancelled_exc_class():
                self.cancel()
                raise
        event = self._events.popleft()
        if isinstance(event, Tokens):
            if self.finished is None:
                self._scheduler._acknowledge(self.request_id, len(event.ids))
        else:
            self._exhausted = True
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _push(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.finished = event
        self._events.append(event)
        self._ready.set()


class Scheduler:
    """Owns the engine and its thread. An async context manager; enter and leave in one task.

    `engine_factory` is called on the owner thread; what it raises comes out of `__aenter__`.
    `clock` gives seconds and must not go back. `on_step` is called on the event loop after every
    step and must neither block nor raise.
    """

    def __init__(
        self,
        *,
        engine_factory: Callable[[], Engine],
        config: SchedulerConfig | None = None,
        clock: Callable[[], float] = anyio.current_time,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        self.failure: Exception | None = None
        """Why the scheduler is beyond use, once `failed` is set."""
        self._factory = engine_factory
        self._clock = clock
        self._on_step = on_step
        self._handles: dict[str, RequestHandle] = {}
        self._plans: deque[tuple[StepPlan, float]] = deque()
        """Steps in flight with their host time, for the records."""
        self._closing = False
        self._result_at: float | None = None
        self._errands: deque[Errand[Any]] = deque()

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.failed = anyio.Event()
        """Set when the engine died or the books did not balance: report NOT_SERVING and exit."""
        self._wake = anyio.Event()
        self._quiet = anyio.Event()
        self._stopped = anyio.Event()
        self._closed = anyio.Event()
        self._scope = anyio.CancelScope(shield=True)
        self._engine: Engine | None = None
        self._thread = OwnerThread("engine")
        try:
            self._info, in_flight = await self._thread.call(self._load)
        except BaseException:
            self._abandon_thread()
            raise
        if self.config.loop == "plain":
            in_flight = 1
        self._max_in_flight = in_flight
        self._core = SchedulerCore(info=self._info, config=self.config, max_in_flight=in_flight)
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, name="scheduler loop")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
        await self._tasks.__aexit__(None, None, None)  # the loop has ended; no group is raised

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let running and queued ones finish for at most `timeout` seconds,
        then end the rest with SHUTDOWN. Returns when no request is live. Idempotent."""
        self._core.close("the server is draining")
        self._deliver(self._core.take_events())
        with anyio.move_on_after(timeout):
            await self._quiet.wait()
        self._shut_down()

    async def aclose(self) -> None:
        """End every request with SHUTDOWN, wait for the steps in flight, close the engine.
        Idempotent; gives up on a wedged engine after `close_timeout_s`."""
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._core.close("the server has stopped")
        self._shut_down()
        with anyio.move_on_after(self.config.close_timeout_s, shield=True) as limit:
            await self._stopped.wait()
            await self._thread.call(self._unload)
            self._thread.stop()
            await self._thread.join()
        if limit.cancelled_caught:
            self._scope.cancel()
            self._abandon_thread()
        self._closed.set()

    def _shut_down(self) -> None:
        for request_id in list(self._handles):
            self.cancel(request_id, FinishReason.SHUTDOWN)
        self._wake.set()

    def _abandon_thread(self) -> None:
        """Nobody waits for the thread any more; it unloads when it gets there."""
        self._thread.post(self._unload)
        self._thread.stop()

    # --- requests --------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def limits(self) -> Limits:
        """Bounds on one request, e.g. `limits.room(prompt_tokens)` for a default max_tokens."""
        return self._core.limits

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request. Does not wait.

        Raises InvalidRequestError, QueueFullError or NotRunningError; nothing remains then.
        """
        self._core.submit(request, self._clock())
        handle = RequestHandle(scheduler=self, request_id=request.request_id)
        self._handles[request.request_id] = handle
        self._wake.set()
        return handle

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a live request for `reason`; False when there is none with this id."""
        found = self._core.cancel(request_id, reason, self._clock())
        if found:
            self._deliver(self._core.take_events())
            self._wake.set()
        return found

    def abort(self, request_id: str) -> bool:
        """`cancel` with ABORTED."""
        return self.cancel(request_id, FinishReason.ABORTED)

    def statistics(self) -> Statistics:
        return self._core.statistics(self._clock())

    # --- kept blocks -----------------------------------------------------------------------------

    @property
    def newest_kv_event(self) -> int:
        """Number of the newest event of `kv_events`; 0 before the first."""
        return self._core.keeping.cache.events.newest

    def kv_events(self, number: int) -> list[KvEvent] | None:
        """Blocks that came and went after event `number`; None when the log no longer reaches back
        to it: take `kv_blocks`, as of `newest_kv_event`."""
        return self._core.keeping.cache.events.since(number)

    def kv_blocks(self) -> list[Stored]:
        """All blocks that are kept, parents before children."""
        return self._core.keeping.cache.live_blocks()

    # --- sessions --------------------------------------------------------------------------------

    def sessions(self) -> list[SessionInfo]:
        """Sessions that keep something, least recently used first."""
        return self._core.sessions(self._clock())

    def release_session(self, session_id: str) -> bool:
        """Unpin what a session keeps; False when it keeps nothing. A turn that still runs pins its
        end anew."""
        return self._core.release_session(session_id)

    async def export_session(self, session_id: str, path: Path) -> SessionInfo:
        """Write what a session keeps to a file. Steps in flight finish first; others wait.

        Raises UnknownSessionError, OSError, NotRunningError.
        """

        async def work() -> SessionInfo:
            what = self._core.keeping.export(session_id, self._clock())
            await self._thread.call(self._export, what, path)
            return self._core.sessions(self._clock())[-1]

        return await self._errand(work)

    async def import_session(
        self, path: Path, session_id: str | None = None, *, cache_salt: str = ""
    ) -> SessionInfo:
        """Read a file that `export_session` wrote, and pin its prefix for `session_id`, or for the
        session in the file; `cache_salt` is that of the session's requests. Steps in flight finish
        first; others wait.

        Raises ForeignFileError, NoRoomError, OSError, NotRunningError.
        """

        async def work() -> SessionInfo:
            saved = await self._thread.call(self._read, path)
            name = session_id or saved.metadata.get(SESSION_KEY)
            if not name:
                raise ForeignFileError(f"{path.name} names no session")
            entry = self._core.begin_import(saved, cache_salt)
            try:
                await self._settle()
                if not entry.ready:
                    await self._thread.call(self._import, entry, path)
            except BaseException:
                self._core.keeping.cancel_import(entry)
                raise
            return self._core.finish_import(entry, name, self._clock())

        return await self._errand(work)

    async def flush_prefixes(self) -> Flushed:
        """Forget what is kept for later requests, sessions included, except what queued ones wait
        for. Steps in flight finish first; others wait. Raises NotRunningError."""

        async def work() -> Flushed:
            flushed = self._core.keeping.flush()
            await self._settle()  # the engine drops its boundaries
            return flushed

        return await self._errand(work)

    async def _errand(self, work: Callable[[], Awaitable[T]]) -> T:
        """Have the loop do `work` with nothing in flight."""
        if self._closing or self.failed.is_set():
            raise NotRunningError("the scheduler has stopped")
        errand = Errand(work)
        self._errands.append(errand)
        self._wake.set()
        return await errand.wait()

    def _acknowledge(self, request_id: str, tokens: int) -> None:
        if self._core.acknowledge(request_id, tokens, self._clock()):
            self._wake.set()

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        """Put events into their streams; tell `drain` when nobody is left."""
        for request_id, event in events:
            handle = self._handles[request_id]
            if isinstance(event, Finished):
                del self._handles[request_id]
            handle._push(event)
        if self._core.closed and not self._core.live:
            self._quiet.set()

    # --- the loops -------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with self._scope:
                await (self._plain() if self.config.loop == "plain" else self._pipelined())
        except Exception as error:
            self._fail(error)
        finally:
            self._stopped.set()
            while self._errands:
                self._errands.popleft().refuse(NotRunningError("the scheduler has stopped"))

    async def _plain(self) -> None:
        while not self._finished:
            await self._run_errands()
            plan = self._plan()
            if plan.is_empty:
                await self._sleep()
                continue
            await self._thread.call(self._submit, plan)
            self._commit(await self._thread.call(self._collect))

    async def _pipelined(self) -> None:
        while not self._finished:
            await self._run_errands()
            plan = self._plan()
            if plan.is_empty and not self._core.in_flight:
                await self._sleep()
                continue
            full = self._core.in_flight >= self._max_in_flight
            result = await self._thread.call(self._exchange, plan, full or plan.is_empty)
            if result is not None:
                self._commit(result)

    async def _run_errands(self) -> None:
        """Do what was asked for, one by one, with nothing in flight."""
        while self._errands:
            await self._settle()
            error = await self._errands.popleft().run()
            if error is not None and not isinstance(error, CALLERS_ERRORS):
                raise error

    async def _settle(self) -> None:
        """Let the steps in flight finish, and the engine know who has ended."""
        while self._core.in_flight:
            self._commit(await self._thread.call(self._collect))
        plan = self._core.plan_ends(self._clock())
        if not plan.is_empty:
            self._plans.append((plan, 0.0))
            await self._thread.call(self._submit, plan)
            self._commit(await self._thread.call(self._collect))

    @property
    def _finished(self) -> bool:
        return self._closing and self._core.is_empty

    def _plan(self) -> StepPlan:
        self._wake = anyio.Event()  # whatever happens from here on is news to this plan
        if self._errands:
            self._wake.set()
        plan = self._core.plan(self._clock())
        self._deliver(self._core.take_events())
        if not plan.is_empty:
            began = self._result_at
            host_s = 0.0 if began is None else self._clock() - began
            self._plans.append((plan, host_s))
        return plan

    def _commit(self, result: StepResult) -> None:
        now = self._result_at = self._clock()
        self._deliver(self._core.commit(result, now))
        plan, host_s = self._plans.popleft()
        if self._on_step is not None:
            self._on_step(StepRecord.of(plan, result, host_s))

    async def _sleep(self) -> None:
        """Nothing to do: check the books, then wait for news or for the next deadline."""
        self._core.integrity(idle=True)
        self._result_at = None
        due = self._core.next_due()
        timeout = None if due is None else max(0.0, due - self._clock())
        with anyio.move_on_after(timeout):
            await self._wake.wait()

    def _fail(self, error: Exception) -> None:
        """The engine or the books are beyond use: every stream ends, nothing new is taken."""
        self.failure = error
        now = self._clock()
        self._deliver(self._core.abandon(f"{type(error).__name__}: {error}", now))
        self.failed.set()

    # --- on the owner thread ---------------------------------------------------------------------

    def _load(self) -> tuple[EngineInfo, int]:
        self._engine = self._factory()
        return self._engine.info, self._engine.max_in_flight

    def _submit(self, plan: StepPlan) -> None:
        assert self._engine is not None
        self._engine.submit(plan)

    def _collect(self) -> StepResult:
        assert self._engine is not None
        return self._engine.collect()

    def _exchange(self, plan: StepPlan, collect: bool) -> StepResult | None:
        """Submit `plan` unless it is empty; then the oldest result, if `collect`."""
        if not plan.is_empty:
            self._submit(plan)
        return self._collect() if collect else None

    def _export(self, what: Export, path: Path) -> None:
        assert self._engine is not None
        self._engine.export_boundary(what.boundary, what.saved, what.pages, path)

    def _read(self, path: Path) -> SavedPrefix:
        assert self._engine is not None
        return self._engine.read_boundary(path)

    def _import(self, entry: Entry, path: Path) -> None:
        assert self._engine is not None
        self._engine.import_boundary(entry.boundary, entry.pages, path)

    def _unload(self) -> None:
        """Close the engine, if it was built; what that raises becomes `failure` if it is first."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            self.failure = self.failure or error
