"""Cycles in a few shapes: what fills them up changes nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine import padding
from engine.models.qwen3_5 import Qwen35Model
from engine.padding import COLUMN_TOKENS, ROW_STEPS, Buckets, bucket
from engine.plan import NULL_PAGE, DecodeBatch, RowSpec, SamplingParams
from engine.runner import MLXEngine
from tests.engine.driver import Driver
from tests.engine.small import engine_over, greedy, prompts, small_model

ROWS = 5


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (3, 4), (5, 8), (13, 16), (256, 256)])
def test_rows_are_rounded_up(rows: int, padded: int) -> None:
    assert bucket(rows) == padded
    assert bucket(rows) in ROW_STEPS


@pytest.mark.parametrize(("pages", "padded"), [(1, 16), (16, 16), (17, 32), (40, 44), (44, 44)])
def test_pages_are_rounded_up_within_the_context(pages: int, padded: int) -> None:
    shape = Buckets(rows=8, columns=44, depth=0, page_size=COLUMN_TOKENS // 16)
    batch = DecodeBatch(
        rows=(1, 2, 3), pages=np.ones((3, pages), np.int32), depth=2, limits=(2, 1, 0)
    )
    found = shape.pad(batch)
    assert found.pages.shape == (4, padded)
    assert found.pages.sum() == 3 * pages
    assert (found.pages[3] == NULL_PAGE).all()
    assert (found.depth, found.limits) == (2, (2, 1, 0, 0))


@pytest.mark.parametrize(
    ("prompts", "padded"),
    [((1, 1, 1), (1, 1, 16)), ((3, 17, 17), (4, 32, 32)), ((5, 64, 44), (8, 64, 44))],
)
def test_prompts_are_rounded_up(
    prompts: tuple[int, int, int], padded: tuple[int, int, int]
) -> None:
    shape = Buckets(rows=8, columns=44, depth=0, page_size=COLUMN_TOKENS // 16)
    assert shape.prompts(*prompts) == padded


def specs() -> list[RowSpec]:
    sampled = [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(temperature=0.8, top_k=9, min_p=0.01, seed=2, coupled=True),
        SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5),
    ]
    return [greedy(20), *(RowSpec(sampling=s, max_tokens=20) for s in sampled), greedy(9)]


def run(engine: MLXEngine) -> tuple[list[list[int]], dict[int, np.ndarray]]:
    """Rows join one by one and end one by one, so that every batch size occurs."""
    driver = Driver(engine, in_flight=2)
    for row, (prompt, spec) in enumerate(zip(prompts(ROWS), specs(), strict=True)):
        driver.join(row, prompt, spec)
        driver.decode(list(range(row + 1)), depth=2)
    while any(not driver.results[row].ended for row in range(ROWS)):
        driver.decode(list(range(ROWS)), depth=3)
        driver.decode(list(range(ROWS)), depth=0)
    driver.drain()
    logits = {
        row: np.concatenate([t.logits for t in engine.traces if t.row == row])
        for row in range(ROWS)
    }
    return [driver.results[row].tokens for row in range(ROWS)], logits


def test_stand_ins_change_no_bit(model: Qwen35Model) -> None:
    tokens, logits = run(engine_over(model))
    padded_tokens, padded = run(engine_over(model, buckets=True))
    assert padded_tokens == tokens
    assert all(np.array_equal(logits[row], padded[row]) for row in range(ROWS))


def test_cycles_run_in_buckets(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()
    engine = engine_over(model, buckets=True)
    right = engine.cycle.run

    def noting(rows: object, statics: object, table: mx.array, *rest: object) -> object:
        seen.add(table.shape)
        return right(rows, statics, table, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.cycle, "run", noting)
    run(engine)
    assert {shape[0] for shape in seen} <= {1, 2, 4, 8}
    assert {shape[1] for shape in seen} == {33}  # 256 tokens in pages of 8, and the null page


def test_a_stand_in_that_writes_is_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were stand-ins given somebody's pages instead of the null page, bits would change."""
    monkeypatch.setattr(padding, "NULL_PAGE", 1)
    with pytest.raises(AssertionError):
        test_stand_ins_change_no_bit(model)
