"""The engine: obeys step plans over one loaded model, on the thread that built it.

Two steps may be in flight. The device runs one; the graph of the next is built meanwhile (the
host's larger share) and handed over the moment the first is done, before its results are read.
Handing it over earlier would cost more than it gains: MLX reuses a page pool's buffer only when no
running operation holds it, so a step submitted behind a running one would copy every pool.

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
from dataclasses import dataclass, replace

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
from engine.models.qwen3_5 import Qwen35Model
from engine.padding import Shape, padded_rows, places_agree
from engine.plan import (
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
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
        preflight: Preflight | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`deterministic`: see `EngineConfig`. `preflight` None never asks for room."""
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
        self._prefill = Prefill(
            model=model,
            pools=pools,
            mtp_pool=mtp_pool,
            page_size=info.page_size,
            chunked=chunked_prefill,
        )
        self._books = Books(info.vocab_size)
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
            shape=self._one_shape() if deterministic else None,
            trace=trace,
        )
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

    def _one_shape(self) -> Shape:
        info = self._info
        columns = pages_needed(info.context_length, info.page_size)
        shape = Shape(rows=padded_rows(info.max_rows), columns=columns, depth=info.max_depth)
        pad = shape.stand_in(self._model, mtp=info.max_depth > 0)
        if not places_agree(shape, self._model, self._cycle, pad):
            return replace(shape, rows=1)
        pads = {row: shape.spec(row) for row in (FIRST_PAD - i for i in range(shape.rows))}
        for table in (self._books.free, self._books.guided):
            table.add_pads(pads, pad)
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
        began = time.perf_counter()
        step = Step(plan=plan)
        try:
            self._builder.build(step)
            if plan.guided is not None:
                self._build_guided(step, plan.guided)
            step.build_s = time.perf_counter() - began - step.waited_s
            self._flight.append(step)
            if len(self._flight) == 1:
                self._dispatch(step)
                step.started = began  # nothing ran meanwhile: building was part of the step
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
            if self._flight:
                self._dispatch(self._flight[0])
            rows = tuple(result for output in step.outputs for result in self._read(output))
        except Exception as error:
            raise self._fail(error) from error
        if step.lost:
            rows = in_plan_order(step.plan, rows, step.lost)
        self._remember(step, rows)
        return StepResult(
            step=step.plan.step,
            rows=rows,
            depth=next((b.depth for b in (step.plan.decode, step.plan.guided) if b), 0),
            build_s=step.build_s,
            wait_s=max(0.0, ended - began),
            device_s=ended - (step.started or ended),
            gap_s=step.gap_s,
        )

    def close(self) -> None:
        """Release device memory and, off the main thread, MLX itself; idempotent."""
        if self._failed != _CLOSED:
            self.release()
            leave_thread()

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
        if step.started is None:
            step.started = time.perf_counter()
            if self._ended is not None and step.runs_rows:
                step.gap_s, self._ended = step.started - self._ended, None
        if step.first:
            mx.eval(step.first)
            step.first = []
        if step.pending:
            mx.async_eval(step.pending)
            step.pending = []

    def _await(self, step: Step) -> float:
        """Wait until what was handed over of the step is done; returns when it was seen to be."""
        mx.eval(step.ends)
        if step.ended is None:
            step.ended = time.perf_counter()
            if step.runs_rows:
                self._ended = step.ended
        return step.ended

    def _wait(self) -> None:
        """Until the device has nothing to do."""
        try:
            if self._flight:
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
        ends = self._builder.guided(step, batch, lambda: self._wait_in_submit(step, step))
        self._wait_in_submit(step, step)
        step.ended = None
        step.ends += ends
        step.pending = [*self._builder.live_arrays(), *ends]
        self._dispatch(step)

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
                kept = np.array(output.logits[index, : len(result.tokens)])
                self.traces.append(Trace(row=result.row, tokens=result.tokens, logits=kept))
        return results


def leave_thread() -> None:
    """Give up this thread's MLX streams, unless it is the main thread.

    A thread that used MLX must do so before it ends, or the process aborts at exit ("terminate
    called without an active exception"). MLX is of no use on it afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        mx.synchronize()
        mx.clear_streams()
