"""Counter-based noise: u(seed, position, purpose), the same on every device.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
A row's 64-bit seed is scrambled into a key on the host; the key of a position is that key plus the
position in its low word, and the purposes are the counters under it. A draw therefore depends on
nothing but the row, the place in its sequence and what the draw is for: not on batch, depth or
neighbours. The device part is MLX's own Threefry primitive (one operation, where spelling the
rounds out costs over a hundred: 0.1 ms against 1.1 ms per cycle on 2 CPU cores); `threefry2x32`
here is the host's half and the reference that a test holds the primitive to.
"""

from __future__ import annotations

from enum import IntEnum

import mlx.core as mx

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF
_SCRAMBLE = (0x73656C66, 0x64726166)
"""Counter that turns a seed into a row key, so that seeds 1 and 2 have unrelated keys."""
_SCRAMBLE_COUPLED = (0x636F7570, 0x6C696E67)
"""The same for the noise of coupled rows: another counter, so independent of every `Purpose`."""


class Purpose(IntEnum):
    """What a draw at a position is for; each decides a position at most once."""

    DRAFT = 0
    """Draw the proposal."""
    ACCEPT = 1
    """Accept or reject the proposal."""
    TARGET = 2
    """Draw the token itself: residual after a rejection, bonus, or plain sampling."""


_PER_POSITION = 4
"""Uniforms made per position; even, because Threefry yields pairs."""


def threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Two 32-bit words of noise for one (key, counter)."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = (((x1 << rotation) | (x1 >> (32 - rotation))) & _WORD) ^ x0
        x0 = (x0 + keys[(block + 1) % 3]) & _WORD
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _WORD
    return x0, x1


def row_key(seed: int) -> tuple[int, int]:
    """The (low, high) key words of a uint64 seed."""
    return threefry2x32((seed & _WORD, (seed >> 32) & _WORD), _SCRAMBLE)


def coupled_key(seed: int) -> tuple[int, int]:
    """The key words of a uint64 seed for `exponentials`; unrelated to those of `row_key`."""
    return threefry2x32((seed & _WORD, (seed >> 32) & _WORD), _SCRAMBLE_COUPLED)


def _position_noise(key: mx.array) -> mx.array:
    return mx.random.uniform(shape=(_PER_POSITION,), key=key)


_noise = mx.vmap(mx.vmap(_position_noise))


def uniforms(keys: mx.array, positions: mx.array) -> mx.array:
    """Uniform floats in [0, 1), [B, W, 4], indexed by `Purpose` in the last axis.

    `keys` is uint32 [B, 2] (rows of `row_key`), `positions` int [B, W].
    """
    low = keys[:, :1] + positions.astype(mx.uint32)
    high = mx.broadcast_to(keys[:, 1:], low.shape)
    return _noise(mx.stack([low, high], axis=-1))


_HALF_STEP = 2.0**-33
_BELOW_ONE = 1.0 - 2.0**-24


def exponentials(keys: mx.array, positions: mx.array, vocab: int) -> mx.array:
    """Independent standard exponentials E(seed, position, token), float32 [B, W, V].

    `keys` is uint32 [B, 2] (rows of `coupled_key`), `positions` int [B, W]. E = -log1p(-u) with
    u = (bits + 1/2) · 2^-32 of 32 random bits: in the race argmax p(v) / E(v) a token of
    probability 1e-8 wins through an E of about 1e-8, which 24 bits of u could not tell from 0 or
    from 6e-8. MLX's uniform is bits / (2^32 - 1) in float32, whose small values keep all 32 bits.
    With h = ceil(V / 2), tokens v and v + h get the two words of counter (v, v + h), v < h;
    an odd vocabulary drops the last.
    """
    low = keys[:, :1] + positions.astype(mx.uint32)
    high = mx.broadcast_to(keys[:, 1:], low.shape)
    even = vocab + vocab % 2

    def draw(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(even,), key=key)

    u = mx.vmap(mx.vmap(draw))(mx.stack([low, high], axis=-1))[..., :vocab]
    # A u rounded up to 1 would make E infinite, and the score of a certain token 0.
    return -mx.log1p(-mx.minimum(u + _HALF_STEP, _BELOW_ONE))
