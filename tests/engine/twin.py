"""A slow, obvious float64 twin of shaping and acceptance, in NumPy, one row at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan import SamplingParams

Law = NDArray[np.float64]
Table = Callable[[tuple[int, ...]], Law]
"""Distribution of the next token after a prefix."""


def shape(logits: Sequence[float] | Law, params: SamplingParams, temperature: float) -> Law:
    """The distribution one row samples from."""
    z = np.asarray(logits, np.float64)
    if temperature == 0:
        point: Law = np.eye(len(z))[int(z.argmax())]
        return point
    weights = np.exp((z - z.max()) / temperature)
    p = weights / weights.sum()
    if params.top_k:
        kth = np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
        p = np.where(p >= kth, p, 0.0)
    if params.top_p < 1:
        p = p / p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        smallest = p[order][before < params.top_p].min()
        p = np.where(p >= smallest, p, 0.0)
    if params.min_p > 0:
        p = np.where(p >= params.min_p * p.max(), p, 0.0)
    law: Law = p / p.sum()
    return law


def residual(p: Law, q: Law) -> Law:
    """(p - q)+ renormalised, p itself where nothing is left."""
    rest = np.maximum(p - q, 0.0)
    law: Law = rest / rest.sum() if rest.sum() > 0 else p
    return law


def accept_once(
    drafts: Sequence[int], q: Law, p: Law, u_accept: Law, u_target: Law, limit: int
) -> tuple[int, int]:
    """(accepted, own token) of one row for given noise: the textbook loop."""
    for j, d in enumerate(drafts[:limit]):
        if not u_accept[j] < p[j, d] / q[j, d]:
            return j, draw(residual(p[j], q[j]), u_target[j])
    return limit, draw(p[limit], u_target[limit])


def draw(p: Law, u: float) -> int:
    """First index whose cumulative mass exceeds u."""
    cumulative = np.cumsum(p)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def emitted_law(
    p: Table, q: Table, vocab: int, depth: int, limit: int
) -> dict[tuple[int, ...], float]:
    """Law of the first depth + 1 tokens when each cycle's burst is continued from p.

    Sums over every draft sequence and every way acceptance can go; the claim under test is that
    the result is the product of p's, whatever q is.
    """
    law: dict[tuple[int, ...], float] = dict.fromkeys(
        itertools.product(range(vocab), repeat=depth + 1), 0.0
    )
    for drafts in itertools.product(range(vocab), repeat=depth):
        weight = float(np.prod([q(drafts[:j])[d] for j, d in enumerate(drafts)]))
        if weight == 0.0:
            continue
        for j in range(limit + 1):
            own = p(drafts[:j])
            if j < limit:
                own = residual(own, q(drafts[:j]))
                pass_on = min(1.0, p(drafts[:j])[drafts[j]] / q(drafts[:j])[drafts[j]])
            else:
                pass_on = 0.0
            for token in range(vocab):
                _spread(
                    law, p, (*drafts[:j], token), weight * (1 - pass_on) * own[token], depth + 1
                )
            weight *= pass_on
    return law


def _spread(
    law: dict[tuple[int, ...], float], p: Table, prefix: tuple[int, ...], mass: float, length: int
) -> None:
    """Continue a prefix from p until it has `length` tokens."""
    if mass == 0.0:
        return
    if len(prefix) == length:
        law[prefix] += mass
        return
    for token, share in enumerate(p(prefix)):
        _spread(law, p, (*prefix, token), mass * share, length)
