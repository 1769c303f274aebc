"""Scripted acceptance, for benchmarks only: drafts stand at a given rate, whatever they are.

A model with random weights never agrees with itself, so what speculation would cost and gain on a
real model of its size could not be measured. Here drafting and verifying run in full, and only the
decision is overruled: of a cycle's drafts the first n stand, with n drawn so that draft j stands in
the share `rates[j]` of cycles that tried it. The emitted law is of course not the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from engine.choice import Noise
from engine.cycle import DecodeCycle, Drafts
from engine.noise import Purpose, uniforms
from engine.rows import RowArrays, RowStatics
from engine.sampling import Acceptance


class ScriptedCycle(DecodeCycle):
    """A cycle whose acceptance is scripted. Install it over a built cycle with `script`."""

    _rates: mx.array

    @classmethod
    def script(cls, cycle: DecodeCycle, rates: Sequence[float]) -> None:
        """Turn `cycle` into a scripted one. `rates` are shares of cycles in which each draft
        stands, falling; positions beyond go on at the last ratio.

        Raises ValueError unless they are in 0…1 and do not rise.
        """
        shares = list(rates)
        if not shares or any(not 0 <= r <= 1 for r in shares) or sorted(shares)[::-1] != shares:
            raise ValueError(f"scripted acceptance must fall within 0…1, not {shares}")
        last = shares[-1] / shares[-2] if len(shares) > 1 and shares[-2] else shares[-1]
        while len(shares) < 8:
            shares.append(shares[-1] * last)
        cycle.__class__ = cls
        assert isinstance(cycle, ScriptedCycle)
        cycle._rates = mx.array(shares, mx.float32)

    def _decide(
        self,
        rows: RowArrays,
        drafts: Drafts | None,
        tokens: mx.array,
        logits: mx.array,
        statics: RowStatics,
        noise: Noise | None,
        limits: mx.array,
    ) -> Acceptance:
        decided = super()._decide(rows, drafts, tokens, logits, statics, noise, limits)
        depth = tokens.shape[1]
        if not depth:
            return decided
        drawn = uniforms(statics.keys, rows.length[:, None] + 1)
        stands = drawn[:, :, Purpose.ACCEPT] < self._rates[None, :depth]
        accepted = mx.minimum(stands.sum(axis=1), limits).astype(mx.int32)
        own = mx.take_along_axis(decided.tokens, decided.accepted[:, None], axis=1)
        padded = mx.concatenate([tokens, own], axis=1)
        place = mx.arange(padded.shape[1], dtype=mx.int32)[None, :]
        emitted = mx.where(place == accepted[:, None], own, padded)
        return replace(decided, tokens=emitted, accepted=accepted)
