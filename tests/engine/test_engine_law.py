"""The whole engine samples the target's law: drafts from its own head, on a vocabulary of 5."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine import cycle as cycle_module
from engine import sampling
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.solo import generate
from tests.engine import twin
from tests.engine.small import engine_over, small_model
from tests.engine.test_sampling import chi_square

VOCAB = 5
LENGTH = 3
PROMPT = [1, 4]
ROWS = 512
PARAMS = SamplingParams(temperature=25.0, top_k=4, draft_temperature=60.0)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model(4, vocab=VOCAB)


@pytest.fixture(scope="module")
def law(model: Qwen35Model) -> dict[tuple[int, ...], float]:
    """Law of the first three tokens, from the trunk's logits after every prefix."""
    total: dict[tuple[int, ...], float] = {}
    shaped: dict[tuple[int, ...], twin.Law] = {}
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            shaped[prefix] = twin.shape(
                _logits(model, [*PROMPT, *prefix]), PARAMS, PARAMS.temperature
            )
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        total[tokens] = float(np.prod([shaped[tokens[:i]][t] for i, t in enumerate(tokens)]))
    assert max(total.values()) < 0.2  # a peaked law would prove nothing
    return total


def _logits(model: Qwen35Model, tokens: list[int]) -> twin.Law:
    engine = engine_over(model)
    result = generate(engine, [(tokens, RowSpec(sampling=SamplingParams(), max_tokens=1))])
    assert len(result) == 1
    logits: twin.Law = engine.traces[0].logits[0].astype(np.float64)
    return logits


def _counts(model: Qwen35Model, depth: int, first_seed: int = 0) -> dict[tuple[int, ...], int]:
    counts: Counter[tuple[int, ...]] = Counter()
    rows = 128
    for start in range(first_seed, first_seed + ROWS, rows):
        engine = engine_over(model, max_rows=rows, pages=rows * 2, trace=False)
        requests = [
            (
                PROMPT,
                RowSpec(
                    sampling=SamplingParams(
                        temperature=PARAMS.temperature,
                        top_k=PARAMS.top_k,
                        draft_temperature=PARAMS.draft_temperature,
                        seed=start + i,
                    ),
                    max_tokens=LENGTH,
                ),
            )
            for i in range(rows)
        ]
        counts.update(tuple(r.tokens) for r in generate(engine, requests, depth=depth))
    return dict(counts)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_engines_law_is_the_targets(
    model: Qwen35Model, law: dict[tuple[int, ...], float], depth: int
) -> None:
    assert chi_square(_counts(model, depth), law) < 4.5


def test_a_biased_engine_is_seen(
    model: Qwen35Model, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepting a draft by a quarter of its right chance must show at this sample size."""
    right: Callable[..., object] = sampling.accept
    monkeypatch.setattr(
        cycle_module,
        "accept",
        lambda d, q, p, u, limits: right(d, q, p, mx.minimum(u * 4, 0.9999), limits),
    )
    assert chi_square(_counts(model, 3), law) > 6
