"""The engine: obeys step plans over one loaded model, on the thread that built it.

Two steps may be in flight. The device runs one; the graph of the next is built meanwhile (the
host's larger share) and starts the moment the first is done. Handing it over earlier would cost
more than it gains: MLX reuses a page pool's buffer only when no running operation holds it, so a
step submitted behind a running one would copy every pool.

Since handing over takes long itself, an `Executor` does it (`run_on`): the thread that calls the
engine then only builds and reads. Without one, the calling thread does everything, and hands a step
over when it collects the one before.

A guided cohort needs the host between its drafts, so its step is never built ahead: `submit` waits
for the step before, hands the free cohort of the same step to the device, asks the constraints
what may come first while that runs, and goes on once it is done (for the same reason).

What fails in building costs one row (`engine.building`). What fails in evaluation leaves the pools
in an unknown state and ends the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import mlx.core as mx
import numpy as np

from engine.books import Books
from engine.boundary import BoundaryStore
from engine.boundary_calls import BoundaryCalls
from engine.budget import Budget
from engine.building import StepBuilder
from engine.cache import PagePool
from engine.checks import PlanCheck
from engine.cycle import DecodeCycle
from engine.executor import Executor
from engine.models.qwen3_5 import Qwen35Model
from engine.padding import Buckets, Shape, padded_rows, places_agree
from engine.plan import (
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    MemoryUse,
    RowResult,
    StepPlan,
    StepResult,
    pages_needed,
)
from engine.prefill import Prefill
from engine.preflight import Preflight, Room
from engine.results import Output
from engine.rows import FIRST_PAD, RowArrays
from engine.step import Step, in_plan_order

T = TypeVar("T")

_CLOSED = "the engine was closed"


@dataclass(frozen=True, slots=True)
class Trace:
    """Logits behind the tokens of one row in one step; only kept by a tracing engine (tests)."""

    row: int
    tokens: tuple[int, ...]
    logits: np.ndarray
    """float32 [len(tokens), V]."""


class MLXEngine(BoundaryCalls):
    """`engine.plan.Engine` over an MLX model. Build it with `engine.load.load_engine`."""

    max_in_flight = 2

    def __init__(
        self,
        *,
        model: Qwen35Model,
        pools: list[PagePool],
        mtp_pool: PagePool | None,
        info: EngineInfo,
        keep_states: bool = True,
        chunked_prefill: bool = False,
        trace: bool = False,
        deterministic: bool = False,
        buckets: bool = False,
        preflight: Preflight | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`deterministic`: see `EngineConfig`; `buckets`: `engine.padding`. `preflight` None never
        asks for room."""
        self.budget = budget
        """What the engine was planned to hold."""
        self._model = model
        self._info = info
        self._pools = [*pools, mtp_pool] if mtp_pool is not None else list(pools)
        self._cycle = DecodeCycle(
            model=model,
            pools=pools,
            mtp_pool=mtp_pool,
            page_size=info.page_size,
            keep_states=keep_states,
        )
        self._books = Books(info.vocab_size)
        shape = self._shape(deterministic=deterministic, buckets=buckets)
        self._prefill = Prefill(
            model=model,
            pools=pools,
            mtp_pool=mtp_pool,
            page_size=info.page_size,
            chunked=chunked_prefill,
            buckets=shape if isinstance(shape, Buckets) else None,
        )
        self._boundaries = BoundaryStore(info.boundaries)
        self._preflight = preflight
        self._builder = StepBuilder(
            info=info,
            cycle=self._cycle,
            prefill=self._prefill,
            pools=self._pools,
            books=self._books,
            boundaries=self._boundaries,
            room=Room(preflight, self._wait),
            shape=shape,
            trace=trace,
        )
        self._executor: Executor | None = None
        self._last_end = 0.0
        """When the last step ended."""
        self._fingerprint = ""
        self._ended: float | None = None
        """When the last step ended, if it left rows to go on with and nothing runs."""
        self._flight: deque[Step] = deque()
        self._failed = ""
        self.traces: list[Trace] = []

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model(self) -> Qwen35Model:
        """The model on the device; not to be changed."""
        return self._model

    @property
    def cycle(self) -> DecodeCycle:
        """The decode cycle; for benchmarks that overrule parts of it."""
        return self._cycle

    @property
    def one_by_one(self) -> bool:
        """Whether a cohort's rows run one after the other (see `engine.padding`)."""
        return self._builder.one_by_one

    def described(self, info: EngineInfo) -> MLXEngine:
        """The same engine with other notes."""
        self._info = info
        return self

    def run_on(self, executor: Executor) -> MLXEngine:
        """Evaluate on `executor` from now on; every array must live on its stream already. The
        engine stops it when it is closed."""
        self._executor = executor
        return self

    def _building(self) -> AbstractContextManager[object]:
        """Where operations may be built and small results read."""
        return nullcontext() if self._executor is None else mx.stream(self._executor.stream)

    def _on_device(self, job: Callable[[], T]) -> T:
        """Run what evaluates by itself."""
        return job() if self._executor is None else self._executor.call(job)

    def _shape(self, *, deterministic: bool, buckets: bool) -> Shape | None:
        if deterministic:
            return self._one_shape()
        if not buckets:
            return None
        info = self._info
        shape = Buckets(
            rows=max(2, info.max_rows),
            columns=pages_needed(info.context_length, info.page_size),
            depth=0,
            page_size=info.page_size,
        )
        self._add_pads(shape, shape.stand_in(self._model, mtp=info.max_depth > 0))
        return shape

    def _add_pads(self, shape: Shape, pad: RowArrays) -> None:
        pads = {row: shape.spec(row) for row in (FIRST_PAD - i for i in range(shape.rows))}
        for table in (self._books.free, self._books.guided):
            table.add_pads(pads, pad)

    def _one_shape(self) -> Shape:
        info = self._info
        columns = pages_needed(info.context_length, info.page_size)
        shape = Shape(rows=padded_rows(info.max_rows), columns=columns, depth=info.max_depth)
        pad = shape.stand_in(self._model, mtp=info.max_depth > 0)
        if not places_agree(shape, self._model, self._cycle, pad):
            return replace(shape, rows=1)
        self._add_pads(shape, pad)
        return shape

    def submit(self, plan: StepPlan) -> None:
        """Build the step's graph, and run it unless another step is running.

        A row that cannot be built, or has no room, is faulted alone in this step's result. Blocks
        for a plan with guided rows, until their drafts are made.
        """
        self._check_alive()
        if len(self._flight) >= self.max_in_flight:
            raise ValueError(f"{self.max_in_flight} steps are already in flight")
        PlanCheck(self._info, self._books, self._boundaries, self._flight).validate(plan)
        step = Step(plan=plan, began=time.perf_counter())
        try:
            with self._building():
                self._builder.build(step)
                if plan.guided is not None:
                    self._build_guided(step, plan.guided)
            step.build_s = time.perf_counter() - step.began - step.waited_s
            self._flight.append(step)
            if len(self._flight) == 1 or self._executor is not None:
                self._dispatch(step)
        except Exception as error:
            raise self._fail(error) from error

    def collect(self) -> StepResult:
        """Wait for the oldest step; hand the next one to the device; read the results."""
        self._check_alive()
        if not self._flight:
            raise ValueError("no step is in flight")
        step = self._flight.popleft()
        began = time.perf_counter()
        try:
            ended = self._await(step)
            if self._flight and self._executor is None:
                self._dispatch(self._flight[0])
            with self._building():
                ran = [result for output in step.outputs for result in self._read(output)]
                rows = in_plan_order(step.plan, ran, step.lost)
                self._remember(step, rows)
        except Exception as error:
            raise self._fail(error) from error
        # With nothing running meanwhile, building was part of the step.
        could_begin, self._last_end = max(self._last_end, step.began), ended
        return StepResult(
            step=step.plan.step,
            rows=rows,
            depth=next((b.depth for b in (step.plan.decode, step.plan.guided) if b), 0),
            build_s=step.build_s,
            wait_s=max(0.0, ended - began),
            device_s=max(0.0, ended - could_begin),
            gap_s=step.gap_s,
            memory=MemoryUse(
                active=mx.get_active_memory(),
                peak=mx.get_peak_memory(),
                cache=mx.get_cache_memory(),
            ),
        )

    def close(self) -> None:
        """Release device memory and, off the main thread, MLX itself; idempotent."""
        if self._failed != _CLOSED:
            self.release()
            if self._executor is None:
                leave_thread()
            else:
                self._executor.stop()

    def release(self) -> None:
        """Release device memory; the thread goes on using MLX (another engine takes over)."""
        self._failed = _CLOSED
        self._flight.clear()
        self._boundaries = BoundaryStore(0)
        self._books = Books(self._info.vocab_size)
        self._pools.clear()
        del self._builder, self._cycle, self._prefill, self._model
        mx.clear_cache()

    def _check_alive(self) -> None:
        if self._failed:
            raise EngineFailedError(self._failed)

    def _check_idle(self) -> None:
        self._check_alive()
        if self._flight:
            raise ValueError("a step is in flight")

    def _fail(self, error: Exception) -> EngineFailedError:
        """A step broke half-way: device state of its rows is unknown, so the engine is done."""
        self._failed = f"{type(error).__name__}: {error}"
        return EngineFailedError(self._failed)

    def _dispatch(self, step: Step) -> None:
        """Hand over what the device does not have of the step yet."""
        if self._executor is not None:
            if step.first or step.pending:
                step.run = self._executor.post(partial(_evaluate, step.first, step.pending))
                step.first, step.pending = [], []
            return
        if step.started is None:
            step.started = time.perf_counter()
            self._note_gap(step)
        if step.first:
            mx.eval(step.first)
            step.first = []
        if step.pending:
            mx.async_eval(step.pending)
            step.pending = []

    def _await(self, step: Step) -> float:
        """Wait until what was handed over of the step is done; returns when it was seen to be."""
        if self._executor is not None:
            return self._await_run(step)
        mx.eval(step.ends)
        if step.ended is None:
            step.ended = time.perf_counter()
            if step.runs_rows:
                self._ended = step.ended
        return step.ended

    def _await_run(self, step: Step) -> float:
        """The same with an executor."""
        run, step.run = step.run, None
        if run is not None:
            started, step.ended = run.wait()
            if step.started is None:
                step.started = started
                self._note_gap(step)
            if step.runs_rows:
                self._ended = step.ended
        if step.ended is None:  # nothing to evaluate
            step.ended = time.perf_counter()
        return step.ended

    def _note_gap(self, step: Step) -> None:
        """Seconds without work before a step that started just now."""
        if self._ended is not None and step.started is not None and step.runs_rows:
            step.gap_s, self._ended = step.started - self._ended, None

    def _wait(self) -> None:
        """Until the device has nothing to do."""
        try:
            if self._executor is not None:
                self._executor.call(mx.synchronize)
            elif self._flight:
                mx.eval(self._flight[0].ends)
        except Exception as error:  # not the fault of the row for which room is wanted
            raise EngineFailedError(f"{type(error).__name__}: {error}") from error

    def _build_guided(self, step: Step, batch: DecodeBatch) -> None:
        """Run the step's other parts, draft for the guided rows meanwhile, hand over the rest.

        Whatever runs while a pool is written makes MLX copy the pool; hence the two waits.
        """
        for earlier in self._flight:
            self._wait_in_submit(step, earlier)
        batch = self._builder.admit(step, batch, "guided")
        if not batch.rows:
            return
        self._dispatch(step)
        ends = self._builder.guided(step, batch, partial(self._before_reading, step))
        self._wait_in_submit(step, step)
        step.ended = None
        step.ends += ends
        step.pending = [*self._builder.live_arrays(), *ends]
        self._dispatch(step)

    def _before_reading(self, step: Step, drafts: mx.array) -> None:
        """Wait for the step's other parts, then have the drafts made."""
        self._wait_in_submit(step, step)
        self._on_device(partial(mx.eval, drafts))

    def _wait_in_submit(self, step: Step, other: Step) -> None:
        began = time.perf_counter()
        self._await(other)
        step.waited_s += time.perf_counter() - began

    def _end_of(self, row: int) -> RowArrays:
        """State of a row that ended in the step just collected: before the step in flight, if that
        one names it."""
        for step in self._flight:
            for rows, arrays in step.before:
                if row in rows:
                    return arrays.take([rows.index(row)])
        return self._books.table(row).one(row).take([0])

    def _remember(self, step: Step, rows: tuple[RowResult, ...]) -> None:
        """What the host now knows of the rows, and whether there is work to go on with."""
        books = self._books
        for result in rows:
            if result.row not in books.reached:
                continue  # faulted before it decoded, or released meanwhile
            books.reached[result.row] += len(result.tokens)
            if result.fault is not None:
                books.faulted.add(result.row)
            elif result.finish is not None and self._info.boundaries:
                books.ends[result.row] = self._end_of(result.row).counting(0)
        going_on = any(not chunk.last for chunk in step.plan.prefill) or any(
            result.tokens and result.finish is None for result in rows
        )
        if step.runs_rows and not going_on:
            self._ended = None

    def _read(self, output: Output) -> list[RowResult]:
        results = output.read()
        for index, result in enumerate(results):
            if output.logits is not None and result.tokens:
                kept = np.array(output.logits)[index, : len(result.tokens)]
                self.traces.append(Trace(row=result.row, tokens=result.tokens, logits=kept))
        return results


def _evaluate(first: list[mx.array], pending: list[mx.array]) -> tuple[float, float]:
    """On an executor: run a step to its end; when it began and ended. Takes both lists: a reference
    left would keep the next step from updating the page pools in place."""
    began = time.perf_counter()
    if first:
        mx.eval(first)
        first.clear()
    mx.eval(pending)
    pending.clear()
    return began, time.perf_counter()


def leave_thread() -> None:
    """Give up this thread's MLX streams, unless it is the main thread.

    A thread that used MLX must do so before it ends, or the process aborts at exit ("terminate
    called without an active exception"). MLX is of no use on it afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        mx.synchronize()
        mx.clear_streams()
