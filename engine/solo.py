"""Drive an engine without a scheduler: a few rows, start to end, step by step.

For the load-time gate, scripts, benchmarks and tests. Pages are dealt out up front, every row is
decoded in every cycle, nothing is pipelined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.plan import (
    DecodeBatch,
    Engine,
    Finish,
    Logprobs,
    PrefillChunk,
    RowResult,
    RowSpec,
    StepPlan,
    page_array,
    pages_needed,
)

row_ids = itertools.count(1 << 40)
"""Row ids no scheduler hands out, never reused."""

Depths = Callable[[int], int]
"""Depth of the n-th decode cycle."""
Limits = Callable[[int, int, int], int]
"""(cycle, index of the request, depth) → most drafts it may accept."""


@dataclass(slots=True)
class SoloResult:
    """What one request got."""

    row: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    fault: str | None = None
    cycles: int = 0
    """Decode cycles that emitted something."""
    drafted: list[int] = field(default_factory=list)
    """[j]: cycles in which draft j + 1 was up for acceptance."""
    accepted: list[int] = field(default_factory=list)
    """[j]: cycles in which draft j + 1 was accepted."""
    logprobs: Logprobs | None = None
    """Of all tokens, when the request asked."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt without its first token, when the request asked."""

    def add(self, result: RowResult) -> None:
        self.tokens.extend(result.tokens)
        self.finish = result.finish or self.finish
        self.fault = result.fault or self.fault
        self.logprobs = _joined(self.logprobs, result.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, result.prompt_logprobs)
        _count(self.drafted, result.drafted)
        _count(self.accepted, result.accepted)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.fault is not None


def generate(
    engine: Engine,
    requests: Sequence[tuple[Sequence[int], RowSpec]],
    *,
    depth: int | Depths = 0,
    limits: Limits | None = None,
    chunk: int | None = None,
    on_cycle: Callable[[int], None] | None = None,
) -> list[SoloResult]:
    """Generate for (prompt ids, spec) pairs together, in lockstep, until each has ended.

    `chunk` cuts prompts; `on_cycle` hears how many tokens each decode cycle emitted. Raises
    ValueError when the requests need more rows or pages than the engine has; rows are released in
    the end.
    """
    results = [SoloResult(row=next(row_ids)) for _ in requests]
    tables = _deal_pages(engine, requests)
    steps = itertools.count()
    try:
        for result, (prompt, spec), table in zip(results, requests, tables, strict=True):
            for piece in _chunks(result.row, prompt, spec, table, chunk or len(prompt)):
                _run(engine, StepPlan(step=next(steps), prefill=(piece,)), results)
        width = max(len(table) for table in tables)
        padded = [table + [0] * (width - len(table)) for table in tables]
        for cycle in itertools.count():
            active = [i for i, result in enumerate(results) if not result.ended]
            if not active:
                return results
            this_depth = depth if isinstance(depth, int) else depth(cycle)
            caps = {
                i: this_depth if limits is None else limits(cycle, i, this_depth) for i in active
            }
            caps = {i: cap if requests[i][1].speculative else 0 for i, cap in caps.items()}
            cohorts = [
                _cohort(
                    [results[i].row for i in members],
                    [padded[i] for i in members],
                    this_depth,
                    [caps[i] for i in members],
                )
                for members in _by_constraint(active, requests)
            ]
            plan = StepPlan(step=next(steps), decode=cohorts[0], guided=cohorts[1])
            before = sum(len(result.tokens) for result in results)
            for result in _run(engine, plan, results):
                result.cycles += 1
            if on_cycle is not None:
                on_cycle(sum(len(result.tokens) for result in results) - before)
    finally:
        _run(engine, StepPlan(step=next(steps), release=tuple(r.row for r in results)), results)
    return results


def _by_constraint(
    active: list[int], requests: Sequence[tuple[Sequence[int], RowSpec]]
) -> tuple[list[int], list[int]]:
    """Requests without a constraint, and those with one."""
    free = [i for i in active if requests[i][1].constraint is None]
    return free, [i for i in active if requests[i][1].constraint is not None]


def _cohort(
    rows: list[int], tables: list[list[int]], depth: int, limits: list[int]
) -> DecodeBatch | None:
    if not rows:
        return None
    pages = np.stack([page_array(table) for table in tables])
    return DecodeBatch(rows=tuple(rows), pages=pages, depth=depth, limits=tuple(limits))


def _run(engine: Engine, plan: StepPlan, results: list[SoloResult]) -> Iterable[SoloResult]:
    by_row = {result.row: result for result in results}
    engine.submit(plan)
    touched = []
    for row in engine.collect().rows:
        by_row[row.row].add(row)
        touched.append(by_row[row.row])
    return touched


def _chunks(
    row: int, prompt: Sequence[int], spec: RowSpec, table: list[int], size: int
) -> Iterable[PrefillChunk]:
    for start in range(0, len(prompt), size):
        piece = np.asarray(prompt[start : start + size], dtype=np.int32)
        yield PrefillChunk(
            row=row,
            tokens=piece,
            start=start,
            pages=page_array(table),
            last=start + size >= len(prompt),
            spec=spec if start == 0 else None,
        )


def _deal_pages(
    engine: Engine, requests: Sequence[tuple[Sequence[int], RowSpec]]
) -> list[list[int]]:
    info = engine.info
    if len(requests) > info.max_rows:
        raise ValueError(f"{len(requests)} requests, but the engine has {info.max_rows} rows")
    tables, used = [], 0
    for prompt, spec in requests:
        need = pages_needed(len(prompt) + spec.max_tokens, info.page_size)
        tables.append(list(range(used + 1, used + need + 1)))
        used += need
    if used > info.pages:
        raise ValueError(f"the requests need {used} pages, but the engine has {info.pages}")
    return tables


def _joined(before: Logprobs | None, new: Logprobs | None) -> Logprobs | None:
    if before is None or new is None:
        return before or new
    return Logprobs(
        chosen=before.chosen + new.chosen,
        top_ids=before.top_ids + new.top_ids,
        top=before.top + new.top,
    )


def _count(counts: list[int], reached: int) -> None:
    counts.extend([0] * (reached - len(counts)))
    for position in range(reached):
        counts[position] += 1
