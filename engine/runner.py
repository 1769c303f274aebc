"""The engine: obeys step plans over one loaded model, on the thread that built it.

Two steps may be in flight. The device runs one; the graph of the next is built meanwhile (the
host's larger share) and handed over the moment the first is done, before its results are read.
Handing it over earlier would cost more than it gains: MLX reuses a page pool's buffer only when no
running operation holds it, so a step submitted behind a running one would copy every pool.

A guided cohort needs the host between its drafts, so its step is never built ahead: `submit` waits
for the step before, hands the free cohort of the same step to the device, asks the constraints
what may come first while that runs, and goes on once it is done (for the same reason).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.cache import PagePool, page_table
from engine.cycle import DecodeCycle
from engine.guided import Form, Guide
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import (
    NULL_PAGE,
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    PrefillChunk,
    RowResult,
    StepPlan,
    StepResult,
    pages_needed,
)
from engine.prefill import Prefill, PrefillRow
from engine.results import Output
from engine.rows import RowTable
from engine.rules import check_spec

_CLOSED = "the engine was closed"


@dataclass(slots=True)
class _Step:
    """A submitted step: what to wait for and how to read it."""

    plan: StepPlan
    outputs: list[Output] = field(default_factory=list)
    """In result order."""
    pending: list[mx.array] = field(default_factory=list)
    """Everything the step must compute; emptied once the device has it, because a reference would
    keep the next step from updating the page pools in place."""
    ends: list[mx.array] = field(default_factory=list)
    """Small arrays whose presence means that the step is done."""
    build_s: float = 0.0
    waited_s: float = 0.0
    """Part of `submit` spent waiting for the device."""
    started: float | None = None
    """When the device could begin; None while it has nothing of the step."""
    ended: float | None = None
    """When the step was seen to be done, before it was collected."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Logits behind the tokens of one row in one step; only kept by a tracing engine (tests)."""

    row: int
    tokens: tuple[int, ...]
    logits: np.ndarray
    """float32 [len(tokens), V]."""


class MLXEngine:
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
    ) -> None:
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
        self._table = RowTable(info.vocab_size)
        self._guided = RowTable(info.vocab_size)
        self._forms: dict[int, Form] = {}
        self._prefilling: dict[int, PrefillRow] = {}
        self._flight: deque[_Step] = deque()
        self._failed = ""
        self._trace = trace
        self.traces: list[Trace] = []

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def cycle(self) -> DecodeCycle:
        """The decode cycle; for benchmarks that overrule parts of it."""
        return self._cycle

    def described(self, info: EngineInfo) -> MLXEngine:
        """The same engine with other notes."""
        self._info = info
        return self

    def submit(self, plan: StepPlan) -> None:
        """Build the step's graph, and run it unless another step is running.

        Blocks for a plan with guided rows, until their drafts are made.
        """
        self._check_alive()
        if len(self._flight) >= self.max_in_flight:
            raise ValueError(f"{self.max_in_flight} steps are already in flight")
        self._validate(plan)
        began = time.perf_counter()
        step = _Step(plan=plan)
        try:
            self._build(step)
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
        return StepResult(
            step=step.plan.step,
            rows=rows,
            depth=next((b.depth for b in (step.plan.decode, step.plan.guided) if b), 0),
            build_s=step.build_s,
            wait_s=max(0.0, ended - began),
            device_s=ended - (step.started or ended),
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
        self._prefilling.clear()
        self._forms.clear()
        self._table = RowTable(self._info.vocab_size)
        self._guided = RowTable(self._info.vocab_size)
        self._pools.clear()
        del self._cycle, self._prefill
        mx.clear_cache()

    def _check_alive(self) -> None:
        if self._failed:
            raise EngineFailedError(self._failed)

    def _fail(self, error: Exception) -> EngineFailedError:
        """A step broke half-way: device state of its rows is unknown, so the engine is done."""
        self._failed = f"{type(error).__name__}: {error}"
        return EngineFailedError(self._failed)

    def _dispatch(self, step: _Step) -> None:
        """Hand over what the device does not have of the step yet."""
        if step.started is None:
            step.started = time.perf_counter()
        if step.pending:
            mx.async_eval(step.pending)
            step.pending = []

    def _await(self, step: _Step) -> float:
        """Wait until what was handed over of the step is done; returns when it was seen to be."""
        mx.eval(step.ends)
        if step.ended is None:
            step.ended = time.perf_counter()
        return step.ended

    def _build(self, step: _Step) -> None:
        plan = step.plan
        self._table.release(plan.release)
        self._guided.release(plan.release)
        for row in plan.release:
            self._prefilling.pop(row, None)
            self._forms.pop(row, None)
        for chunk in plan.prefill:
            self._build_chunk(step, chunk)
        if plan.decode is not None:
            self._build_decode(step, plan.decode)
        step.ends += [array for output in step.outputs for array in output.ends]
        step.pending = [*self._live_arrays(), *step.ends]

    def _build_chunk(self, step: _Step, chunk: PrefillChunk) -> None:
        row = self._prefilling.pop(chunk.row, None)
        if row is None:
            assert chunk.spec is not None
            row = self._prefill.start(chunk.spec)
        row, hidden, prompt = self._prefill.chunk(row, chunk)
        spec = row.spec
        if not chunk.last:
            self._prefilling[chunk.row] = row
            step.ends.append(hidden)
            if spec.prompt_logprobs is not None:
                output = Output(
                    rows=(chunk.row,),
                    specs=(spec,),
                    packed=None,
                    width=0,
                    chunk=True,
                    prompt=prompt,
                )
                step.outputs.append(output)
            return
        forms: tuple[Form, ...] = ()
        guide = None
        if spec.constraint is not None:
            form = Form(spec.constraint, frozenset(spec.stop_ids), spec.max_tokens)
            self._forms[chunk.row], forms = form, (form,)
            guide = Guide(forms, vocab=self._info.vocab_size, limits=(0,))
        first = self._prefill.finish(row, hidden, guide)
        table = self._table if spec.constraint is None else self._guided
        table.add(chunk.row, spec, first.rows)
        step.outputs.append(
            Output(
                rows=(chunk.row,),
                specs=(spec,),
                packed=first.packed,
                width=1,
                logits=first.logits if self._trace else None,
                chunk=True,
                prompt=prompt,
                forms=forms,
            )
        )

    def _build_decode(self, step: _Step, batch: DecodeBatch) -> None:
        step.outputs.append(self._cohort(self._table, batch))

    def _build_guided(self, step: _Step, batch: DecodeBatch) -> None:
        """Run the step's other parts, draft for the guided rows meanwhile, hand over the rest.

        Whatever runs while a pool is written makes MLX copy the pool; hence the two waits.
        """
        for earlier in self._flight:
            self._wait_in_submit(step, earlier)
        self._dispatch(step)
        forms = tuple(self._forms[row] for row in batch.rows)
        guide = Guide(
            forms,
            vocab=self._info.vocab_size,
            limits=batch.limits,
            before_reading=lambda: self._wait_in_submit(step, step),
        )
        output = self._cohort(self._guided, batch, guide, forms)
        self._wait_in_submit(step, step)
        step.ended = None
        step.outputs.append(output)
        step.ends += output.ends
        step.pending = [*self._live_arrays(), *output.ends]
        self._dispatch(step)

    def _wait_in_submit(self, step: _Step, other: _Step) -> None:
        began = time.perf_counter()
        self._await(other)
        step.waited_s += time.perf_counter() - began

    def _cohort(
        self,
        table: RowTable,
        batch: DecodeBatch,
        guide: Guide | None = None,
        forms: tuple[Form, ...] = (),
    ) -> Output:
        """Build one cohort's cycle."""
        rows, statics = table.batch(batch.rows)
        limits = mx.array(batch.limits, mx.int32)
        pages = page_table(batch.pages)
        output = self._cycle.run(rows, statics, pages, batch.depth, limits, guide)
        table.update(output.rows)
        return Output(
            rows=batch.rows,
            specs=table.specs(batch.rows),
            packed=output.packed,
            width=batch.depth + 1,
            logits=output.logits if self._trace else None,
            forms=forms,
        )

    def _live_arrays(self) -> list[mx.array]:
        live = [array for pool in self._pools for array in (pool.keys, pool.values)]
        live += [*self._table.arrays(), *self._guided.arrays()]
        return live + [array for row in self._prefilling.values() for array in row.arrays()]

    def _read(self, output: Output) -> list[RowResult]:
        results = output.read()
        for index, result in enumerate(results):
            if output.logits is not None and result.tokens:
                kept = np.array(output.logits[index, : len(result.tokens)])
                self.traces.append(Trace(row=result.row, tokens=result.tokens, logits=kept))
        return results

    def _validate(self, plan: StepPlan) -> None:
        """Raise ValueError, before anything is built, when the plan breaks the contract."""
        known = set(self._prefilling) - set(plan.release)
        ready = (self._table.rows() | self._guided.rows()) - set(plan.release)
        guided = self._guided.rows()
        chunked = [chunk.row for chunk in plan.prefill]
        if len(set(chunked)) != len(chunked):
            raise ValueError(f"a step takes one chunk per row; rows of this one: {chunked}")
        for chunk in plan.prefill:
            self._check_chunk(chunk, known, ready)
            known.discard(chunk.row)
            (ready if chunk.last else known).add(chunk.row)
            spec = chunk.spec or self._prefilling[chunk.row].spec
            if spec.constraint is not None:
                guided.add(chunk.row)
        if len(known | ready) > self._info.max_rows:
            raise ValueError(f"more than max_rows ({self._info.max_rows}) rows hold state")
        if plan.decode is not None:
            self._check_decode(plan.decode, ready)
            wrong = [row for row in plan.decode.rows if row in guided]
            if wrong:
                raise ValueError(f"rows with a constraint belong to guided, not decode: {wrong}")
        if plan.guided is not None:
            self._check_decode(plan.guided, ready)
            self._check_guided(plan, guided)

    def _check_guided(self, plan: StepPlan, guided: set[int]) -> None:
        assert plan.guided is not None
        wrong = [row for row in plan.guided.rows if row not in guided]
        if wrong:
            raise ValueError(f"guided rows must have a constraint; these have none: {wrong}")
        flying = {chunk.row for chunk in plan.prefill}
        for step in self._flight:
            flying.update(chunk.row for chunk in step.plan.prefill)
            for batch in (step.plan.decode, step.plan.guided):
                flying.update(batch.rows if batch else ())
        wrong = [row for row in plan.guided.rows if row in flying]
        if wrong:
            raise ValueError(f"the tokens of guided rows are not known yet, in flight: {wrong}")

    def _check_chunk(self, chunk: PrefillChunk, known: set[int], ready: set[int]) -> None:
        size, info = len(chunk.tokens), self._info
        row = self._prefilling.get(chunk.row)
        if chunk.row in ready:
            raise ValueError(f"row {chunk.row}: its prompt is complete already")
        if (chunk.spec is None) == (chunk.start == 0):
            raise ValueError(f"row {chunk.row}: spec belongs to the first chunk, and only there")
        if chunk.row not in known and chunk.start != 0:
            raise ValueError(f"row {chunk.row}: unknown, so its chunk must start at 0")
        if row is not None and chunk.row in known and row.position != chunk.start:
            raise ValueError(f"row {chunk.row}: chunk starts at {chunk.start}, not {row.position}")
        if size == 0 or chunk.start + size > info.context_length:
            raise ValueError(f"row {chunk.row}: chunk of {size} at {chunk.start} is out of range")
        if len(chunk.pages) < pages_needed(chunk.start + size, info.page_size):
            raise ValueError(f"row {chunk.row}: page table does not cover the chunk")
        if chunk.tokens.min() < 0 or chunk.tokens.max() >= info.vocab_size:
            raise ValueError(f"row {chunk.row}: token outside 0…{info.vocab_size - 1}")
        if chunk.spec is not None:
            check_spec(chunk.row, chunk.spec, info.vocab_size)
            if chunk.spec.prompt_logprobs is not None and chunk.start:
                raise ValueError(f"row {chunk.row}: prompt_logprobs of a restored prefix")
        self._check_pages(chunk.pages)

    def _check_decode(self, batch: DecodeBatch, ready: set[int]) -> None:
        unknown = [row for row in batch.rows if row not in ready]
        if unknown or len(set(batch.rows)) != len(batch.rows) or not batch.rows:
            raise ValueError(f"decode rows must be distinct and prefilled; not so: {unknown}")
        if not 0 <= batch.depth <= self._info.max_depth:
            raise ValueError(f"depth {batch.depth} is outside 0…{self._info.max_depth}")
        if len(batch.limits) != len(batch.rows) or batch.pages.shape[0] != len(batch.rows):
            raise ValueError("decode limits and pages must have one entry per row")
        if any(not 0 <= limit <= batch.depth for limit in batch.limits):
            raise ValueError(f"limits must be in 0…{batch.depth}")
        self._check_pages(batch.pages)

    def _check_pages(self, pages: np.ndarray) -> None:
        if pages.size and (pages.min() < NULL_PAGE or pages.max() > self._info.pages):
            raise ValueError(f"page ids must be in 0…{self._info.pages}")


def leave_thread() -> None:
    """Give up this thread's MLX streams, unless it is the main thread.

    A thread that used MLX must do so before it ends, or the process aborts at exit ("terminate
    called without an active exception"). MLX is of no use on it afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        mx.synchronize()
        mx.clear_streams()
