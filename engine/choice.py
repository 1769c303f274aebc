"""Drawing one token per row, whatever mode each row of a cohort is in.

A cohort mixes greedy rows (argmax), rows verified by rejection sampling (inverse CDF with one
uniform) and coupled rows (a race with one exponential per token). Noise is made for the modes in
use only: a [B, W, V] array exists only when some row is coupled.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engine.noise import Purpose, exponentials, uniforms
from engine.rows import RowStatics
from engine.sampling import draw, race


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of W consecutive positions of B rows."""

    uniform: mx.array | None
    """[B, W, 4] by `Purpose`; None when no row is verified by rejection."""
    exponential: mx.array | None
    """[B, W, V]; None when no row is coupled."""


def make_noise(statics: RowStatics, positions: mx.array, vocab: int) -> Noise | None:
    """Noise at positions [B, W]; None when every row is greedy."""
    if statics.greedy:
        return None
    keys = statics.coupled_keys
    return Noise(
        uniform=uniforms(statics.keys, positions) if statics.rejects else None,
        exponential=None if keys is None else exponentials(keys, positions, vocab),
    )


def sample(
    law: mx.array, statics: RowStatics, noise: Noise, place: int, purpose: Purpose
) -> mx.array:
    """One token [B] int32 of each row's law [B, V] at the noise's position `place`."""
    token: mx.array | None = None
    if noise.uniform is not None:
        token = draw(law, noise.uniform[:, place, purpose])
    if noise.exponential is None or statics.coupled is None:
        assert token is not None
        return token
    # A greedy row's law is a point mass, and the race of a point mass has one runner.
    won = race(law, noise.exponential[:, place])
    return won if token is None else mx.where(statics.coupled, won, token)
