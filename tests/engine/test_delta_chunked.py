"""The block form of the delta rule equals the recurrence, also where its algebra is touchy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.models import delta_chunked
from engine.models.delta import delta_rule
from engine.models.delta_chunked import BLOCK, delta_rule_chunked

BATCH, HEADS, KEY, VALUE = 2, 3, 32, 16
KINDS = ("ordinary", "repeated keys", "fast decay", "no decay")


def _inputs(kind: str, width: int) -> list[mx.array]:
    """q, k, v, log decay, β, memory."""
    rng = np.random.default_rng(width)
    shape = (BATCH, width, HEADS)
    keys: NDArray[Any] = rng.normal(size=(*shape, KEY))
    if kind == "repeated keys":
        keys = np.broadcast_to(keys[:1, :1, :1], keys.shape)
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    decay: NDArray[Any] = -np.exp(rng.normal(-4, 1, shape))
    beta = 1 / (1 + np.exp(-rng.normal(size=shape)))
    if kind == "fast decay":
        decay = decay * 2000
    if kind in ("no decay", "repeated keys"):
        decay, beta = decay * 0, np.full(shape, 0.999)
    parts = [rng.normal(size=(*shape, KEY)), keys, rng.normal(size=(*shape, VALUE)), decay, beta]
    parts.append(rng.normal(size=(BATCH, HEADS, VALUE, KEY)))
    return [mx.array(part.astype(np.float32)) for part in parts]


def _gap(kind: str, width: int) -> float:
    q, k, v, log_decay, beta, memory = _inputs(kind, width)
    expected, memories = delta_rule(q, k, v, mx.exp(log_decay), beta, memory)
    found, last = delta_rule_chunked(q, k, v, log_decay, beta, memory)
    assert found.shape == expected.shape
    assert last.shape == memory.shape
    gaps = mx.abs(found - expected).max(), mx.abs(last - memories[-1][0]).max()
    return max(float(np.array(gap)) for gap in gaps)


@pytest.mark.parametrize("width", [1, 5, BLOCK, BLOCK + 1, 64, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_recurrence(kind: str, width: int) -> None:
    assert _gap(kind, width) < 2e-4  # outputs are around 20


def test_the_inverse_stays_accurate_when_keys_repeat() -> None:
    """(I - A)(I + A²)… would lose everything to cancellation here."""
    ones = mx.tril(mx.ones((BLOCK, BLOCK)), -1)
    product = delta_chunked._invert_unit_lower(ones) @ (mx.eye(BLOCK) + ones)
    assert mx.allclose(product, mx.eye(BLOCK), atol=1e-5)


def test_a_lost_decay_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "cumsum", lambda x, axis: mx.zeros_like(x))
    assert _gap("ordinary", 64) > 0.05


def test_a_lost_corner_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    corners = delta_chunked._corners
    monkeypatch.setattr(
        delta_chunked, "_corners", lambda strict, size: corners(strict, size) * (size < 8)
    )
    assert _gap("ordinary", 64) > 0.01
