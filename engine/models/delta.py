"""The gated delta rule, token by token, and how to keep only a prefix of a block.

Recurrence (Yang et al. 2024, "Gated Delta Networks", eq. 10; as in transformers'
`torch_recurrent_gated_delta_rule`): S ← g S; S ← S + β (v − S k) kᵀ; o = S q, per value head,
in float32. Every token's arithmetic is the same whatever the block's width, so a block, its
tokens one by one and a replay of any prefix agree bit for bit on CPU.
"""

from __future__ import annotations

import mlx.core as mx

from engine.blocks import Block
from engine.cache import RecurrentState, RecurrentTrail
from engine.models.delta_block import keep_block
from engine.transients import HELD

Step = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]
"""One token: key as column and as row, value as column, decay, β; each [1, B, H, ·, ·]."""


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Run W tokens from `memory` [B, H, Dv, Dk].

    q, k [B, W, H, Dk]; v [B, W, H, Dv]; decay, beta [B, W, H]. Returns outputs [B, W, H, Dv] and
    the memory after each token, [1, B, H, Dv, Dk] each (a leading axis of one spares a slice of
    every input at every token).
    """
    queries = mx.split(_by_token(q)[..., None], q.shape[1], axis=0)
    memory = memory[None]
    outputs: list[mx.array] = []
    memories: list[mx.array] = []
    for query, step in zip(queries, _steps(k, v, decay, beta), strict=True):
        memory = _update(memory, *step)
        outputs.append(memory @ query)
        memories.append(memory)
        if len(outputs) % HELD == 0:
            memory = mx.depends([memory], outputs[-HELD:])[0]
    return mx.concatenate(outputs, axis=0)[..., 0].swapaxes(0, 1), memories


def _by_token(x: mx.array) -> mx.array:
    """[B, W, …] → [W, B, …]."""
    return x.swapaxes(0, 1)


def _steps(k: mx.array, v: mx.array, decay: mx.array, beta: mx.array) -> list[Step]:
    """The block's inputs cut into tokens."""
    k, v, decay, beta = (_by_token(x) for x in (k, v, decay, beta))
    shaped = (
        k[..., None],
        k[..., None, :],
        v[..., None],
        decay[..., None, None],
        beta[..., None, None],
    )
    return list(zip(*(mx.split(x, k.shape[0], axis=0) for x in shaped), strict=True))


def _update(
    memory: mx.array,
    key: mx.array,
    key_row: mx.array,
    value: mx.array,
    decay: mx.array,
    beta: mx.array,
) -> mx.array:
    """One token of the recurrence."""
    memory = memory * decay
    delta = (value - memory @ key) * beta
    return memory + delta * key_row


def keep_prefix(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    """The state after exactly `count` [B] tokens of the block, 0 … W per row.

    Where the pass ran as one block, from what it wrote. Otherwise picks from the intermediate
    states if the pass kept them, or else replays the block with a per-row mask; those two give the
    same bits.
    """
    conv = _tail(trail, count)
    if trail.block is not None:
        memory = keep_block(trail.block, trail.before.memory, count)
    else:
        memory = _pick(trail, count) if trail.memories else replay(trail, count)
    return RecurrentState(conv=conv, memory=memory)


def _tail(trail: RecurrentTrail, count: mx.array) -> mx.array:
    """The rows before a convolution that goes on after `count` [B] tokens."""
    tail = trail.before.conv.shape[1]
    index = count[:, None] + mx.arange(tail, dtype=count.dtype)[None, :]
    return mx.take_along_axis(trail.rows, index[..., None], axis=1)


def keep_all(trail: RecurrentTrail, block: Block | None = None) -> RecurrentState:
    """The state after the whole block; after each row's own tokens, where `block` is ragged (the
    places past them have left the memory as it was). With a `block`, which may be long, it holds
    on to nothing else of the pass."""
    if trail.last is not None:
        memory = mx.squeeze(trail.last, 0)  # an index would copy it
    else:
        assert trail.block is not None
        batch, _, width = trail.block.decayed.shape
        memory = keep_block(trail.block, trail.before.memory, mx.full((batch,), width, mx.int32))
    tail = trail.before.conv.shape[1]
    if block is None:
        return RecurrentState(conv=trail.rows[:, -tail:], memory=memory)
    if block.ragged is not None:
        return RecurrentState(conv=_tail(trail, block.ragged.count), memory=memory)
    last = mx.array([block.width + place for place in range(tail)], mx.int32)
    return RecurrentState(conv=mx.take(trail.rows, last, axis=1), memory=memory)


def _pick(trail: RecurrentTrail, count: mx.array) -> mx.array:
    count = count[None, :, None, None, None]
    memory = trail.before.memory[None]
    for step, candidate in enumerate(trail.memories, start=1):
        memory = mx.where(count == step, candidate, memory)
    return mx.squeeze(memory, 0)


def replay(trail: RecurrentTrail, count: mx.array) -> mx.array:
    """Memory after `count` tokens by running the block again with t < count as a mask.

    A masked token has decay 1 and β 0, which leaves the memory as it is, bit for bit.
    """
    k, v, log_decay, beta = trail.inputs
    alive = (mx.arange(k.shape[1], dtype=count.dtype)[None, :] < count[:, None])[..., None]
    decay, beta = mx.exp(mx.where(alive, log_decay, 0.0)), mx.where(alive, beta, 0.0)
    memory = trail.before.memory[None]
    for step in _steps(k, v, decay, beta):
        memory = _update(memory, *step)
    return mx.squeeze(memory, 0)
