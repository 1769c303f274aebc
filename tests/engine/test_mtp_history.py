"""The MTP cache holds what a teacher-forced pass would, however the row got there."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import PagePool, page_table, slot_window, window
from engine.cycle import PENDING_LIMIT
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.runner import MLXEngine
from tests.engine.driver import Driver
from tests.engine.small import PAGE_SIZE, OracleCycle, engine_over, greedy, prompts, small_model


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def _teacher_forced(model: Qwen35Model, tokens: list[int], slots: int) -> mx.array:
    """Keys of slots 0 … slots - 1 from one pass over the known sequence."""
    pages = -(-len(tokens) // PAGE_SIZE)

    def pool() -> PagePool:
        return PagePool(pages=pages, page_size=PAGE_SIZE, heads=2, head_dim=32, dtype=mx.float32)

    table = page_table(np.arange(1, pages + 1, dtype=np.int32)[None])
    pools, head = [pool() for _ in range(model.attention_layers)], pool()
    where = window(mx.array([0]), slots, table, PAGE_SIZE)
    states = model.zero_states(1)
    hidden, _ = model.trunk(mx.array([tokens[:slots]]), where, pools, states)
    where = slot_window(mx.array([0]), slots, table, PAGE_SIZE)
    model.mtp_exact(hidden, mx.array([tokens[1 : slots + 1]]), where, head)
    return _rows(head, list(range(1, pages + 1)), slots)


def _rows(pool: PagePool, pages: list[int], slots: int) -> mx.array:
    """Slot p lies at position p + 1."""
    return pool.keys[mx.array(pages)].reshape(-1, 2, 32)[1 : slots + 1]


def _slots_written(engine: MLXEngine) -> int:
    arrays = engine._books.free._arrays
    assert arrays is not None
    slots: list[int] = (arrays.length - arrays.pending_count).tolist()  # type: ignore[assignment]
    return slots[0]


@pytest.mark.parametrize(
    "depths",
    [(3,), (0,), (0, 0, 2), (0,) * 11 + (4,), (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8)],
)
@pytest.mark.parametrize("spoil", [0.0, 0.4])
def test_history_is_exact(model: Qwen35Model, depths: tuple[int, ...], spoil: float) -> None:
    prompt = prompts(3)[2]
    alone = Driver(engine_over(model))
    alone.join(0, prompt, greedy(60))
    while alone.active:
        alone.decode([0], depth=0)
    whole = prompt + alone.results[0].tokens
    engine = engine_over(model)
    OracleCycle.install(engine, {0: whole}, spoil=spoil)
    driver = Driver(engine)
    driver.join(0, prompt, greedy(60))
    for cycle in range(14):
        driver.decode([0], depth=depths[cycle % len(depths)])
    slots = _slots_written(engine)
    emitted = len(driver.results[0].tokens)
    assert len(prompt) + emitted - 1 - slots <= PENDING_LIMIT + 1
    head = engine._cycle._mtp_pool
    assert head is not None
    found = _rows(head, driver.pages[0], slots)
    assert mx.array_equal(found, _teacher_forced(model, whole, slots))


def test_rows_without_speculation_share_a_cohort_with_rows_that_have_it(
    model: Qwen35Model,
) -> None:
    engine = engine_over(model)
    driver = Driver(engine)
    off = RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=12, speculative=False)
    driver.join(0, [3, 1, 4], off)
    driver.join(1, [1, 5, 9], greedy(12))
    from engine.plan import DecodeBatch, StepPlan, page_array

    for step in range(100, 115):
        batch = DecodeBatch(
            rows=(0, 1),
            pages=np.stack([page_array(driver.pages[0]), page_array(driver.pages[1])]),
            depth=3,
            limits=(0, 3),
        )
        engine.submit(StepPlan(step=step, decode=batch))
        for result in engine.collect().rows:
            driver.results[result.row].add(result)
    assert driver.results[0].drafted == []
    for row, prompt in ((0, [3, 1, 4]), (1, [1, 5, 9])):
        alone = Driver(engine_over(model))
        alone.join(9, prompt, greedy(12))
        while alone.active:
            alone.decode([9], depth=0)
        assert driver.results[row].tokens == alone.results[9].tokens
