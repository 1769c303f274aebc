"""Measure what a decode cycle costs, t(rows, depth), on a running engine.

Drives the engine through its protocol alone, as a scheduler would with nothing in flight behind:
rows are prefilled with a synthetic prompt, then every (rows, depth) point runs a few cycles per
round, rounds in another order each, so that drifts of a noisy machine fall on all points alike. A
cycle's cost does not depend on which drafts stand, but for recurrent layers that replay a block.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from engine.plan import (
    DecodeBatch,
    Engine,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    StepResult,
    page_array,
    pages_needed,
)
from engine.solo import generate, row_ids

WARM_UP = 2
"""Cycles per point that are not measured: the first of a shape may compile, the second may still
find a cold allocator."""
BURST = 2
"""Cycles per point and round; the first follows another shape and is measured all the same, as it
is what serving looks like."""

_steps = itertools.count()

Progress = Callable[[str, int, int], None]
"""(phase, done, total)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One (rows, depth): seconds of a cycle."""

    rows: int
    depth: int
    seconds: float
    """Median."""
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    samples: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `measure` found."""

    points: tuple[Point, ...]
    acceptance: tuple[float, ...]
    """[j]: share of cycles that reached draft j + 1 in which it stood; empty without drafts."""
    context: int
    """Prompt tokens per row."""
    rounds: int


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Prefilled rows, all with the same synthetic prompt length."""

    engine: Engine
    prompt: int
    room: int
    """Tokens each may still emit."""
    tables: list[list[int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def prefill(self, count: int) -> None:
        info = self.engine.info
        need = pages_needed(self.prompt + self.room, info.page_size)
        rng = np.random.default_rng(0)
        for index in range(count):
            row = next(row_ids)
            table = list(range(index * need + 1, (index + 1) * need + 1))
            tokens = rng.integers(0, info.vocab_size, self.prompt, dtype=np.int32)
            spec = RowSpec(
                sampling=SamplingParams(temperature=0.6, seed=index), max_tokens=self.room
            )
            self.ids.append(row)
            self.tables.append(table)
            for start in range(0, self.prompt, info.prefill_chunk):
                piece = tokens[start : start + info.prefill_chunk]
                chunk = PrefillChunk(
                    row=row,
                    tokens=piece,
                    start=start,
                    pages=page_array(table),
                    last=start + len(piece) == self.prompt,
                    spec=spec if start == 0 else None,
                )
                run(self.engine, prefill=(chunk,))

    def cycle(self, rows: int, depth: int) -> float:
        """Seconds of one cycle of the first `rows` rows. Raises RuntimeError when a row ended."""
        batch = DecodeBatch(
            rows=tuple(self.ids[:rows]),
            pages=np.stack([page_array(table) for table in self.tables[:rows]]),
            depth=depth,
            limits=(depth,) * rows,
        )
        result = run(self.engine, decode=batch)
        for row in result.rows:
            if row.finish is not None or row.fault is not None:
                raise RuntimeError(f"a row ended while measuring: {row.fault or row.finish}")
        return result.device_s

    def release(self) -> None:
        if self.ids:
            run(self.engine, release=tuple(self.ids))
        self.ids, self.tables = [], []


def run(engine: Engine, **parts: object) -> StepResult:
    """Submit one step of these parts and wait for it."""
    engine.submit(StepPlan(step=next(_steps), **parts))  # type: ignore[arg-type]
    return engine.collect()


@contextmanager
def _prefilled(engine: Engine, *, rows: int, prompt: int, room: int) -> Iterator[_Rows]:
    held = _Rows(engine=engine, prompt=prompt, room=room)
    try:
        held.prefill(rows)
        yield held
    finally:
        held.release()


def check(engine: Engine, *, rows: Sequence[int], depths: Sequence[int], context: int) -> int:
    """Cycles that rows with `context` prompt tokens have room for, in a batch of the most rows.

    Raises ValueError, naming what the engine has too little of.
    """
    info = engine.info
    if not rows or not depths:
        raise ValueError("rows and depths must not be empty")
    if min(rows) < 1 or max(rows) > info.max_rows:
        raise ValueError(f"rows must be in 1 … {info.max_rows} (max_rows of the engine)")
    if min(depths) < 0 or max(depths) > info.max_depth:
        raise ValueError(f"depths must be in 0 … {info.max_depth} (max_depth of the engine)")
    if context < 1:
        raise ValueError("context must be at least 1 token")
    positions = min(info.context_length, info.pages // max(rows) * info.page_size)
    # A burst at every depth, at least: rows are prefilled anew when they are full.
    least = max(depths) + 1
    room = (positions - context - 2) // least  # the prompt's own token, and one never emitted
    if room < BURST + WARM_UP:
        raise ValueError(
            f"context: {max(rows)} rows have {positions} positions each in this engine; a prompt "
            f"of {context} leaves no room to measure in. Fewer rows, less context or more KV memory"
        )
    return room


def measure(
    engine: Engine,
    *,
    rows: Sequence[int],
    depths: Sequence[int],
    seconds: float,
    clock: Callable[[], float],
    context: int = 256,
    prompt: Sequence[int] = (0,),
    seed: int = 0,
    progress: Progress | None = None,
) -> Measured:
    """Measure every (rows, depth) for about `seconds` in all, at least two rounds.

    `clock` gives seconds. `prompt` is what the model continues to measure acceptance. Raises
    ValueError as `check` does, RuntimeError when a row faults, and what the engine raises.
    """
    room = check(engine, rows=rows, depths=depths, context=context)
    grid = [(b, k) for b in sorted(set(rows)) for k in sorted(set(depths))]
    times: dict[tuple[int, int], list[float]] = {point: [] for point in grid}
    order = random.Random(seed)
    rounds, total = 0, len(grid)
    end = clock() + seconds
    while rounds < 3 or clock() < end:
        warming = rounds == 0
        cycles = WARM_UP if warming else BURST
        done = 0
        for group in _groups(order.sample(grid, total), max(1, room // max(1, cycles))):
            most = max(b for b, _ in group)
            needed = cycles * len(group) * (max(depths) + 1)
            with _prefilled(engine, rows=most, prompt=context, room=needed + 2) as held:
                for b, k in group:
                    found = [held.cycle(b, k) for _ in range(cycles)]
                    if not warming:
                        times[b, k] += found
                    done += 1
                    if progress is not None:
                        phase = "warming up" if warming else f"round {rounds}"
                        progress(phase, done, total)
        rounds += 1
    return Measured(
        points=tuple(_point(b, k, times[b, k]) for b, k in grid),
        acceptance=measure_acceptance(engine, depth=max(depths), prompt=prompt),
        context=context,
        rounds=rounds - 1,
    )


def _groups(points: list[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Points that one prefill has room for."""
    for start in range(0, len(points), size):
        yield points[start : start + size]


def _point(rows: int, depth: int, times: list[float]) -> Point:
    low, middle, high = statistics.quantiles(times, n=4)
    return Point(rows=rows, depth=depth, seconds=middle, low=low, high=high, samples=len(times))


def measure_acceptance(
    engine: Engine,
    *,
    depth: int,
    prompt: Sequence[int],
    rows: int = 4,
    tokens: int = 96,
    temperature: float = 0.7,
) -> tuple[float, ...]:
    """Per position: how often a draft stood when it was reached, in texts of the model's own that
    continue `prompt`. Rows differ by seed."""
    if depth == 0:
        return ()
    rows = min(rows, engine.info.max_rows)
    room = min(engine.info.context_length, engine.info.pages // rows * engine.info.page_size)
    tokens = min(tokens, room - len(prompt))
    requests = [
        (
            list(prompt),
            RowSpec(sampling=SamplingParams(temperature=temperature, seed=seed), max_tokens=tokens),
        )
        for seed in range(rows)
    ]
    results = generate(engine, requests, depth=depth)
    reached = [0] * (depth + 1)
    stood = [0] * depth
    for result in results:
        for j in range(depth):
            drafted = result.drafted[j] if j < len(result.drafted) else 0
            before = drafted if j == 0 else min(drafted, _at(result.accepted, j - 1))
            reached[j] += before
            stood[j] += _at(result.accepted, j)
    return tuple(s / r if r else 0.0 for s, r in zip(stood, reached, strict=False))


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Tokens a row emits in a cycle at `depth` when each draft stands with these chances, given
    that the ones before it did; beyond the last chance nothing stands."""
    expected = reach = 1.0
    for chance in list(acceptance)[:depth]:
        reach *= chance
        expected += reach
    return expected
