"""Every sampling feature at once, in random mixes, against the slow decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.solo import SoloResult, generate
from tests.engine import slow
from tests.engine.small import OracleCycle, engine_over, small_model

VOCAB = 96
LENGTH = 10


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model(2)


@dataclass(frozen=True)
class Request:
    """A row, and how to make its constraint afresh."""

    prompt: list[int]
    spec: RowSpec
    form: tuple[int, int | None] | None

    def constraint(self) -> slow.Pattern | None:
        return None if self.form is None else slow.Pattern(VOCAB, *self.form, end=7)

    def ready(self) -> tuple[list[int], RowSpec]:
        return self.prompt, replace(self.spec, constraint=self.constraint())


@st.composite
def requests(draw: st.DrawFn, seed: int) -> Request:
    mode = draw(st.sampled_from(["greedy", "coupled", "coupled", "rejection"]))
    sampling = SamplingParams(
        temperature=0.0 if mode == "greedy" else draw(st.sampled_from([0.5, 1.0, 4.0])),
        coupled=mode == "coupled",
        top_k=draw(st.sampled_from([0, 0, 5, 20])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        seed=(seed << 33) + draw(st.integers(0, 50)),
        draft_temperature=draw(st.sampled_from([None, None, 0.0, 2.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 2.0, -0.5])),
        logit_bias=draw(st.sampled_from([(), (), ((3, 4.0), (90, 6.5)), ((7, 9.0), (5, -100.0))])),
    )
    stops = draw(st.sampled_from([(), (7,), (7, 3), tuple(range(0, 96, 5))]))
    form = draw(st.sampled_from([None, None, (3, None), (2, 4), (1, 6)]))
    if form is not None and form[1] is not None:
        stops = (7,)
    most = draw(st.integers(1, LENGTH))
    return Request(
        prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7)),
        spec=RowSpec(
            sampling=sampling,
            max_tokens=most,
            stop_ids=stops,
            min_tokens=draw(st.integers(0, most)),
            logprobs=draw(st.sampled_from([None, None, 0, 1, 5])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        ),
        form=form,
    )


@st.composite
def cohorts(draw: st.DrawFn) -> list[Request]:
    return [draw(requests(seed=i + 1)) for i in range(draw(st.integers(1, 4)))]


def run(
    model: Qwen35Model,
    rows: list[Request],
    depths: list[int],
    *,
    chunk: int = 3,
    seed: int = 0,
    oracle: bool = True,
) -> list[SoloResult]:
    """The rows together. Drafts come from a run at depth 0, so that many are accepted."""
    engine = engine_over(model, trace=False)
    if oracle:
        plain = generate(engine_over(model, trace=False), [row.ready() for row in rows])
        whole = {
            row.spec.sampling.seed: row.prompt + result.tokens
            for row, result in zip(rows, plain, strict=True)
        }
        OracleCycle.install(engine, whole, spoil=0.15, seed=seed)
    rng = np.random.default_rng(seed)
    return generate(
        engine,
        [row.ready() for row in rows],
        depth=lambda cycle: depths[cycle % len(depths)],
        limits=lambda _cycle, _row, depth: int(rng.integers(depth // 2, depth + 1)),
        chunk=chunk,
    )


def judge_all(
    model: Qwen35Model, rows: list[Request], results: list[SoloResult]
) -> list[slow.Verdict]:
    return [
        slow.judge(model, row.prompt, row.spec, result, row.constraint())
        for row, result in zip(rows, results, strict=True)
    ]


RANKS: list[tuple[float, float]] = []
COMPARED: list[int] = []


@given(
    rows=cohorts(),
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    chunk=st.integers(1, 8),
    oracle=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def _random_mixes(
    model: Qwen35Model, rows: list[Request], depths: list[int], chunk: int, oracle: bool, seed: int
) -> None:
    results = run(model, rows, depths, chunk=chunk, seed=seed, oracle=oracle)
    for verdict in judge_all(model, rows, results):
        COMPARED.append(verdict.compared)
        RANKS.extend(verdict.ranks)


def test_random_mixes_agree_with_the_slow_decoder(model: Qwen35Model) -> None:
    RANKS.clear()
    COMPARED.clear()
    _random_mixes(model)
    assert sum(COMPARED) > 150
    assert len(RANKS) > 60
    assert slow.pit_excess(RANKS) < 4.5
