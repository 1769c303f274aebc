"""Padding of products to widths that the device multiplies faster."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear

from engine.models.qwen3_5 import Qwen35Model
from engine.ops import columns, fuse_linears
from engine.solo import generate
from engine.widths import CANDIDATES, Widths, measure_widths
from tests.engine.small import engine_over, greedy, prompts, small_model

H200 = Widths({1: 80.0, 2: 119.0, 3: 164.0, 4: 200.0, 8: 88.0, 16: 80.0, 32: 104.0, 64: 122.0})


@pytest.mark.parametrize(
    ("rows", "padded"),
    [(1, 1), (2, 16), (4, 16), (5, 16), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (65, 65)],
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


def test_fused_products_may_be_wider_than_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: packed, and filled up to whole tiles."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    parts = []
    for size in (64, 40, 8):
        linear = Linear(64, size, bias=False)
        linear.weight = mx.random.normal((size, 64), key=mx.random.key(size))
        parts.append(linear.to_quantized(64, 4))
    fused = fuse_linears(parts)
    assert fused is not None
    assert fused.weight.shape[0] == 128
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    for part, cut in zip(parts, columns(fused(x), 64, 40, 8), strict=True):
        assert mx.allclose(part(x), cut, atol=1e-5)


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
