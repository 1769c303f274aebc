"""What `SamplingParams` may hold: one list of ranges, and of the words for them.

All ways in check here (the service, the scheduler's door, the engine, `LoadedModel.generate`), and
turn what is violated into an error of their own kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.plan import MAX_LOGIT_BIAS, SamplingParams

MAX_PENALTY = 2.0
"""Of frequency and presence penalty, either sign."""

SEEDS = 1 << 64
"""A seed is one of so many: a uint64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Ranges that a way in may draw tighter than the engine needs them."""

    max_repetition_penalty: float = math.inf
    max_bias: float = math.inf
    """Of one token's logit, either sign."""


ENGINE_LIMITS = SamplingLimits()
"""What the engine can obey: all finite numbers."""

PUBLIC_LIMITS = SamplingLimits(max_repetition_penalty=10.0, max_bias=100.0)
"""What the service promises: enough to force or forbid a token."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is out of range."""

    field: str
    """Of `SamplingParams`."""
    message: str
    """The limit, and what was given: "must be in (0, 1], is 1.5"."""
    entry: int | None = None
    """The token of `logit_bias` that it is about."""

    @property
    def path(self) -> str:
        """`field`, or `field[entry]`."""
        return self.field if self.entry is None else f"{self.field}[{self.entry}]"

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def violations(
    params: SamplingParams, *, vocab_size: int, limits: SamplingLimits = ENGINE_LIMITS
) -> Iterator[Violation]:
    """What is out of range in `params`, field by field."""
    p = params
    penalty = f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
    cooled = p.draft_temperature is None or 0 <= p.draft_temperature < math.inf
    ranges = (
        ("temperature", 0 <= p.temperature < math.inf, "finite and >= 0"),
        ("top_k", p.top_k >= 0, ">= 1, or 0 for all"),
        ("top_p", 0 < p.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= p.min_p < 1, "in [0, 1)"),
        ("seed", 0 <= p.seed < SEEDS, "in 0 … 2^64 - 1"),
        ("draft_temperature", cooled, "finite and >= 0, or None"),
        (
            "repetition_penalty",
            0 < p.repetition_penalty < math.inf
            and p.repetition_penalty <= limits.max_repetition_penalty,
            _up_to(limits.max_repetition_penalty),
        ),
        ("frequency_penalty", abs(p.frequency_penalty) <= MAX_PENALTY, penalty),
        ("presence_penalty", abs(p.presence_penalty) <= MAX_PENALTY, penalty),
    )
    for name, holds, limit in ranges:
        if not holds:
            yield Violation(name, f"must be {limit}, is {_number(getattr(p, name))}")
    yield from _logit_bias(p.logit_bias, vocab_size, limits.max_bias)


def _logit_bias(
    bias: tuple[tuple[int, float], ...], vocab_size: int, most: float
) -> Iterator[Violation]:
    name = "logit_bias"
    if len(bias) > MAX_LOGIT_BIAS:
        yield Violation(name, f"at most {MAX_LOGIT_BIAS} entries, are {len(bias)}")
        return
    if len({token for token, _ in bias}) != len(bias):
        yield Violation(name, "must name each token once")
    limit = "finite" if most == math.inf else f"in [-{most:g}, {most:g}]"
    for token, value in bias:
        if not 0 <= token < vocab_size:
            yield Violation(name, f"ids must be in 0 … {vocab_size - 1} (vocab_size)", token)
        if not (math.isfinite(value) and abs(value) <= most):
            yield Violation(name, f"must be {limit}, is {_number(value)}", token)


def _up_to(most: float) -> str:
    return "finite and > 0" if most == math.inf else f"in (0, {most:g}]"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
