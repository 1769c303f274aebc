"""Padding of products to widths that the device multiplies faster."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from engine.models.qwen3_5 import Qwen35Model
from engine.solo import generate
from engine.widths import CANDIDATES, Widths, measure_widths
from tests.engine.small import engine_over, greedy, prompts, small_model

H200 = Widths(
    {1: 167.0, 2: 72.0, 3: 99.0, 4: 117.0, 5: 154.0, 6: 176.0, 7: 199.0, 8: 31.0}
    | {12: 42.0, 16: 29.0, 24: 65.0, 32: 42.0, 48: 65.0, 64: 48.0}
)


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 16), (4, 16), (8, 8), (9, 16), (12, 16), (16, 16), (17, 32), (24, 32), (33, 64), (65, 65)],
)
def test_the_cheapest_width_is_taken(rows: int, padded: int) -> None:
    assert H200.padded(rows) == padded


def test_nothing_is_padded_for_a_tenth() -> None:
    flat = Widths({1: 10.0, 2: 9.5, 4: 9.2, 8: 30.0})
    assert [flat.padded(rows) for rows in (1, 2, 4)] == [1, 2, 4]
    assert str(flat) == ""


def test_without_measurements_nothing_is_padded() -> None:
    assert [Widths().padded(rows) for rows in (1, 7, 500)] == [1, 7, 500]


def test_all_widths_are_measured() -> None:
    measured = measure_widths(lambda x: [x @ x.T], 16, mx.float32)
    assert tuple(measured.seconds) == CANDIDATES
    assert all(0 < seconds < 60 for seconds in measured.seconds.values())


@dataclass(frozen=True)
class Always(Widths):
    """Pads everything to multiples of eight plus one."""

    def padded(self, rows: int) -> int:
        return -(-rows // 8) * 8 + 1


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


@pytest.mark.parametrize("depth", [0, 3])
def test_padding_changes_no_bit(model: Qwen35Model, depth: int) -> None:
    """On the reference BLAS a product's rows do not depend on their number."""
    requests = [(prompt, greedy(12, seed=i)) for i, prompt in enumerate(prompts(4))]

    def run() -> tuple[list[list[int]], list[mx.array]]:
        engine = engine_over(model)
        results = generate(engine, requests, depth=depth)
        return [r.tokens for r in results], [mx.array(t.logits) for t in engine.traces]

    plain_tokens, plain = run()
    model.widths = Always()
    try:
        padded_tokens, padded = run()
    finally:
        model.widths = Widths()
    assert padded_tokens == plain_tokens
    assert all(mx.array_equal(a, b) for a, b in zip(plain, padded, strict=True))
