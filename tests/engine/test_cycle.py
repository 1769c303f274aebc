"""Greedy decoding: any depth, batch, join order and acceptance gives one row's own bits."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import cycle as cycle_module
from engine.blocks import Block
from engine.cache import RecurrentState, RecurrentTrail
from engine.models import delta
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import EngineFailedError, Finish, PrefillChunk, StepPlan
from engine.runner import MLXEngine
from engine.solo import SoloResult, generate
from tests.engine.small import OracleCycle, engine_over, greedy, prompts, small_model

TOKENS = 40
ROWS = 6
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def logits_of(engine: MLXEngine, result: SoloResult) -> Logits:
    """Target logits behind every emitted token of a row, [tokens, V]."""
    return np.concatenate([t.logits for t in engine.traces if t.row == result.row])


class Alone:
    """Each prompt by itself at depth 0: the truth everything else must reproduce."""

    def __init__(self, model: Qwen35Model) -> None:
        self.prompts = prompts(ROWS)
        self.tokens: list[list[int]] = []
        self.logits: list[Logits] = []
        for seed, prompt in enumerate(self.prompts):
            engine = engine_over(model)
            result = generate(engine, [(prompt, greedy(TOKENS, seed=seed))])[0]
            self.tokens.append(result.tokens)
            self.logits.append(logits_of(engine, result))

    def oracle(self, engine: MLXEngine, spoil: float, seed: int) -> None:
        whole = {i: p + t for i, (p, t) in enumerate(zip(self.prompts, self.tokens, strict=True))}
        OracleCycle.install(engine, whole, spoil=spoil, seed=seed)

    def check(
        self, model: Qwen35Model, depth: int | Callable[[int], int], spoil: float, seed: int = 0
    ) -> list[SoloResult]:
        """All rows together with oracle drafts; raises AssertionError unless bits agree."""
        engine = engine_over(model)
        self.oracle(engine, spoil, seed)
        rng = np.random.default_rng(seed)
        requests = [(p, greedy(TOKENS, seed=i)) for i, p in enumerate(self.prompts)]
        results = generate(
            engine,
            requests,
            depth=depth,
            limits=lambda _cycle, _row, d: int(rng.integers(d // 2, d + 1)),
        )
        for i, result in enumerate(results):
            assert result.tokens == self.tokens[i]
            assert np.array_equal(logits_of(engine, result), self.logits[i])
        return results


@pytest.fixture(scope="module")
def alone(model: Qwen35Model) -> Alone:
    return Alone(model)


@pytest.mark.parametrize("depth", range(9))
def test_a_batch_at_any_depth_gives_each_row_its_own_bits(
    model: Qwen35Model, alone: Alone, depth: int
) -> None:
    results = alone.check(model, depth, spoil=0.3, seed=depth)
    if depth:
        assert sum(sum(r.accepted) for r in results) > TOKENS
        assert any(sum(r.accepted) < sum(r.drafted) for r in results)


@pytest.mark.parametrize("spoil", [0.0, 0.1, 0.7, 1.0])
def test_any_acceptance_pattern_and_changing_depth(
    model: Qwen35Model, alone: Alone, spoil: float
) -> None:
    alone.check(model, lambda cycle: (3, 0, 0, 5, 1, 8, 0, 2)[cycle % 8], spoil=spoil, seed=7)


def test_own_drafts_change_nothing(model: Qwen35Model, alone: Alone) -> None:
    engine = engine_over(model)
    requests = [(p, greedy(TOKENS, seed=i)) for i, p in enumerate(alone.prompts)]
    for i, result in enumerate(generate(engine, requests, depth=4)):
        assert result.tokens == alone.tokens[i]


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prefill_chunks_change_nothing(model: Qwen35Model, alone: Alone, chunk: int) -> None:
    engine = engine_over(model)
    alone.oracle(engine, 0.2, 1)
    requests = [(p, greedy(TOKENS, seed=i)) for i, p in enumerate(alone.prompts)]
    for i, result in enumerate(generate(engine, requests, depth=3, chunk=chunk)):
        assert result.tokens == alone.tokens[i]
        assert np.array_equal(logits_of(engine, result), alone.logits[i])


def test_join_order_pauses_and_cohorts_change_nothing(model: Qwen35Model, alone: Alone) -> None:
    """Rows join late, sit out cycles and change places; every row still gets its own bits."""
    from tests.engine.driver import Driver

    rng = np.random.default_rng(5)
    engine = engine_over(model)
    alone.oracle(engine, 0.25, 2)
    driver = Driver(engine)
    waiting = list(rng.permutation(ROWS))
    while waiting or driver.active:
        if waiting and (not driver.active or rng.random() < 0.3):
            i = int(waiting.pop())
            driver.join(i, alone.prompts[i], greedy(TOKENS, seed=i))
        cohort = [row for row in rng.permutation(driver.active) if rng.random() < 0.8]
        if cohort:
            driver.decode([int(row) for row in cohort], depth=int(rng.integers(0, 6)))
    for i in range(ROWS):
        assert driver.results[i].tokens == alone.tokens[i]
        kept = [t.logits for t in engine.traces if t.row == i]
        assert np.array_equal(np.concatenate(kept), alone.logits[i])


def _no_rollback(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    return delta.keep_all(trail)


def _one_count_for_all(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    return delta.keep_prefix(trail, mx.broadcast_to(count.max(), count.shape))


def _conv_not_rolled_back(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    right = delta.keep_prefix(trail, count)
    return RecurrentState(conv=delta.keep_all(trail).conv, memory=right.memory)


def _memory_not_rolled_back(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    right = delta.keep_prefix(trail, count)
    return RecurrentState(conv=right.conv, memory=delta.keep_all(trail).memory)


def _one_short(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    return delta.keep_prefix(trail, mx.maximum(count - 1, 0))


@pytest.mark.parametrize(
    "fault",
    [
        _no_rollback,
        _one_count_for_all,
        _conv_not_rolled_back,
        _memory_not_rolled_back,
        _one_short,
    ],
)
def test_planted_rollback_faults_are_seen(
    model: Qwen35Model,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[RecurrentTrail, mx.array], RecurrentState],
) -> None:
    monkeypatch.setattr(cycle_module, "keep_prefix", fault)
    with pytest.raises(AssertionError):
        alone.check(model, 3, spoil=0.3, seed=3)


@pytest.fixture
def off_by_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from engine.cache import Window, window

    def shifted(start: mx.array, width: int, table: mx.array, page_size: int) -> Window:
        where = window(start, width, table, page_size)
        mask = mx.pad(where.mask[..., :-1], [(0, 0), (0, 0), (0, 0), (1, 0)], constant_values=True)
        return replace(where, mask=mask)

    monkeypatch.setattr(cycle_module, "window", shifted)


@pytest.mark.usefixtures("off_by_one_mask")
def test_a_mask_off_by_one_is_seen(model: Qwen35Model, alone: Alone) -> None:
    with pytest.raises(AssertionError):
        alone.check(model, 3, spoil=0.3, seed=3)


def test_replay_equals_picking(model: Qwen35Model) -> None:
    """The two ways to keep a prefix agree bit for bit, for every count."""
    mixer = model.model.layers[0].linear_attn
    x = mx.random.normal((5 * 6, 64), key=mx.random.key(1))
    state = mixer.zero_state(5, mx.float32)
    _, warm = mixer(x, Block(5, 6), state, keep=False)
    _, trail = mixer(x * 0.7, Block(5, 6), delta.keep_all(warm), keep=True)
    count = mx.array([0, 1, 3, 5, 6])
    kept = delta.keep_prefix(trail, count)
    assert mx.array_equal(kept.memory, delta.replay(trail, count))
    assert mx.array_equal(kept.memory[0], trail.before.memory[0])
    assert trail.last is not None
    assert mx.array_equal(kept.memory[4], trail.last[0, 4])


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_stop_tokens_end_a_burst_where_they_stand(
    model: Qwen35Model, alone: Alone, depth: int
) -> None:
    for i, prompt in enumerate(alone.prompts):
        expected = alone.tokens[i]
        stop = expected[TOKENS // 2]
        cut = expected.index(stop) + 1
        engine = engine_over(model)
        alone.oracle(engine, 0.0, 0)
        spec = greedy(TOKENS, stop_ids=(95, stop), seed=i)
        result = generate(engine, [(prompt, spec)], depth=depth)[0]
        stops_at = min(cut, expected.index(95) + 1 if 95 in expected else cut)
        assert result.tokens == expected[:stops_at]
        assert result.finish is Finish.STOP


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_tokens_is_never_crossed(model: Qwen35Model, alone: Alone, limit: int) -> None:
    engine = engine_over(model)
    alone.oracle(engine, 0.0, 0)
    requests = [(p, greedy(limit, seed=i)) for i, p in enumerate(alone.prompts)]
    for i, result in enumerate(generate(engine, requests, depth=5)):
        assert result.tokens == alone.tokens[i][:limit]
        assert result.finish is Finish.LENGTH


def test_a_finished_row_costs_nothing_and_says_nothing(model: Qwen35Model, alone: Alone) -> None:
    from tests.engine.driver import Driver

    engine = engine_over(model)
    driver = Driver(engine)
    driver.join(0, alone.prompts[2], greedy(2, seed=2))
    driver.join(1, alone.prompts[3], greedy(TOKENS, seed=3))
    for _ in range(6):
        driver.decode([0, 1], depth=2, even_finished=True)
    assert driver.results[0].tokens == alone.tokens[2][:2]
    assert driver.results[1].tokens == alone.tokens[3][: len(driver.results[1].tokens)]
    assert len(driver.results[1].tokens) >= 7


def test_two_steps_in_flight_give_the_same_bits(model: Qwen35Model, alone: Alone) -> None:
    from tests.engine.driver import Driver

    engine = engine_over(model)
    alone.oracle(engine, 0.3, 4)
    driver = Driver(engine, in_flight=2)
    for i, prompt in enumerate(alone.prompts):
        driver.join(i, prompt, greedy(TOKENS, seed=i))
    for cycle in range(2 * TOKENS):
        driver.decode(list(range(ROWS)), depth=cycle % 4, even_finished=True)
    driver.drain()
    for i in range(ROWS):
        assert driver.results[i].tokens == alone.tokens[i]


def test_a_row_with_bad_numbers_ends_alone(model: Qwen35Model, alone: Alone) -> None:
    """NaN in one row faults that row; neighbours and the next owner of its pages are untouched."""
    from tests.engine.driver import Driver

    poisoned = small_model()
    bad = 77
    rows = [i for i in range(ROWS) if bad not in alone.prompts[i] + alone.tokens[i]][:2]
    poisoned.model.embed_tokens.weight[bad] = float("nan")
    engine = engine_over(poisoned)

    def unpoison(logits: mx.array) -> mx.array:
        # The tied head shares the poisoned embedding; only the input side is under test.
        return mx.where(mx.arange(96) == bad, -1e9, logits)

    head = type(poisoned).head
    poisoned_head = poisoned.head
    assert head is not None
    object.__setattr__(poisoned, "head", lambda h: unpoison(poisoned_head(h)))
    driver = Driver(engine)
    driver.join(rows[0], alone.prompts[rows[0]], greedy(TOKENS, seed=0))
    driver.join(50, [3, bad, 4], greedy(TOKENS, seed=1))
    assert driver.results[50].fault is not None
    assert driver.results[50].tokens == []
    freed = driver.release(50)
    driver.join(rows[1], alone.prompts[rows[1]], greedy(TOKENS, seed=2), pages=freed)
    while driver.active:
        driver.decode(driver.active, depth=2)
    for i in rows:
        assert driver.results[i].fault is None
        assert driver.results[i].tokens == alone.tokens[i]


def test_a_plan_that_breaks_the_contract_has_no_effect(model: Qwen35Model) -> None:
    from tests.engine.driver import Driver

    engine = engine_over(model)
    driver = Driver(engine)
    twice = PrefillChunk(
        row=0,
        tokens=np.array([1, 2], np.int32),
        start=0,
        pages=np.array([1], np.int32),
        last=False,
        spec=greedy(4),
    )
    with pytest.raises(ValueError, match="one chunk per row"):
        engine.submit(StepPlan(step=0, prefill=(twice, twice)))
    driver.join(0, [1, 2], greedy(4))
    assert len(driver.results[0].tokens) == 1


def test_an_engine_whose_device_fails_says_so(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.driver import Driver

    def broken(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    driver = Driver(engine_over(model))
    monkeypatch.setattr(mx, "async_eval", broken)
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="Unable to allocate"):
            driver.join(0, [1, 2], greedy(4))


def test_release_is_idempotent_and_forgets(model: Qwen35Model) -> None:
    from tests.engine.driver import Driver

    engine = engine_over(model, max_rows=2)
    driver = Driver(engine)
    driver.join(0, [1, 2], greedy(9))
    driver.join(1, [3], greedy(9))
    with pytest.raises(ValueError, match="max_rows"):
        driver.join(2, [4], greedy(9))
    driver.release(0)
    engine.submit(StepPlan(step=99, release=(0, 12345)))
    engine.collect()
    driver.join(3, [4], greedy(9))
    with pytest.raises(ValueError, match="prefilled"):
        driver.decode([0], depth=0, even_finished=True)
