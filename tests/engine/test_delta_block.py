"""The one-block form of the gated delta rule against the token-by-token one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.models import delta_block as module
from engine.models.delta import delta_rule
from engine.models.delta_block import BlockWrites, delta_block, keep_block

ROWS, HEADS, KEY, VALUE = 5, 4, 32, 16
TOLERANCE = 2e-5

Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]


def inputs(width: int, seed: int, *, alike: float = 0.0) -> Inputs:
    """q, k, v, log decay, β, memory; `alike` in 0…1 makes the keys resemble each other."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, width, HEADS)
    k = rng.standard_normal((*shape, KEY)) * (1 - alike) + alike * rng.standard_normal(KEY)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = (
        rng.standard_normal((*shape, KEY)) * KEY**-0.5,
        k,
        rng.standard_normal((*shape, VALUE)),
        -rng.random(shape) * 0.3,
        rng.random(shape),
        rng.standard_normal((ROWS, HEADS, VALUE, KEY)),
    )
    q, key, v, decay, beta, memory = (mx.array(a, mx.float32) for a in arrays)
    return q, key, v, decay, beta, memory


def both(x: Inputs) -> tuple[mx.array, list[mx.array], mx.array, BlockWrites]:
    q, k, v, log_decay, beta, memory = x
    out, states = delta_rule(q, k, v, mx.exp(log_decay), beta, memory)
    block, writes = delta_block(*x)
    return out, [memory, *(state[0] for state in states)], block, writes


def largest(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())


@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("alike", [0.0, 0.95])
def test_a_block_equals_its_tokens_one_by_one(width: int, alike: float) -> None:
    x = inputs(width, seed=width, alike=alike)
    out, states, block, writes = both(x)
    assert largest(out, block) < TOLERANCE
    for count in range(width + 1):
        kept = keep_block(writes, x[-1], mx.full((ROWS,), count, mx.int32))
        assert largest(kept, states[count]) < TOLERANCE


def test_every_row_keeps_its_own_number_of_tokens() -> None:
    x = inputs(6, seed=3)
    _, states, _, writes = both(x)
    counts = [0, 6, 3, 1, 5]
    kept = keep_block(writes, x[-1], mx.array(counts, mx.int32))
    for row, count in enumerate(counts):
        assert largest(kept[row], states[count][row]) < TOLERANCE
    assert mx.array_equal(kept[0], x[-1][0])


def _first_factor_only(negated: mx.array, wanted: mx.array, width: int) -> mx.array:
    return mx.addmm(wanted, negated, wanted)


def _one_count(writes: BlockWrites, memory: mx.array, count: mx.array) -> mx.array:
    return keep_block(writes, memory, mx.broadcast_to(count.max(), count.shape))


def test_an_unfinished_solve_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_solve", _first_factor_only)
    out, _, block, _ = both(inputs(4, seed=4, alike=0.9))
    assert largest(out, block) > 100 * TOLERANCE


def test_one_keep_count_for_all_rows_is_seen() -> None:
    x = inputs(4, seed=5)
    _, states, _, writes = both(x)
    kept = _one_count(writes, x[-1], mx.array([1, 2, 3, 4, 0], mx.int32))
    assert largest(kept[0], states[1][0]) > 100 * TOLERANCE
