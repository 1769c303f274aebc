"""The gated delta rule in blocks: prefill's form, a few large products instead of many small ones.

Within a block of C tokens let L_t be the cumulative log decay and u_t = β_t (v_t - g_t S_{t-1} k_t)
what token t writes. Then S_t = e^{L_t} S_0 + Σ_{i<=t} e^{L_t - L_i} u_i k_iᵀ, and the u solve the
unit lower triangular system

    u_t + β_t Σ_{i<t} e^{L_t - L_i} (k_t·k_i) u_i = β_t (v_t - e^{L_t} S_0 k_t)

(the WY form of Yang et al. 2024, "Parallelizing linear transformers with the delta rule", with the
decay of "Gated Delta Networks", section 3.3). The systems of all blocks are inverted together; only
the passage of S from block to block is sequential. Results equal `engine.models.delta.delta_rule`
up to rounding, not bit for bit.
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 16
"""Tokens per block. Larger blocks mean fewer sequential steps and a longer substitution."""


def delta_rule_chunked(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Run W tokens from `memory` [B, H, Dv, Dk].

    q, k [B, W, H, Dk]; v [B, W, H, Dv]; log_decay (<= 0), beta [B, W, H]. Returns outputs
    [B, W, H, Dv] and the memory after the last token.
    """
    width = q.shape[1]
    # Tokens added to fill the last block neither decay nor write: log decay 0, β 0.
    q, k, v, log_decay, beta = (_blocks(x) for x in (q, k, v, log_decay, beta))
    decayed = mx.cumsum(log_decay, axis=-1)[..., None]
    gap = decayed - decayed.swapaxes(-1, -2)
    steps = mx.arange(BLOCK)
    lower = steps[:, None] >= steps[None, :]
    ratio = mx.exp(mx.where(lower, gap, -mx.inf))
    strict = mx.where(steps[:, None] > steps[None, :], ratio, 0.0)
    weight = beta[..., None]
    inverse = _invert_unit_lower(weight * strict * (k @ k.swapaxes(-1, -2)))
    since_start = mx.exp(decayed)
    written = inverse @ (weight * v)
    erased = inverse @ (weight * since_start * k)
    within = ratio * (q @ k.swapaxes(-1, -2))
    from_start = since_start * q
    until_end = mx.exp(decayed[..., -1:, :] - decayed) * k
    whole = since_start[..., -1:, :]
    outputs: list[mx.array] = []
    for block in range(q.shape[0]):
        read = memory.swapaxes(-1, -2)
        update = written[block] - erased[block] @ read
        outputs.append(from_start[block] @ read + within[block] @ update)
        memory = whole[block] * memory + update.swapaxes(-1, -2) @ until_end[block]
    return _unblocks(mx.stack(outputs), width), memory


def _blocks(x: mx.array) -> mx.array:
    """[B, W, H, …] → [blocks, B, H, BLOCK, …], zero-filled at the end."""
    batch, width, heads, *rest = x.shape
    missing = -width % BLOCK
    if missing:
        x = mx.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(batch, -1, BLOCK, heads, *rest)
    return x.transpose(1, 0, 3, 2, *range(4, x.ndim))


def _unblocks(x: mx.array, width: int) -> mx.array:
    """[blocks, B, H, BLOCK, Dv] → [B, width, H, Dv]."""
    blocks, batch, heads, size, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * size, heads, dim)[:, :width]


def _invert_unit_lower(strict: mx.array) -> mx.array:
    """(I + A)⁻¹ for strictly lower triangular A [..., BLOCK, BLOCK], by halves.

    [[P, 0], [A₂₁, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ A₂₁ P⁻¹, Q⁻¹]], from blocks of one up. As stable as
    substitution; the product form (I - A)(I + A²)… is not, its powers grow like binomials when
    keys repeat.
    """
    lead = strict.shape[:-2]
    size = 1
    inverse = mx.ones((*lead, BLOCK, 1, 1))
    while size < BLOCK:
        pairs = BLOCK // (2 * size)
        upper, lower = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = _corners(strict, size)
        below = -(lower @ corner @ upper)
        top = mx.concatenate([upper, mx.zeros((*lead, pairs, size, size))], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([below, lower], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _corners(strict: mx.array, size: int) -> mx.array:
    """The blocks [2j+1, 2j] of a matrix cut into squares of `size`: [..., pairs, size, size]."""
    pairs = BLOCK // (2 * size)
    rows = strict.reshape(*strict.shape[:-2], pairs, 2, size, BLOCK)[..., 1, :, :]
    columns = rows.reshape(*strict.shape[:-2], pairs, size, pairs, 2, size)[..., 0, :]
    index = mx.arange(pairs).reshape(*([1] * len(strict.shape[:-2])), pairs, 1, 1, 1)
    index = mx.broadcast_to(index, (*columns.shape[:-2], 1, size))
    return mx.take_along_axis(columns, index, axis=-2)[..., 0, :]
