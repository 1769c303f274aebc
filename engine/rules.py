"""What rows change of their logits before the temperature: masks, minimum length, bias, penalties.

The order, the same for target and draft: constraint mask and minimum length → logit bias →
repetition, frequency, presence penalty (`engine.plan.SamplingParams`). Every rule is a function of
the position: verify row j of a cycle sees the output before the cycle and the drafts before j.

Operations exist only for rules that some row of the cohort has. A row without a rule passes
through it unchanged, bit for bit: x + 0, x / 1, x * 1 and x - 0 are x.

Shapes: B rows, n positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.plan import MAX_LOGPROBS, MAX_STOP_IDS, RowSpec
from engine.sampling_limits import violations

HIGHEST = 1e30
"""Logits above this count as this: a huge bias times a penalty must not overflow float32."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of B rows as arrays; None where no row has one."""

    stops: mx.array | None
    """[B, 1, V] bool: the row's stop ids."""
    stop_from: mx.array | None
    """[B, 1, 1] int32: stop ids may be drawn once no more than this many tokens remain."""
    bias: mx.array | None
    """[B, 1, V] float32."""
    repetition: mx.array | None
    """[B, 1, 1] float32."""
    frequency: mx.array | None
    """[B, 1, 1] float32."""
    presence: mx.array | None
    """[B, 1, 1] float32."""

    @property
    def counting(self) -> bool:
        """Some row's penalty needs the counts of its tokens."""
        return not (self.repetition is None and self.frequency is None and self.presence is None)

    @property
    def neutral(self) -> bool:
        """No row has any rule."""
        return self.stops is None and self.bias is None and not self.counting


def check_spec(row: int, spec: RowSpec, vocab: int) -> None:
    """Raise ValueError, naming the field and its limit, unless the engine can obey the spec."""

    def hold(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"row {row}: {what}")

    hold(len(spec.stop_ids) <= MAX_STOP_IDS, f"more than {MAX_STOP_IDS} stop ids")
    hold(all(0 <= t < vocab for t in spec.stop_ids), f"stop_ids must be in 0…{vocab - 1}")
    hold(0 <= spec.min_tokens <= spec.max_tokens, "min_tokens must be in 0…max_tokens")
    hold(spec.output_start is None or spec.output_start >= 0, "output_start must be >= 0")
    for name, count in (("logprobs", spec.logprobs), ("prompt_logprobs", spec.prompt_logprobs)):
        hold(count is None or 0 <= count <= MAX_LOGPROBS, f"{name} must be in 0…{MAX_LOGPROBS}")
    for found in violations(spec.sampling, vocab_size=vocab):
        raise ValueError(f"row {row}: {found}")


def needs_counts(spec: RowSpec) -> bool:
    """Whether a row's penalties count tokens."""
    s = spec.sampling
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def has_rules(spec: RowSpec) -> bool:
    """Whether anything changes a row's logits before the temperature."""
    bias = bool(spec.sampling.logit_bias)
    return bias or spec.min_tokens > 0 or spec.constraint is not None or needs_counts(spec)


def make_rules(specs: Sequence[RowSpec], vocab: int) -> LogitRules:
    """Stack the rows' rules."""
    sampling = [spec.sampling for spec in specs]
    least = any(spec.min_tokens > 0 for spec in specs)
    return LogitRules(
        stops=_table([[(t, 1.0) for t in s.stop_ids] for s in specs], vocab) > 0 if least else None,
        stop_from=_column([s.max_tokens - s.min_tokens for s in specs], mx.int32, 0)
        if least
        else None,
        bias=_table([s.logit_bias for s in sampling], vocab)
        if any(s.logit_bias for s in sampling)
        else None,
        repetition=_column([s.repetition_penalty for s in sampling], mx.float32, 1.0),
        frequency=_column([s.frequency_penalty for s in sampling], mx.float32, 0.0),
        presence=_column([s.presence_penalty for s in sampling], mx.float32, 0.0),
    )


def _table(entries: Sequence[Sequence[tuple[int, float]]], vocab: int) -> mx.array:
    table = np.zeros((len(entries), 1, vocab), np.float32)
    for row, pairs in enumerate(entries):
        for token, value in pairs:
            table[row, 0, token] = value
    return mx.array(table)


def _column(values: Sequence[float], dtype: mx.Dtype, neutral: float) -> mx.array | None:
    if all(value == neutral for value in values):
        return None
    return mx.array(list(values), dtype)[:, None, None]


@dataclass(frozen=True, slots=True)
class History:
    """What the rules must know of B rows at n consecutive positions."""

    remaining: mx.array
    """[B, n] int32: tokens the row may still emit at each position."""
    counts: mx.array
    """[B, n, V] int32 occurrences in the output before each position; V is 0 when nobody counts."""
    prompted: mx.array
    """[B, V] bool: occurs in the prompt; V as in `counts`."""

    def after(self, token: mx.array, rules: LogitRules) -> History:
        """One position on, after `token` [B]; of histories of one position."""
        counts = self.counts
        if rules.counting:
            counts = add_counts(counts[:, 0], token[:, None], mx.ones_like(token)[:, None])[:, None]
        return History(remaining=self.remaining - 1, counts=counts, prompted=self.prompted)


def now(
    remaining: mx.array, counts: mx.array, prompted: mx.array, rules: LogitRules
) -> History | None:
    """The history at the rows' next position: remaining [B], counts and prompted [B, V].

    None when there is no rule to ask for it, so that nothing is built.
    """
    if rules.neutral:
        return None
    return History(remaining=remaining[:, None], counts=counts[:, None], prompted=prompted)


def through(start: History, drafts: mx.array, rules: LogitRules) -> History:
    """Histories at `start` (one position) and after each of the drafts [B, K]: n = K + 1."""
    batch, depth = drafts.shape
    place = mx.arange(depth + 1, dtype=mx.int32)
    counts = start.counts
    if rules.counting and depth:
        counts = mx.broadcast_to(counts, (batch, depth + 1, counts.shape[-1]))
        before = mx.arange(depth, dtype=mx.int32)[None, None, :] < place[None, :, None]
        rows = mx.arange(batch, dtype=mx.int32)[:, None, None]
        counts = counts.at[rows, place[None, :, None], drafts[:, None, :]].add(
            mx.broadcast_to(before, (batch, depth + 1, depth)).astype(mx.int32)
        )
    return History(
        remaining=start.remaining - place[None, :], counts=counts, prompted=start.prompted
    )


def add_counts(counts: mx.array, tokens: mx.array, times: mx.array) -> mx.array:
    """counts [B, V] plus `times` [B, n] for tokens [B, n]."""
    rows = mx.arange(tokens.shape[0], dtype=mx.int32)[:, None]
    return counts.at[rows, tokens].add(times.astype(mx.int32))


def apply_rules(
    logits: mx.array, rules: LogitRules, history: History | None, mask: mx.array | None = None
) -> mx.array:
    """The logits [B, n, V] that the temperature is applied to.

    `mask` [B, n, V] bool is what the rows' constraints allow. Where it leaves stop ids only, the
    minimum length gives way: a complete form has nothing else to say.
    """
    allowed = mask
    if rules.stops is not None and rules.stop_from is not None:
        assert history is not None
        early = history.remaining[..., None] > rules.stop_from
        late = ~(rules.stops & early)
        allowed = late
        if mask is not None:
            both = mask & late
            allowed = mx.where(both.any(axis=-1, keepdims=True), both, mask)
    if allowed is not None:
        logits = mx.where(allowed, logits, -float("inf"))
    if rules.bias is not None:
        logits = logits + rules.bias
    if rules.counting:
        assert history is not None
        logits = _penalise(logits, rules, history)
    return logits if rules.bias is None and not rules.counting else mx.minimum(logits, HIGHEST)


def _penalise(logits: mx.array, rules: LogitRules, history: History) -> mx.array:
    said = history.counts > 0
    if rules.repetition is not None:
        seen = said | history.prompted[:, None]
        scaled = mx.where(logits > 0, logits / rules.repetition, logits * rules.repetition)
        logits = mx.where(seen, scaled, logits)
    if rules.frequency is not None:
        logits = logits - rules.frequency * history.counts.astype(mx.float32)
    if rules.presence is not None:
        logits = logits - mx.where(said, rules.presence, 0.0)
    return logits
