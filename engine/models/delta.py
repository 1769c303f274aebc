"""The gated delta rule, token by token, and how to keep only a prefix of a block.

Recurrence (Yang et al. 2024, "Gated Delta Networks", eq. 10; as in transformers'
`torch_recurrent_gated_delta_rule`): S ← g S; S ← S + β (v − S k) kᵀ; o = S q, per value head,
in float32. Every token's arithmetic is the same whatever the block's width, so a block, its
tokens one by one and a replay of any prefix agree bit for bit on CPU.
"""

from __future__ import annotations

import mlx.core as mx

from engine.cache import RecurrentState, RecurrentTrail


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Run W tokens from `memory` [B, H, Dv, Dk].

    q, k [B, W, H, Dk]; v [B, W, H, Dv]; decay, beta [B, W, H]. Returns outputs [B, W, H, Dv] and
    the memory after each token.
    """
    width = q.shape[1]
    queries = mx.split(q[..., None], width, axis=1)
    outputs: list[mx.array] = []
    memories: list[mx.array] = []
    for query, step in zip(queries, _steps(k, v, decay, beta), strict=True):
        memory = _update(memory, *step)
        outputs.append((memory @ query[:, 0])[..., 0])
        memories.append(memory)
    return mx.stack(outputs, axis=1), memories


def _steps(
    k: mx.array, v: mx.array, decay: mx.array, beta: mx.array
) -> list[tuple[mx.array, mx.array, mx.array, mx.array]]:
    """The block's inputs cut into tokens, each shaped for `_update`."""
    width = k.shape[1]
    parts = (
        mx.split(k[..., None], width, axis=1),
        mx.split(v[..., None], width, axis=1),
        mx.split(decay[..., None, None], width, axis=1),
        mx.split(beta[..., None, None], width, axis=1),
    )
    return [(kt[:, 0], vt[:, 0], gt[:, 0], bt[:, 0]) for kt, vt, gt, bt in zip(*parts, strict=True)]


def _update(
    memory: mx.array, key: mx.array, value: mx.array, decay: mx.array, beta: mx.array
) -> mx.array:
    """One token: key [B, H, Dk, 1], value [B, H, Dv, 1], decay and beta [B, H, 1, 1]."""
    memory = memory * decay
    delta = (value - memory @ key) * beta
    return memory + delta * key.swapaxes(-1, -2)


def keep_prefix(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    """The state after exactly `count` [B] tokens of the block, 0 … W per row.

    Picks from the intermediate states where the pass kept them; otherwise replays the block with
    a per-row mask. Both give the same bits.
    """
    tail = trail.before.conv.shape[1]
    index = count[:, None] + mx.arange(tail, dtype=count.dtype)[None, :]
    conv = mx.take_along_axis(trail.rows, index[..., None], axis=1)
    memory = _pick(trail, count) if trail.memories else replay(trail, count)
    return RecurrentState(conv=conv, memory=memory)


def keep_all(trail: RecurrentTrail) -> RecurrentState:
    """The state after the whole block."""
    tail = trail.before.conv.shape[1]
    return RecurrentState(conv=trail.rows[:, -tail:], memory=trail.last)


def _pick(trail: RecurrentTrail, count: mx.array) -> mx.array:
    count = count[:, None, None, None]
    memory = trail.before.memory
    for step, candidate in enumerate(trail.memories, start=1):
        memory = mx.where(count == step, candidate, memory)
    return memory


def replay(trail: RecurrentTrail, count: mx.array) -> mx.array:
    """Memory after `count` tokens by running the block again with t < count as a mask.

    A masked token has decay 1 and β 0, which leaves the memory as it is, bit for bit.
    """
    k, v, decay, beta = trail.inputs
    alive = (mx.arange(k.shape[1], dtype=count.dtype)[None, :] < count[:, None])[..., None]
    decay, beta = mx.where(alive, decay, 1.0), mx.where(alive, beta, 0.0)
    memory = trail.before.memory
    for step in _steps(k, v, decay, beta):
        memory = _update(memory, *step)
    return memory
