"""The gated delta rule over one short block: a verify's form.

With L_t the cumulative log decay of a block, u_t what token t writes and S₀ the state before it
(see `engine.models.delta_chunked` for the derivation and its sources):

    (I + A) U = β (V - e^L K S₀ᵀ),   A_ti = β_t e^{L_t - L_i} (k_t·k_i) for i < t
    O = e^L Q S₀ᵀ + (e^{L_t - L_i} Q Kᵀ)_{i <= t} U
    S_n = e^{L_n} S₀ + Σ_{i <= n} e^{L_n - L_i} u_i k_iᵀ

So no intermediate state is ever made: the state after any number n of the block's tokens is one
product, with weights that are zero past n, and every row may keep another n. Reads of S₀ are shared
by all queries and keys. Equal to `engine.models.delta.delta_rule` up to rounding, not bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class BlockWrites:
    """What a block of W tokens wrote, so that any prefix of it can be kept."""

    keys: mx.array
    """[B, H, W, Dk]."""
    updates: mx.array
    """[B, H, W, Dv]: the u of every token."""
    decayed: mx.array
    """[B, H, W]: cumulative log decay, each token's own included."""


def delta_block(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, BlockWrites]:
    """Run W tokens from `memory` [B, H, Dv, Dk]; W is small (a verify's width).

    q, k [B, W, H, Dk]; v [B, W, H, Dv]; log_decay (<= 0), beta [B, W, H]. Returns outputs
    [B, W, H, Dv] and what was written.
    """
    width = q.shape[1]
    both = mx.concatenate([q, k], axis=1).transpose(0, 2, 1, 3)
    keys = both[:, :, width:]
    decayed = mx.cumsum(log_decay.swapaxes(1, 2), axis=-1)
    beta = beta.swapaxes(1, 2)[..., None]
    read = both @ memory.swapaxes(-1, -2)
    match = both @ keys.swapaxes(-1, -2)
    steps = mx.arange(width)
    order = steps[:, None] - steps[None, :]
    ratio = mx.exp(mx.where(order >= 0, decayed[..., None] - decayed[..., None, :], -mx.inf))
    since = mx.exp(decayed)[..., None]
    wanted = beta * (v.swapaxes(1, 2) - since * read[:, :, width:])
    lower = mx.where(order > 0, -beta * ratio * match[:, :, width:], 0.0)
    updates = _solve(lower, wanted, width)
    out = mx.addmm(since * read[:, :, :width], ratio * match[:, :, :width], updates)
    return out.swapaxes(1, 2), BlockWrites(keys, updates, decayed)


def _solve(negated: mx.array, wanted: mx.array, width: int) -> mx.array:
    """U of (I - N) U = wanted for strictly lower triangular N [..., W, W].

    (I - N)⁻¹ = (I + N)(I + N²)(I + N⁴)…, exact after log₂ W factors because N is nilpotent. Its
    powers grow at most like binomials of W, a few bits at the widths of a verify.
    """
    if width == 1:
        return wanted
    powers = [negated]
    while 2 ** len(powers) < width:
        powers.append(powers[-1] @ powers[-1])
    for power in reversed(powers):
        wanted = mx.addmm(wanted, power, wanted)
    return wanted


def keep_block(writes: BlockWrites, memory: mx.array, count: mx.array) -> mx.array:
    """The memory after exactly `count` [B] tokens of the block, 0 … W per row."""
    width = writes.decayed.shape[-1]
    count = count[:, None, None]
    last = mx.take_along_axis(writes.decayed, mx.maximum(count - 1, 0), axis=-1)
    last = mx.where(count > 0, last, 0.0)
    kept = mx.arange(width, dtype=count.dtype) < count
    weight = mx.exp(mx.where(kept, last - writes.decayed, -mx.inf))[..., None]
    wrote = (weight * writes.updates).swapaxes(-1, -2)
    return mx.addmm(mx.exp(last)[..., None] * memory, wrote, writes.keys)
