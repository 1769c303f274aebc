"""Shaping, drawing, and exact acceptance, for all rows at once, on the device.

Shaping order, the same for target and draft: what `engine.rules` does to the logits, then
temperature → top-k → top-p → min-p → renormalise.
Rejection sampling after Leviathan et al. 2023 (alg. 1) and Chen et al. 2023 (alg. 2): accept a
draft d with probability min(1, p(d)/q(d)), strictly u < p/q; on rejection draw from (p - q)+
renormalised. q is the distribution the draft was really drawn from. Temperature 0 is the point mass
on the argmax, so greedy rows run through the same code beside sampled ones.

Coupled rows (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative
decoding") draw draft and target with one noise: both take the token that wins the race
p(v) / E(v) (the same law as Gumbel-argmax, E exponential), and a draft counts as accepted when the
target's own winner is the same token.

Shapes: B rows, W = depth + 1 positions, V vocabulary; probabilities are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.noise import Purpose, coupled_key, row_key
from engine.plan import SamplingParams

COLDEST = 1e-4
"""Temperatures between 0 and this count as this: dividing by less would overflow float32."""


@dataclass(frozen=True, slots=True)
class Shaper:
    """Sampling parameters of B rows as arrays, and which filters the batch needs at all."""

    temperature: mx.array
    """[B] float32."""
    top_k: mx.array
    """[B] int32; V where the row keeps all."""
    top_p: mx.array
    """[B] float32; infinity where the row keeps all."""
    min_p: mx.array
    """[B] float32."""
    greedy: bool
    """Every row has temperature 0: argmax is all that is needed."""
    some_greedy: bool
    """Some row has."""
    largest_k: int
    """Tokens that can survive top-k in any row: V when some row has none."""
    filters: bool
    """Some row uses top-k or top-p."""
    floors: bool
    """Some row uses min-p."""
    cut: mx.array
    """[B] bool: the row uses one of the three, so what is left must be renormalised."""


def make_shaper(rows: Sequence[SamplingParams], vocab: int, *, draft: bool = False) -> Shaper:
    """Stack the rows' parameters; `draft` takes each row's draft temperature."""
    temperatures = [
        row.draft_temperature if draft and row.draft_temperature is not None else row.temperature
        for row in rows
    ]
    top_k = [min(row.top_k, vocab) or vocab for row in rows]
    top_p = [row.top_p if row.top_p < 1.0 else float("inf") for row in rows]
    cut = [
        k < vocab or row.top_p < 1.0 or row.min_p > 0.0 for k, row in zip(top_k, rows, strict=True)
    ]
    return Shaper(
        temperature=mx.array([t and max(t, COLDEST) for t in temperatures], mx.float32),
        top_k=mx.array(top_k, mx.int32),
        top_p=mx.array(top_p, mx.float32),
        min_p=mx.array([row.min_p for row in rows], mx.float32),
        greedy=all(t == 0.0 for t in temperatures),
        some_greedy=any(t == 0.0 for t in temperatures),
        largest_k=max(top_k),
        filters=any(k < vocab for k in top_k) or any(row.top_p < 1.0 for row in rows),
        floors=any(row.min_p > 0.0 for row in rows),
        cut=mx.array(cut),
    )


def noise_keys(rows: Sequence[SamplingParams]) -> mx.array:
    """The rows' keys as uint32 [B, 2] for `engine.noise.uniforms`."""
    return mx.array([row_key(row.seed) for row in rows], mx.uint32)


def coupled_keys(rows: Sequence[SamplingParams]) -> mx.array:
    """The rows' keys as uint32 [B, 2] for `engine.noise.exponentials`."""
    return mx.array([coupled_key(row.seed) for row in rows], mx.uint32)


def one_hot(tokens: mx.array, vocab: int) -> mx.array:
    """Point masses, float32 [..., V]."""
    return (mx.arange(vocab, dtype=tokens.dtype) == tokens[..., None]).astype(mx.float32)


def shape(logits: mx.array, shaper: Shaper) -> mx.array:
    """The distribution each row samples from: logits [B, n, V] → probabilities [B, n, V]."""
    if shaper.greedy:
        return one_hot(mx.argmax(logits, axis=-1), logits.shape[-1])
    column = (slice(None), None, None)
    temperature = shaper.temperature[column]
    probs = mx.softmax(logits / mx.where(temperature > 0, temperature, 1.0), axis=-1)
    if shaper.filters:
        probs = _truncate(probs, shaper)
    if shaper.floors:
        floor = shaper.min_p[column] * probs.max(axis=-1, keepdims=True)
        probs = mx.where(probs >= floor, probs, 0.0)
    if shaper.filters or shaper.floors:
        # A row that cuts nothing keeps its bits beside rows that do.
        probs = probs / mx.where(shaper.cut[column], probs.sum(axis=-1, keepdims=True), 1.0)
    if shaper.some_greedy:
        best = one_hot(mx.argmax(logits, axis=-1), logits.shape[-1])
        probs = mx.where(temperature > 0, probs, best)
    return probs


def _truncate(probs: mx.array, shaper: Shaper) -> mx.array:
    """Zero what top-k and then top-p drop; ties with the last kept token stay."""
    column = (slice(None), None, None)
    size = shaper.largest_k
    ranked = mx.topk(probs, size, axis=-1) if size < probs.shape[-1] else probs
    ranked = -mx.sort(-ranked, axis=-1)
    last = mx.broadcast_to(shaper.top_k[column] - 1, (*ranked.shape[:2], 1))
    kth = mx.take_along_axis(ranked, last, axis=-1)
    ranked = mx.where(ranked >= kth, ranked, 0.0)
    reached = mx.cumsum(ranked, axis=-1)
    # A token stays while the mass before it falls short of top_p of what top-k left.
    short = (reached - ranked) < shaper.top_p[column] * reached[..., -1:]
    smallest = mx.where(short & (ranked > 0), ranked, float("inf")).min(axis=-1, keepdims=True)
    return mx.where(probs >= smallest, probs, 0.0)


def draw(probs: mx.array, u: mx.array) -> mx.array:
    """Inverse-CDF sample: unnormalised probabilities [B, V], u [B] in [0, 1) → int32 [B].

    Never returns a token of zero mass.
    """
    cumulative = mx.cumsum(probs, axis=-1)
    total = cumulative[:, -1:]
    index = (cumulative <= u[:, None] * total).sum(axis=-1)
    # u · total may round up to total; the first index that reaches total still has mass.
    last = (cumulative < total).sum(axis=-1)
    return mx.minimum(index, last).astype(mx.int32)


def race(probs: mx.array, exponentials: mx.array) -> mx.array:
    """argmax p(v) / E(v) over the last axis, int32: a sample of p, and the same one for like p.

    Never returns a token of zero mass where another has some.
    """
    return mx.argmax(probs / exponentials, axis=-1).astype(mx.int32)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What verification decided, before stops and limits end a burst."""

    tokens: mx.array
    """[B, W] int32: accepted drafts, then the target's own token; junk after it."""
    accepted: mx.array
    """[B] int32: leading drafts accepted."""


def accept(drafts: mx.array, q: mx.array, p: mx.array, u: mx.array, limits: mx.array) -> Acceptance:
    """Rejection sampling of K drafts [B, K] drawn from q [B, K, V] against p [B, K + 1, V].

    `u` [B, K + 1, 4] is the noise of each position, by `Purpose`. `limits` [B] in 0…K: drafts from
    that index on count as never made, so a row limited to n draws its token n from p itself.
    """
    depth = drafts.shape[1]
    live = mx.arange(depth, dtype=mx.int32)[None, :] < limits[:, None]
    chosen = drafts[..., None].astype(mx.int32)
    p_drafts = mx.take_along_axis(p[:, :depth], chosen, axis=-1)[..., 0]
    q_drafts = mx.take_along_axis(q, chosen, axis=-1)[..., 0]
    # u < p / q without the division; q(d) > 0 because d was drawn from q.
    good = (u[:, :depth, Purpose.ACCEPT] * q_drafts < p_drafts) & live
    accepted = mx.cumprod(good.astype(mx.int32), axis=-1).sum(axis=-1)
    index = accepted[:, None, None]
    p_next = mx.take_along_axis(p, index, axis=1)[:, 0]
    q_next = mx.take_along_axis(q, mx.minimum(index, depth - 1), axis=1)[:, 0]
    # Position `limits` has no draft to subtract: q = 0 there makes the residual p itself.
    rejected = (accepted < limits)[:, None]
    residual = mx.maximum(p_next - mx.where(rejected, q_next, 0.0), 0.0)
    # p and q equal up to rounding leave no residual mass; the law is then p's own.
    residual = mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p_next)
    u_next = mx.take_along_axis(u[..., Purpose.TARGET], accepted[:, None], axis=1)[:, 0]
    return _assemble(drafts, draw(residual, u_next), accepted)


def accept_equal(drafts: mx.array, best: mx.array, limits: mx.array) -> Acceptance:
    """Acceptance by equality with the target's own token at each position, `best` [B, K + 1].

    It is `accept` where p and q are point masses, and what coupled rows do.
    """
    depth = drafts.shape[1]
    live = mx.arange(depth, dtype=mx.int32)[None, :] < limits[:, None]
    good = (drafts == best[:, :depth]) & live
    accepted = mx.cumprod(good.astype(mx.int32), axis=-1).sum(axis=-1)
    token = mx.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    return _assemble(drafts, token, accepted)


def _assemble(drafts: mx.array, token: mx.array, accepted: mx.array) -> Acceptance:
    accepted = accepted.astype(mx.int32)
    padded = mx.concatenate([drafts, token[:, None]], axis=1).astype(mx.int32)
    place = mx.arange(padded.shape[1], dtype=mx.int32)[None, :]
    tokens = mx.where(place == accepted[:, None], token[:, None].astype(mx.int32), padded)
    return Acceptance(tokens=tokens, accepted=accepted)
