"""Coupled rows: one seed, one text, at every depth and in any company; and the target's law."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import choice as choice_module
from engine import cycle as cycle_module
from engine import prefill as prefill_module
from engine.models.qwen3_5 import Qwen35Model
from engine.noise import coupled_key, exponentials, row_key, uniforms
from engine.plan import RowSpec, SamplingParams
from engine.rows import RowStatics, make_statics
from engine.runner import MLXEngine
from engine.sampling import race
from engine.solo import SoloResult, generate
from tests.engine import slow, twin
from tests.engine.driver import Driver
from tests.engine.small import OracleCycle, engine_over, prompts, small_model
from tests.engine.test_sampling import chi_square

TOKENS = 24
ROWS = 6
PARAMS = [
    SamplingParams(temperature=1.0, coupled=True),
    SamplingParams(temperature=3.0, coupled=True, top_k=20),
    SamplingParams(temperature=6.0, coupled=True, top_p=0.9, draft_temperature=0.0),
    SamplingParams(temperature=2.0, coupled=True, min_p=0.01, draft_temperature=5.0),
    SamplingParams(temperature=9.0, coupled=True),
    SamplingParams(temperature=0.0, coupled=True),
]


def spec(i: int, **changes: Any) -> RowSpec:
    return RowSpec(sampling=replace(PARAMS[i], seed=100 + i, **changes), max_tokens=TOKENS)


class Alone:
    """Each row by itself at depth 0: what every other way to run it must give, bit for bit."""

    def __init__(self, model: Qwen35Model) -> None:
        self.prompts = prompts(ROWS)
        self.tokens: list[list[int]] = []
        self.logits: list[NDArray[np.float32]] = []
        for i, prompt in enumerate(self.prompts):
            engine = engine_over(model)
            result = generate(engine, [(prompt, spec(i))])[0]
            self.tokens.append(result.tokens)
            self.logits.append(logits_of(engine, result.row))

    def engine(self, model: Qwen35Model, spoil: float, seed: int) -> MLXEngine:
        engine = engine_over(model)
        whole = {100 + i: p + self.tokens[i] for i, p in enumerate(self.prompts)}
        OracleCycle.install(engine, whole, spoil=spoil, seed=seed)
        return engine

    def check(
        self,
        model: Qwen35Model,
        depth: int | Callable[[int], int],
        *,
        seed: int = 0,
        chunk: int | None = None,
    ) -> list[SoloResult]:
        """All rows together, drafts mostly right; AssertionError unless bits agree."""
        engine = self.engine(model, 0.3, seed)
        rng = np.random.default_rng(seed)
        results = generate(
            engine,
            [(prompt, spec(i)) for i, prompt in enumerate(self.prompts)],
            depth=depth,
            limits=lambda _cycle, _row, d: int(rng.integers(d // 2, d + 1)),
            chunk=chunk,
        )
        for i, result in enumerate(results):
            assert result.tokens == self.tokens[i]
            assert np.array_equal(logits_of(engine, result.row), self.logits[i])
        return results


def logits_of(engine: MLXEngine, row: int) -> NDArray[np.float32]:
    return np.concatenate([t.logits for t in engine.traces if t.row == row])


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


@pytest.fixture(scope="module")
def alone(model: Qwen35Model) -> Alone:
    return Alone(model)


@pytest.mark.parametrize("vocab", [1, 2, 7, 96])
def test_the_devices_noise_is_the_generators(vocab: int) -> None:
    """Small numbers, which win races, to a part in a million; large ones as u near 1 allows."""
    for seed, position in ((0, 0), (2**63 + 5, 70), (2**64 - 1, 2**31 - 1)):
        keys = mx.array([coupled_key(seed)], mx.uint32)
        found = np.array(exponentials(keys, mx.array([[position]]), vocab))[0, 0]
        right = slow.exponentials(seed, position, vocab)
        assert (np.abs(found - right) < 1e-6 * right + 2.0**-23 * np.exp(right)).all()


def test_the_noise_depends_on_seed_position_and_token_only() -> None:
    keys = mx.array([coupled_key(seed) for seed in (11, 12, 13)], mx.uint32)
    whole = exponentials(keys, mx.array([[4, 5, 6, 7]] * 3), 50)
    assert mx.array_equal(whole[1:2, 2:3], exponentials(keys[1:2], mx.array([[6]]), 50))
    assert len(np.unique(np.array(whole))) == whole.size


def test_the_noise_is_exponential_also_where_it_is_tiny() -> None:
    keys = mx.array([coupled_key(seed) for seed in range(64)], mx.uint32)
    places = mx.broadcast_to(mx.arange(8)[None], (64, 8))
    noise = np.array(exponentials(keys, places, 8192)).ravel().astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.min() > 0
    counts = np.histogram(-np.expm1(-noise), bins=40, range=(0, 1))[0]
    mean = len(noise) / 40
    assert ((counts - mean) ** 2 / mean).sum() < 72.1  # 99.9 % quantile, 39 degrees of freedom
    for edge in (1e-3, 1e-4, 1e-5):
        expected = len(noise) * edge
        assert abs((noise < edge).sum() - expected) < 4 * np.sqrt(expected)
    # 24 bits of u would put all of these on a grid of 2^-24.
    steps = noise[noise < 1e-5] * 2.0**24
    assert (np.abs(steps - np.round(steps)) > 0.05).mean() > 0.5


def test_it_is_independent_of_the_other_draws() -> None:
    seeds = range(300)
    places = mx.broadcast_to(mx.arange(60)[None], (300, 60))
    raced = np.array(exponentials(mx.array([coupled_key(s) for s in seeds], mx.uint32), places, 4))
    drawn = np.array(uniforms(mx.array([row_key(s) for s in seeds], mx.uint32), places))
    both = np.concatenate([raced.reshape(-1, 4), drawn.reshape(-1, 4)], axis=1)
    assert np.abs(np.corrcoef(both.T) - np.eye(8)).max() < 0.03


def test_a_race_is_won_by_law() -> None:
    """χ² of one position over many seeds, with a rare token and an impossible one."""
    law = np.array([0.5, 0.25, 0.15, 0.0975, 0.0, 0.0025])
    rows = 40000
    keys = mx.array([coupled_key(seed) for seed in range(rows)], mx.uint32)
    noise = exponentials(keys, mx.full((rows, 1), 17, mx.int32), len(law))
    winners = np.array(race(mx.array(law.astype(np.float32)), noise))[:, 0]
    masses: dict[tuple[int, ...], float] = {(t,): float(m) for t, m in enumerate(law)}
    assert chi_square(_tally(winners), masses) < 4.5
    # Squared noise is Weibull, not exponential: the race has a winner, by another law.
    winners = np.array(race(mx.array(law.astype(np.float32)), noise * noise))[:, 0]
    assert chi_square(_tally(winners), masses) > 20


def _tally(winners: NDArray[np.int32]) -> dict[tuple[int, ...], int]:
    return {(t,): int((winners == t).sum()) for t in range(6)}


def test_a_race_with_one_noise_agrees_as_often_as_promised() -> None:
    """At least (1 - TV) / (1 + TV) of the time (Daliri et al. 2024), at most 1 - TV."""
    rng = np.random.default_rng(3)
    vocab, rows = 40, 20000
    base = rng.normal(0, 1, vocab)
    p, q = (np.exp(base + rng.normal(0, 0.3, vocab)) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    distance = np.abs(p - q).sum() / 2
    keys = mx.array([coupled_key(seed) for seed in range(rows)], mx.uint32)
    noise = exponentials(keys, mx.full((rows, 2), 5, mx.int32) + mx.arange(2), vocab)
    laws = [mx.array(law.astype(np.float32)) for law in (p, q)]

    def agreement(first: int, second: int) -> float:
        same = race(laws[0], noise[:, first]) == race(laws[1], noise[:, second])
        return float(np.array(same).mean())

    slack = 3 * np.sqrt(0.25 / rows)
    assert 0.1 < distance < 0.3
    assert (1 - distance) / (1 + distance) - slack < agreement(0, 0) < 1 - distance + slack
    assert agreement(0, 1) < (1 - distance) / (1 + distance) - 0.2


def test_only_coupled_sampled_rows_make_noise_of_a_vocabulary() -> None:
    def made(*rows: SamplingParams) -> tuple[bool, bool]:
        statics = make_statics([RowSpec(sampling=row, max_tokens=1) for row in rows], 9)
        noise = choice_module.make_noise(statics, mx.zeros((len(rows), 1), mx.int32), 9)
        if noise is None:
            return False, False
        return noise.uniform is not None, noise.exponential is not None

    cold, raced, plain = PARAMS[5], PARAMS[0], SamplingParams()
    assert made(cold, SamplingParams(temperature=0.0)) == (False, False)
    assert made(cold, plain) == (True, False)
    assert made(cold, raced) == (False, True)
    assert made(raced, plain) == (True, True)


@pytest.mark.parametrize("depth", range(9))
def test_the_same_seed_gives_the_same_bits_at_every_depth(
    model: Qwen35Model, alone: Alone, depth: int
) -> None:
    results = alone.check(model, depth, seed=depth)
    if depth:
        assert sum(sum(r.accepted) for r in results) > TOKENS


@pytest.mark.parametrize("chunk", [1, 4])
def test_changing_depths_limits_and_chunks_change_nothing(
    model: Qwen35Model, alone: Alone, chunk: int
) -> None:
    alone.check(model, lambda cycle: (3, 0, 0, 5, 1, 8, 0, 2)[cycle % 8], seed=chunk, chunk=chunk)


def test_own_drafts_change_nothing(model: Qwen35Model, alone: Alone) -> None:
    requests = [(p, spec(i)) for i, p in enumerate(alone.prompts)]
    for i, result in enumerate(generate(engine_over(model, trace=False), requests, depth=4)):
        assert result.tokens == alone.tokens[i]


def test_a_mixed_cohort_in_any_order_leaves_every_row_alone(
    model: Qwen35Model, alone: Alone
) -> None:
    """Coupled, greedy and rejection rows join late, pause and change places."""
    plain = [
        SamplingParams(temperature=0.0, seed=1),
        SamplingParams(temperature=3.0, seed=2),
        SamplingParams(temperature=2.0, seed=3, top_k=9, top_p=0.8, draft_temperature=4.0),
    ]
    engine = alone.engine(model, 0.25, 2)
    driver = Driver(engine)
    rng = np.random.default_rng(5)
    waiting = [int(i) for i in rng.permutation(ROWS + len(plain))]
    while waiting or driver.active:
        if waiting and rng.random() < 0.4:
            row = waiting.pop()
            if row < ROWS:
                driver.join(row, alone.prompts[row], spec(row))
            else:
                driver.join(row, [row], RowSpec(sampling=plain[row - ROWS], max_tokens=TOKENS))
        rows = [row for row in driver.active if rng.random() < 0.8]
        rng.shuffle(rows)
        driver.decode(rows, depth=int(rng.integers(0, 7)))
    for row in range(ROWS):
        assert driver.results[row].tokens == alone.tokens[row]
        assert np.array_equal(logits_of(engine, row), alone.logits[row])


@pytest.mark.parametrize("depth", [0, 3])
def test_rejection_and_greedy_rows_keep_their_bits_beside_coupled_ones(
    model: Qwen35Model, depth: int
) -> None:
    """A rejection row's bits depend on the depths it ran at, but on no neighbour's mode or cuts."""
    plain = [
        SamplingParams(temperature=0.0, seed=1),
        SamplingParams(temperature=2.5, seed=2),
        SamplingParams(temperature=2.0, seed=3, top_k=9, top_p=0.8, draft_temperature=4.0),
    ]
    requests = [([7, 3 + i], RowSpec(sampling=p, max_tokens=16)) for i, p in enumerate(plain)]
    both = [*requests, *(([5, i], spec(i)) for i in range(4))]
    together, apart = engine_over(model), engine_over(model)
    for i, result in enumerate(generate(together, both, depth=depth)[: len(plain)]):
        single = generate(apart, [requests[i]], depth=depth)[0]
        assert result.tokens == single.tokens
        assert np.array_equal(logits_of(together, result.row), logits_of(apart, single.row))


def _keyed_by(change: Callable[[mx.array], mx.array]) -> Callable[..., Any]:
    def make(statics: RowStatics, positions: mx.array, vocab: int) -> Any:
        return choice_module.make_noise(statics, change(positions), vocab)

    return make


def _column(positions: mx.array) -> mx.array:
    return mx.broadcast_to(mx.arange(positions.shape[1])[None], positions.shape)


def _depth(positions: mx.array) -> mx.array:
    return positions * 16 + positions.shape[1]


def _place_in_batch(positions: mx.array) -> mx.array:
    return positions + mx.arange(positions.shape[0])[:, None]


@pytest.mark.parametrize(
    ("where", "change"),
    [
        (cycle_module, _column),
        (cycle_module, _depth),
        (cycle_module, _place_in_batch),
        (prefill_module, _column),
        (prefill_module, _depth),
    ],
)
def test_noise_of_the_wrong_key_is_seen(
    model: Qwen35Model,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    change: Callable[[mx.array], mx.array],
) -> None:
    monkeypatch.setattr(where, "make_noise", _keyed_by(change))
    with pytest.raises(AssertionError):
        alone.check(model, 3, seed=1)


VOCAB, SHORT = 5, 3
LAW = SamplingParams(temperature=25.0, top_k=4, draft_temperature=60.0, coupled=True)


def _engine_law(model: Qwen35Model, depth: int) -> Counter[tuple[int, ...]]:
    rows, counts = 128, Counter[tuple[int, ...]]()
    for start in range(0, 4 * rows, rows):
        engine = engine_over(model, max_rows=rows, pages=2 * rows, trace=False)
        requests = [
            ([1, 4], RowSpec(sampling=replace(LAW, seed=start + i), max_tokens=SHORT))
            for i in range(rows)
        ]
        counts.update(tuple(r.tokens) for r in generate(engine, requests, depth=depth))
    return counts


def test_the_engines_law_is_the_targets() -> None:
    """Against the enumerated law of three tokens."""
    model = small_model(4, vocab=VOCAB)
    law: dict[tuple[int, ...], float] = {}
    after: dict[tuple[int, ...], twin.Law] = {}
    for length in range(SHORT):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            trunk = slow.Trunk(model, 8)
            logits = [trunk.feed(token) for token in (1, 4, *prefix)][-1]
            after[prefix] = twin.shape(logits, LAW, LAW.temperature)
    for tokens in itertools.product(range(VOCAB), repeat=SHORT):
        law[tokens] = float(np.prod([after[tokens[:i]][t] for i, t in enumerate(tokens)]))
    assert chi_square(dict(_engine_law(model, 3)), law) < 4.5
