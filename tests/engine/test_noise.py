"""The counter-based generator: known answers, the device's half, independence of the batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.noise import Purpose, row_key, threefry2x32, uniforms

KNOWN = [
    # Random123's kat_vectors, threefry2x32 20 rounds: key, counter, result.
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int], result: tuple[int, int]
) -> None:
    assert threefry2x32(key, counter) == result


def _host(seed: int, position: int) -> list[float]:
    """What `uniforms` must return: MLX pairs counter i with i + 2 and scales by 2^32 - 1."""
    low, high = row_key(seed)
    key = ((low + position) & 0xFFFFFFFF, high)
    pairs = [threefry2x32(key, (i, i + 2)) for i in range(2)]
    words = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
    below_one = np.nextafter(np.float32(1), np.float32(0))
    return [float(min(np.float32(w) / np.float32(2**32 - 1), below_one)) for w in words]


def test_the_device_draws_what_the_host_would() -> None:
    seeds = [0, 1, 2**63 + 5, 2**64 - 1]
    positions = [[0, 1, 2], [7, 8, 9], [2**31 - 3, 2**31 - 2, 2**31 - 1], [5, 5, 5]]
    keys = mx.array([row_key(seed) for seed in seeds], mx.uint32)
    found = np.array(uniforms(keys, mx.array(positions)))
    expected = [[_host(s, p) for p in row] for s, row in zip(seeds, positions, strict=True)]
    np.testing.assert_allclose(found, expected, atol=2e-7)


def test_a_draw_depends_on_nothing_but_seed_position_and_purpose() -> None:
    keys = mx.array([row_key(seed) for seed in (11, 12, 13)], mx.uint32)
    whole = uniforms(keys, mx.array([[4, 5, 6, 7]] * 3))
    alone = uniforms(keys[1:2], mx.array([[6]]))
    assert mx.array_equal(whole[1:2, 2:3], alone)


def test_uniform_and_uncorrelated() -> None:
    keys = mx.array([row_key(seed) for seed in range(200)], mx.uint32)
    u = np.array(uniforms(keys, mx.broadcast_to(mx.arange(100)[None], (200, 100))))
    assert 0.0 <= u.min() <= u.max() < 1.0
    counts = np.histogram(u[..., Purpose.TARGET], bins=20, range=(0, 1))[0]
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert chi2 < 43.8  # 99.9 % quantile, 19 degrees of freedom
    flat = u.reshape(-1, 4)
    assert np.abs(np.corrcoef(flat.T) - np.eye(4)).max() < 0.02
    lag = np.corrcoef(u[:, :-1, 2].ravel(), u[:, 1:, 2].ravel())[0, 1]
    neighbours = np.corrcoef(u[:-1, :, 2].ravel(), u[1:, :, 2].ravel())[0, 1]
    assert max(abs(lag), abs(neighbours)) < 0.03


def test_neighbouring_seeds_do_not_share_a_stream() -> None:
    """Position is added to the key, so unscrambled seeds 1, 2, 3 would be shifts of each other."""
    streams = [
        np.array(uniforms(mx.array([row_key(s)], mx.uint32), mx.arange(50)[None])) for s in range(4)
    ]
    values = np.concatenate([stream.ravel() for stream in streams])
    assert len(np.unique(values)) > 0.999 * len(values)
