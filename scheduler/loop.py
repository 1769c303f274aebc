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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from engine.plan import Engine, EngineInfo, ForeignFileError, StepPlan, StepResult
from scheduler.admission import Limits
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.engine_thread import EngineThread
from scheduler.errands import Errands
from scheduler.handle import RequestHandle
from scheduler.keeping import SESSION_KEY, Flushed
from scheduler.kv_events import KvEvent, Stored
from scheduler.request import Event, Finished, FinishReason, GenerationRequest, NotRunningError
from scheduler.sessions import SessionInfo
from scheduler.statistics import Statistics
from scheduler.step_record import StepRecord

__all__ = ["RequestHandle", "Scheduler", "StepRecord"]


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
        self._errands = Errands(lambda: self._wake.set())

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.failed = anyio.Event()
        """Set when the engine died or the books did not balance: report NOT_SERVING and exit."""
        self._wake = anyio.Event()
        self._quiet = anyio.Event()
        self._stopped = anyio.Event()
        self._closed = anyio.Event()
        self._scope = anyio.CancelScope(shield=True)
        self._engine = EngineThread(factory=self._factory, on_failure=self._note)
        try:
            self._info, in_flight = await self._engine.load()
        except BaseException:
            self._engine.abandon()
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
            await self._engine.close()
        if limit.cancelled_caught:
            self._scope.cancel()
            self._engine.abandon()
        self._closed.set()

    def _shut_down(self) -> None:
        for request_id in list(self._handles):
            self.cancel(request_id, FinishReason.SHUTDOWN)
        self._wake.set()

    def _note(self, error: Exception) -> None:
        """The engine did not close well. The first failure counts."""
        self.failure = self.failure or error

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
        return self.submit_together((request,))[0]

    def submit_together(self, requests: Sequence[GenerationRequest]) -> tuple[RequestHandle, ...]:
        """The same for requests of one group and tenant: all of them, or none."""
        self._core.submit_together(requests, self._clock())
        handles = tuple(
            RequestHandle(
                request_id=request.request_id, cancel=self.cancel, acknowledge=self._acknowledge
            )
            for request in requests
        )
        self._handles |= {handle.request_id: handle for handle in handles}
        self._wake.set()
        return handles

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
            await self._engine.export_boundary(what, path)
            return self._core.sessions(self._clock())[-1]

        self._check_running()
        return await self._errands.do(work)

    async def import_session(
        self, path: Path, session_id: str | None = None, *, cache_salt: str = ""
    ) -> SessionInfo:
        """Read a file that `export_session` wrote, and pin its prefix for `session_id`, or for the
        session in the file; `cache_salt` is that of the session's requests. Steps in flight finish
        first; others wait.

        Raises ForeignFileError, NoRoomError, OSError, NotRunningError.
        """

        async def work() -> SessionInfo:
            saved = await self._engine.read_boundary(path)
            name = session_id or saved.metadata.get(SESSION_KEY)
            if not name:
                raise ForeignFileError(f"{path.name} names no session")
            entry = self._core.begin_import(saved, cache_salt)
            try:
                await self._settle()
                if not entry.ready:
                    await self._engine.import_boundary(entry, path)
            except BaseException:
                self._core.keeping.cancel_import(entry)
                raise
            return self._core.finish_import(entry, name, self._clock())

        self._check_running()
        return await self._errands.do(work)

    async def flush_prefixes(self) -> Flushed:
        """Forget what is kept for later requests, sessions included, except what queued ones wait
        for. Steps in flight finish first; others wait. Raises NotRunningError."""

        async def work() -> Flushed:
            flushed = self._core.keeping.flush()
            await self._settle()  # the engine drops its boundaries
            return flushed

        self._check_running()
        return await self._errands.do(work)

    def _check_running(self) -> None:
        if self._closing or self.failed.is_set():
            raise NotRunningError("the scheduler has stopped")

    # --- streams ---------------------------------------------------------------------------------

    def _acknowledge(self, request_id: str, tokens: int) -> None:
        if self._core.acknowledge(request_id, tokens, self._clock()):
            self._wake.set()

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        """Put events into their streams; tell `drain` when nobody is left."""
        for request_id, event in events:
            handle = self._handles[request_id]
            if isinstance(event, Finished):
                del self._handles[request_id]
            handle.push(event)
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
            self._errands.refuse(NotRunningError("the scheduler has stopped"))

    async def _plain(self) -> None:
        while not self._finished:
            await self._errands.run(self._settle)
            plan = self._plan()
            if plan.is_empty:
                await self._sleep()
                continue
            await self._engine.submit(plan)
            self._commit(await self._engine.collect())

    async def _pipelined(self) -> None:
        while not self._finished:
            await self._errands.run(self._settle)
            plan = self._plan()
            if plan.is_empty and not self._core.in_flight:
                await self._sleep()
                continue
            full = self._core.in_flight >= self._max_in_flight
            result = await self._engine.exchange(plan, collect=full or plan.is_empty)
            if result is not None:
                self._commit(result)

    async def _settle(self) -> None:
        """Let the steps in flight finish, and the engine know who has ended."""
        while self._core.in_flight:
            self._commit(await self._engine.collect())
        plan = self._core.plan_ends(self._clock())
        if not plan.is_empty:
            self._plans.append((plan, 0.0))
            await self._engine.submit(plan)
            self._commit(await self._engine.collect())

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
