"""Log probabilities of the model's own distribution, found on the device, ordered on the host.

They are of the raw logits, before every rule and the temperature. One position is a record of
1 + 2 N int32 words: the chosen token's log probability (its float32 bits), the ids of the N most
probable tokens in no order, and the bits of their log probabilities. Records ride in the array
that the host reads anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.plan import Logprobs

SLICE = 64
"""Positions of a prompt whose logits are made at a time; two slices are the most that exist."""


def record(logits: mx.array, tokens: mx.array, top: int) -> mx.array:
    """Records [B, n, 1 + 2 top] of logits [B, n, V] (float32) for the tokens [B, n] chosen.

    Of equally probable tokens at the edge of the `top` the lowest ids are in.
    """
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[..., None].astype(mx.int32), axis=-1) - norm
    parts = [chosen.view(mx.int32)]
    top = min(top, logits.shape[-1])
    if top:
        ids = _top_ids(logits, top)
        parts += [ids, (mx.take_along_axis(logits, ids, axis=-1) - norm).view(mx.int32)]
    return mx.concatenate(parts, axis=-1)


def _top_ids(logits: mx.array, top: int) -> mx.array:
    """Ids of the `top` largest logits, int32, unordered; a partition alone breaks ties anyhow."""
    vocab = logits.shape[-1]
    edge = mx.topk(logits, top, axis=-1).min(axis=-1, keepdims=True)
    rank = vocab - mx.arange(vocab, dtype=mx.int32)  # V … 1, so that low ids win
    keys = mx.where(logits > edge, rank + vocab, mx.where(logits == edge, rank, 0))
    best = mx.topk(keys, top, axis=-1)
    # A non-finite logit leaves no honest key; such a row is a fault and reports nothing.
    return mx.clip(mx.where(best > vocab, 2 * vocab - best, vocab - best), 0, vocab - 1)


def prompt_records(
    head: Callable[[mx.array], mx.array], hidden: mx.array, tokens: mx.array, top: int
) -> mx.array:
    """Records [n, 1 + 2 top] of the prompt tokens [1, n] that follow hiddens [1, n, H].

    The logits of a whole chunk would be n · V floats; each slice waits for the one before it, so
    that the transient does not grow with the chunk.
    """
    parts: list[mx.array] = []
    for start in range(0, tokens.shape[1], SLICE):
        piece = hidden[:, start : start + SLICE]
        if parts:
            piece = mx.depends([piece], [parts[-1]])[0]
        parts.append(record(head(piece), tokens[:, start : start + SLICE], top))
    return mx.concatenate(parts, axis=1)[0]


def read(records: NDArray[np.int32], top: int) -> Logprobs:
    """The first `top` alternatives of records [n, 1 + 2 N], N >= top or the whole vocabulary."""
    held = (records.shape[1] - 1) // 2
    floats = np.ascontiguousarray(records).view(np.float32)
    ids, values = records[:, 1 : 1 + held], floats[:, 1 + held :]
    order = np.lexsort((ids, -values), axis=-1)[:, :top]
    rows = range(len(records))
    return Logprobs(
        chosen=tuple(float(value) for value in floats[:, 0]),
        top_ids=tuple(tuple(int(t) for t in ids[i, order[i]]) for i in rows),
        top=tuple(tuple(float(v) for v in values[i, order[i]]) for i in rows),
    )
