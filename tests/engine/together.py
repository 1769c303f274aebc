"""Rows of every kind, prefilled in shared passes or one by one, for tests of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engine.models.qwen3_5 import Qwen35Model
from engine.plan import Logprobs, RowSpec, SamplingParams
from engine.prefill import Prefill
from tests.engine import slow
from tests.engine.host import Bits, Host, bits, sampled
from tests.engine.small import engine_over

TOKENS = 7
DEPTH = 2
VOCAB = 96
LONGEST = 21


def text(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, VOCAB, length)]


@dataclass
class Job:
    """A row to prefill."""

    row: int
    prompt: list[int]
    spec: RowSpec
    saves: dict[int, int] = field(default_factory=dict)
    restore: int | None = None
    cuts: tuple[int, ...] = ()


def spec_of(row: int, kind: int) -> RowSpec:
    """One of everything."""
    plain = SamplingParams(temperature=3.0, seed=row)
    return (
        sampled(TOKENS, row),
        RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=TOKENS, logprobs=3),
        RowSpec(
            sampling=replace(plain, repetition_penalty=1.4, frequency_penalty=0.7),
            max_tokens=TOKENS,
            output_start=kind % 9,
        ),
        RowSpec(sampling=replace(plain, coupled=True, top_k=9), max_tokens=TOKENS),
        RowSpec(
            sampling=replace(plain, logit_bias=((5, 4.0),), top_p=0.9),
            max_tokens=TOKENS,
            min_tokens=3,
            stop_ids=(5, 6),
        ),
        sampled(TOKENS, row, speculative=False),
        sampled(1, row),
        sampled(TOKENS, row, constraint=slow.Pattern(VOCAB, 3, None, 7)),
    )[kind % 8]


def jobs(seed: int, rows: int) -> tuple[list[Job], list[Job]]:
    """Two rounds: fresh rows, two of which save a boundary, and rows of which some restore one."""
    rng = np.random.default_rng(seed)

    def cuts(start: int, length: int) -> tuple[int, ...]:
        return tuple(int(c) for c in rng.integers(start, length, 3) if rng.random() < 0.4)

    first, second = [], []
    for row in range(1, rows + 1):
        length = int(rng.integers(1, LONGEST))
        spec = spec_of(row, row + seed)
        if rng.random() < 0.3:
            spec = replace(spec, prompt_logprobs=int(rng.integers(0, 3)))
        if row <= 2:
            length = int(rng.integers(5, LONGEST))
            spec = sampled(TOKENS, row)
        saves = {int(rng.integers(1, length + 1)): row} if row <= 2 else {}
        first.append(Job(row, text(length, row), spec, saves, None, cuts(0, length)))
    for row in range(rows + 1, 2 * rows + 1):
        job = Job(row, text(int(rng.integers(1, LONGEST)), row), spec_of(row, row + seed))
        if row % 2:
            owner = first[int(rng.integers(2))]
            (point,) = owner.saves
            job.restore = owner.saves[point]
            job.prompt = owner.prompt[:point] + job.prompt
        job.cuts = cuts(len(job.prompt) // 2, len(job.prompt) + 1)
        second.append(job)
    return first, second


Found = dict[int, tuple[Bits, Logprobs | None, Logprobs | None, str | None]]


def prefill(host: Host, round_: Sequence[Job], *, together: bool) -> None:
    """One chunk of every row per step, or of one row."""
    pieces = [
        host.pieces(j.row, j.prompt, j.spec, saves=j.saves, restore=j.restore, cuts=j.cuts)
        for j in round_
    ]
    while any(pieces):
        step = [of_row.pop(0) for of_row in pieces if of_row]
        for part in [step] if together else [[piece] for piece in step]:
            host.prefill(*part)


def run(
    model: Qwen35Model, seed: int, *, together: bool, rows: int = 6, **options: Any
) -> tuple[Found, Host]:
    """Both rounds, decoded to their ends in one cohort."""
    host = Host(engine_over(model, boundaries=8, pages=200, **options))
    rounds = jobs(seed, rows)
    for round_ in rounds:
        prefill(host, round_, together=together)
    everybody = [job.row for round_ in rounds for job in round_]
    host.finish(*everybody, depth=DEPTH)
    found = {}
    for round_ in rounds:
        for job in round_:
            result = host.results[job.row]
            own = bits(host, job.row)
            if not job.spec.speculative:
                own = replace(own, mtp=own.mtp[:, :0])
            found[job.row] = (own, result.logprobs, result.prompt_logprobs, result.fault)
    return found, host


def check(found: Found, true: Found) -> None:
    assert found.keys() == true.keys()
    for row, (own, *rest) in found.items():
        assert own.same(true[row][0]), f"row {row}"
        assert tuple(rest) == true[row][1:], f"row {row}"


class Trues:
    """What each seed's rows are when their chunks run one by one."""

    def __init__(self, model: Qwen35Model) -> None:
        self.model = model
        self._known: dict[int, Found] = {}

    def __call__(self, seed: int) -> Found:
        if seed not in self._known:
            self._known[seed] = run(self.model, seed, together=False)[0]
        return self._known[seed]


def count_passes(patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass from now on."""
    seen: list[int] = []
    right = Prefill.chunks

    def counting(self: Prefill, rows: Any, chunks: Any) -> Any:
        seen.append(len(rows))
        return right(self, rows, chunks)

    patch.setattr(Prefill, "chunks", counting)
    return seen
