"""The engine: obeys step plans over one loaded model, on the thread that built it.

Two steps may be in flight. The device runs one; the graph of the next is built meanwhile (the
host's larger share) and handed over the moment the first is done, before its results are read.
Handing it over earlier would cost more than it gains: MLX reuses a page pool's buffer only when no
running operation holds it, so a step submitted behind a running one would copy every pool.

What fails before the device has seen it (no room, an error while a row's chunk is built) costs that
row and nobody else: its writes are taken back from the graph. What fails in evaluation leaves the
pools in an unknown state and ends the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.boundary import BoundaryStore, LostBoundaryError, PlannedBoundaries, boundary_of
from engine.boundary_calls import BoundaryCalls
from engine.budget import Budget
from engine.cache import PagePool, page_table
from engine.cycle import FLAG_FAULT, FLAG_LENGTH, FLAG_STOP, TAIL, DecodeCycle, unpack
from engine.models.qwen3_5 import Qwen35Model
from engine.padding import Shape, padded_rows, places_agree
from engine.plan import (
    MAX_STOP_IDS,
    NULL_PAGE,
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    Finish,
    KeepRow,
    PrefillChunk,
    RowResult,
    RowSpec,
    StepPlan,
    StepResult,
    pages_needed,
)
from engine.prefill import Prefill, PrefillRow
from engine.preflight import Preflight
from engine.rows import FIRST_PAD, RowArrays, RowTable, make_statics
from engine.step import GoneError, OutOfMemoryError, Step, in_plan_order, rows_of

_CLOSED = "the engine was closed"
FAULT_TEXT = "the model produced non-finite logits"


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
        self._table = RowTable(info.vocab_size)
        self._shape = self._one_shape() if deterministic else None
        self._preflight = preflight
        self._boundaries = BoundaryStore(info.boundaries)
        self._fingerprint = ""
        self._prefilling: dict[int, PrefillRow] = {}
        self._reached: dict[int, int] = {}
        """Position of each decoding row's last emitted token, as results tell."""
        self._ends: dict[int, RowArrays] = {}
        """State of each row that has ended as it was then: a cycle that was under way may have run
        over it. Kept only where it may become a boundary."""
        self._faulted: set[int] = set()
        self._lost: set[int] = set()
        """Faulted rows that the device does not have; a plan may name them until it learns."""
        self._ended: float | None = None
        """When the last step ended, if it left rows to go on with and nothing runs."""
        self._flight: deque[Step] = deque()
        self._failed = ""
        self._trace = trace
        self.traces: list[Trace] = []

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model(self) -> Qwen35Model:
        """The model on the device; not to be changed."""
        return self._model

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
        pads = (FIRST_PAD - index for index in range(shape.rows))
        self._table.add_pads({row: shape.spec(row) for row in pads}, pad)
        return shape

    @property
    def one_by_one(self) -> bool:
        """Whether a cohort's rows run one after the other (see `engine.padding`)."""
        return self._shape is not None and self._shape.rows == 1

    def submit(self, plan: StepPlan) -> None:
        """Build the step's graph, and run it unless another step is running.

        A row that cannot be built, or has no room, is faulted alone in this step's result.
        """
        self._check_alive()
        if len(self._flight) >= self.max_in_flight:
            raise ValueError(f"{self.max_in_flight} steps are already in flight")
        self._validate(plan)
        began = time.perf_counter()
        step = Step(plan=plan)
        try:
            self._build(step)
            step.build_s = time.perf_counter() - began
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
            mx.eval(step.ends)
            ended = time.perf_counter()
            if step.runs_rows:
                self._ended = ended
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
            depth=step.plan.decode.depth if step.plan.decode else 0,
            build_s=step.build_s,
            wait_s=ended - began,
            device_s=ended - step.started,
            gap_s=step.gap_s,
        )

    def _check_idle(self) -> None:
        self._check_alive()
        if self._flight:
            raise ValueError("a step is in flight")

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
        self._boundaries = BoundaryStore(0)
        self._ends.clear()
        self._table = RowTable(self._info.vocab_size)
        self._pools.clear()
        del self._cycle, self._prefill, self._model
        mx.clear_cache()

    def _check_alive(self) -> None:
        if self._failed:
            raise EngineFailedError(self._failed)

    def _fail(self, error: Exception) -> EngineFailedError:
        """A step broke half-way: device state of its rows is unknown, so the engine is done."""
        self._failed = f"{type(error).__name__}: {error}"
        return EngineFailedError(self._failed)

    def _dispatch(self, step: Step) -> None:
        step.started = time.perf_counter()
        if self._ended is not None and step.runs_rows:
            step.gap_s, self._ended = step.started - self._ended, None
        if step.first:
            mx.eval(step.first)
            step.first = []
        mx.async_eval(step.pending)
        step.pending = []

    def _build(self, step: Step) -> None:
        plan = step.plan
        fresh = [array for keep in plan.keep for array in self._keep(keep)]
        self._release(plan.release)
        self._boundaries.drop(plan.drop)
        if plan.copies:
            pairs = mx.array(plan.copies, mx.int32)
            for pool in self._pools:
                step.first += pool.copy(pairs[:, 0], pairs[:, 1])
        for chunk in plan.prefill:
            fresh += self._build_chunk(step, chunk)
        if plan.decode is not None:
            self._build_decode(step, plan.decode)
        step.ends += [packed for _, packed, _ in step.outputs]
        if not step.ends and (plan.keep or plan.copies):
            # Summed, because a view would hold on to the pool.
            step.ends = [self._pools[0].keys[0, 0, 0].sum()]
        step.pending = [*self._live_arrays(), *fresh, *step.ends]

    def _keep(self, keep: KeepRow) -> list[mx.array]:
        """Save a decoding row's point; returns what must be evaluated."""
        spec = self._table.spec(keep.row)
        rows = self._ends.get(keep.row) or self._table.one(keep.row)
        mtp = spec.speculative and self._info.max_depth > 0
        if mtp:
            rows = self._cycle.settled(rows, page_table(keep.pages[None]))
            if keep.row not in self._ends:
                self._table.replace(keep.row, rows)
        saved = boundary_of(
            position=self._reached[keep.row],
            states=rows.states,
            carry=rows.last_hidden(),
            mtp=mtp,
        )
        self._boundaries.add(keep.boundary, saved)
        return saved.arrays()

    def _release(self, rows: Iterable[int]) -> None:
        self._table.release(rows)
        for row in rows:
            self._prefilling.pop(row, None)
            self._reached.pop(row, None)
            self._ends.pop(row, None)
            self._faulted.discard(row)
            self._lost.discard(row)

    def _build_chunk(self, step: Step, chunk: PrefillChunk) -> list[mx.array]:
        """Build a row's chunk, or fault the row; returns what else must be evaluated."""
        handles = [pool.handles() for pool in self._pools]
        try:
            if chunk.row in self._lost:
                raise GoneError
            need = step.need
            if self._preflight is not None:
                need += self._preflight.estimator.chunk(len(chunk.tokens), len(chunk.pages))
            self._check_room(need)
            fresh = self._run_chunk(step, chunk)
            step.need = need
            return fresh
        except EngineFailedError:
            raise
        except Exception as error:
            for pool, before in zip(self._pools, handles, strict=True):
                pool.restore(before)
            if chunk.save is not None:
                self._boundaries.lose(chunk.save, chunk.start + len(chunk.tokens))
            if not isinstance(error, GoneError):
                self._lose(step, "prefill", chunk.row, error)
            elif chunk.last:
                step.lost["prefill", chunk.row] = RowResult(row=chunk.row)
            return []

    def _run_chunk(self, step: Step, chunk: PrefillChunk) -> list[mx.array]:
        row = self._prefilling.get(chunk.row)
        if row is None:
            assert chunk.spec is not None
            start = None if chunk.restore is None else self._boundaries[chunk.restore]
            row = self._prefill.start(chunk.spec, start)
        row, hidden = self._prefill.chunk(row, chunk)
        saved = None if chunk.save is None else self._prefill.boundary(row)
        first = self._prefill.finish(row, hidden) if chunk.last else None
        # Nothing below raises: the engine's books and the graph change together.
        if chunk.save is not None and saved is not None:
            self._boundaries.add(chunk.save, saved)
        if first is None:
            self._prefilling[chunk.row] = row
            step.ends.append(hidden)
        else:
            self._prefilling.pop(chunk.row, None)
            self._table.add(chunk.row, row.spec, first.rows)
            self._reached[chunk.row] = row.position - 1
            step.outputs.append(((chunk.row,), first.packed, first.logits if self._trace else None))
        return [] if saved is None else saved.arrays()

    def _chunk_spec(self, chunk: PrefillChunk) -> RowSpec | None:
        row = self._prefilling.get(chunk.row)
        return chunk.spec if row is None else row.spec

    def _build_decode(self, step: Step, batch: DecodeBatch, part: str = "decode") -> None:
        batch = self._without_lost(step, batch, part)
        if not batch.rows:
            return
        if self._shape is not None:
            batch = self._shape.pad(batch)
        if self.one_by_one:
            for index, row in enumerate(batch.rows):
                self._run_alone(step, row, batch, index)
            return
        rows, statics = self._table.batch(batch.rows)
        step.before.append((batch.rows, rows))
        limits = mx.array(batch.limits, mx.int32)
        output = self._cycle.run(rows, statics, page_table(batch.pages), batch.depth, limits)
        self._table.update(output.rows)
        step.outputs.append((batch.rows, output.packed, output.logits if self._trace else None))

    def _run_alone(self, step: Step, row: int, batch: DecodeBatch, index: int) -> None:
        statics = make_statics([self._table.spec(row)], self._info.vocab_size)
        limits = mx.array(batch.limits[index : index + 1], mx.int32)
        table = page_table(batch.pages[index : index + 1])
        rows = self._table.one(row)
        step.before.append(((row,), rows))
        output = self._cycle.run(rows, statics, table, batch.depth, limits)
        self._table.replace(row, output.rows)
        step.outputs.append(((row,), output.packed, output.logits if self._trace else None))

    def _without_lost(self, step: Step, batch: DecodeBatch, part: str) -> DecodeBatch:
        """The cohort without rows that are gone or for whose joining there is no room."""
        # One by one, a row more takes no more room.
        running = batch.rows if self.one_by_one else self._table.stacked
        staying = set(batch.rows).intersection(running)
        kept: list[int] = []
        count = len(staying)
        for index, row in enumerate(batch.rows):
            if row in self._lost:
                step.lost[part, row] = RowResult(row=row)
                continue
            if row not in staying:
                try:
                    self._check_room(step.need + self._cohort_bytes(count + 1, batch))
                except OutOfMemoryError as error:
                    self._lose(step, part, row, error)
                    continue
                count += 1
            kept.append(index)
        step.need += self._cohort_bytes(count, batch)
        if len(kept) == len(batch.rows):
            return batch
        return DecodeBatch(
            rows=tuple(batch.rows[index] for index in kept),
            pages=batch.pages[kept],
            depth=batch.depth,
            limits=tuple(batch.limits[index] for index in kept),
        )

    def _cohort_bytes(self, rows: int, batch: DecodeBatch) -> int:
        if self._preflight is None:
            return 0
        columns = batch.pages.shape[1]
        if self._shape is not None:
            rows, columns = self._shape.rows, self._shape.columns
        return self._preflight.estimator.cohort(rows, rows * columns)

    def _check_room(self, need: int) -> None:
        """Raises OutOfMemoryError unless there is room for `need` bytes while the step runs."""
        refusal = None if self._preflight is None else self._preflight.refusal(need, self._wait)
        if refusal is not None:
            raise OutOfMemoryError(refusal)

    def _wait(self) -> None:
        """Until the device has nothing to do."""
        try:
            if self._flight:
                mx.eval(self._flight[0].ends)
        except Exception as error:  # not the fault of the row for which room is wanted
            raise EngineFailedError(f"{type(error).__name__}: {error}") from error

    def _lose(self, step: Step, part: str, row: int, error: Exception) -> None:
        """Fault a row that this step cannot run; nothing of it stays on the device."""
        text = str(error) if isinstance(error, (OutOfMemoryError, LostBoundaryError)) else ""
        fault = text or f"building its step failed: {type(error).__name__}: {error}"
        self._release([row])
        self._faulted.add(row)
        self._lost.add(row)
        step.lost[part, row] = RowResult(row=row, fault=fault)

    def _end_of(self, row: int) -> RowArrays:
        """State of a row that ended in the step just collected: before the step in flight, if that
        one names it."""
        for step in self._flight:
            for rows, arrays in step.before:
                if row in rows:
                    return arrays.take([rows.index(row)])
        return self._table.one(row).take([0])

    def _remember(self, step: Step, rows: tuple[RowResult, ...]) -> None:
        """What the host now knows of the rows, and whether there is work to go on with."""
        for result in rows:
            if result.row not in self._reached:
                continue  # faulted before it decoded, or released meanwhile
            self._reached[result.row] += len(result.tokens)
            if result.fault is not None:
                self._faulted.add(result.row)
            elif result.finish is not None and self._info.boundaries:
                self._ends[result.row] = self._end_of(result.row)
        going_on = any(not chunk.last for chunk in step.plan.prefill) or any(
            result.tokens and result.finish is None for result in rows
        )
        if step.runs_rows and not going_on:
            self._ended = None

    def _live_arrays(self) -> list[mx.array]:
        live = [array for pool in self._pools for array in (pool.keys, pool.values)]
        live += self._table.arrays()
        live += [array for end in self._ends.values() for array in end.arrays()]
        return live + [array for row in self._prefilling.values() for array in row.arrays()]

    def _read(self, output: tuple[tuple[int, ...], mx.array, mx.array | None]) -> list[RowResult]:
        rows, packed, logits = output
        values: list[list[int]] = packed.tolist()  # type: ignore[assignment]
        width = packed.shape[1] - TAIL
        results = []
        for index, (row, line) in enumerate(zip(rows, values, strict=True)):
            if row <= FIRST_PAD:
                break
            tokens, drafted, accepted, flags = unpack(line, width)
            results.append(_result(row, tokens, drafted, accepted, flags))
            if logits is not None and tokens:
                kept = np.array(logits[index, : len(tokens)])
                self.traces.append(Trace(row=row, tokens=tokens, logits=kept))
        return results

    def _validate(self, plan: StepPlan) -> None:
        """Raise ValueError, before anything is built, when the plan breaks the contract."""
        points = self._check_keeps(plan)
        points.drop(plan.drop)
        self._check_copies(plan)
        lost = self._lost - set(plan.release)
        known = set(self._prefilling) - set(plan.release)
        ready = self._table.rows() - set(plan.release)
        chunked = [chunk.row for chunk in plan.prefill]
        if len(set(chunked)) != len(chunked):
            raise ValueError(f"a step takes one chunk per row; rows of this one: {chunked}")
        for chunk in plan.prefill:
            if chunk.row not in lost:
                self._check_chunk(chunk, known, ready)
                if chunk.restore is not None:
                    points.restore(chunk)
            spec = self._chunk_spec(chunk)
            if chunk.save is not None:
                mtp = spec is None or spec.speculative
                points.add(chunk.save, chunk.start + len(chunk.tokens), mtp=mtp)
            if chunk.row in lost:
                continue
            known.discard(chunk.row)
            (ready if chunk.last else known).add(chunk.row)
        if len(known | ready) > self._info.max_rows:
            raise ValueError(f"more than max_rows ({self._info.max_rows}) rows hold state")
        points.finish()
        if plan.decode is not None:
            self._check_decode(plan.decode, ready | lost)

    def _check_keeps(self, plan: StepPlan) -> PlannedBoundaries:
        info = self._info
        points = PlannedBoundaries(
            self._boundaries.facts(), limit=info.boundaries, drafts=info.max_depth > 0
        )
        flying = {row for step in self._flight for row in rows_of(step.plan)}
        for keep in plan.keep:
            row = keep.row
            if row not in self._reached or row in self._faulted:
                raise ValueError(f"row {row}: only a decoding row without fault can be kept")
            if row in flying:
                raise ValueError(f"row {row}: to be kept, but a step in flight names it")
            position = self._reached[row]
            self._check_table(f"row {row}", keep.pages, position)
            points.add(keep.boundary, position, mtp=self._table.spec(row).speculative)
        return points

    def _check_copies(self, plan: StepPlan) -> None:
        targets = [target for _, target in plan.copies]
        pages = np.array(plan.copies, np.int32).reshape(-1)
        self._check_pages(pages)
        if (pages == NULL_PAGE).any():
            raise ValueError("the null page cannot be copied")
        if len(set(targets)) < len(targets) or {s for s, _ in plan.copies} & set(targets):
            raise ValueError(f"no page may be written twice, nor read and written: {plan.copies}")

    def _check_table(self, what: str, pages: NDArray[np.int32], positions: int) -> None:
        if len(pages) < pages_needed(positions, self._info.page_size):
            raise ValueError(f"{what}: page table does not cover {positions} positions")
        self._check_pages(pages)

    def _check_chunk(self, chunk: PrefillChunk, known: set[int], ready: set[int]) -> None:
        size, info = len(chunk.tokens), self._info
        row = self._prefilling.get(chunk.row)
        if chunk.row in ready:
            raise ValueError(f"row {chunk.row}: its prompt is complete already")
        first = chunk.row not in known
        if first and chunk.restore is None and chunk.start != 0:
            raise ValueError(f"row {chunk.row}: unknown, so its chunk must start at 0")
        if (chunk.spec is not None) != first:
            raise ValueError(f"row {chunk.row}: spec belongs to the first chunk, and only there")
        if not first and (chunk.restore is not None or chunk.prefix is not None):
            raise ValueError(f"row {chunk.row}: restore and prefix belong to the first chunk")
        if chunk.restore is None and chunk.prefix is not None:
            raise ValueError(f"row {chunk.row}: prefix belongs to a restore")
        if row is not None and chunk.row in known and row.position != chunk.start:
            raise ValueError(f"row {chunk.row}: chunk starts at {chunk.start}, not {row.position}")
        if size == 0 or chunk.start + size > info.context_length:
            raise ValueError(f"row {chunk.row}: chunk of {size} at {chunk.start} is out of range")
        if len(chunk.pages) < pages_needed(chunk.start + size, info.page_size):
            raise ValueError(f"row {chunk.row}: page table does not cover the chunk")
        if chunk.tokens.min() < 0 or chunk.tokens.max() >= info.vocab_size:
            raise ValueError(f"row {chunk.row}: token outside 0…{info.vocab_size - 1}")
        if chunk.spec is not None and len(chunk.spec.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"row {chunk.row}: more than {MAX_STOP_IDS} stop ids")
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


def _result(
    row: int, tokens: tuple[int, ...], drafted: int, accepted: int, flags: int
) -> RowResult:
    finish = None
    if flags & FLAG_STOP:
        finish = Finish.STOP
    elif flags & FLAG_LENGTH:
        finish = Finish.LENGTH
    result = RowResult(row=row, tokens=tokens, drafted=drafted, accepted=accepted, finish=finish)
    return replace(result, fault=FAULT_TEXT) if flags & FLAG_FAULT else result
