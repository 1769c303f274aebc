"""What prompts cost: seconds that chunks add to a step, learned from the steps that carried some.

    seconds = chunk · chunks + token · tokens + reach · Σ tokens · position + mixed · (a cycle ran)

is fitted to what a step took beyond its decode cycle, by a Kalman filter (Kalman 1960) over the
four coefficients, which may drift. `mixed` takes up what a cycle beside chunks costs more, or less,
than alone, stale estimates of the cycle included.

- The scale to begin with is that of a decode cycle (`guess`) or, where prompts came first, of the
  first step that counts, in assumed proportions. One step beside a cycle tells too little for it.
- A sample counts for at most `CLIP` deviations, a slow one for `CLIP_SLOW`; several surprises in
  a row mean that the world has changed, and what was known is doubted.
- Which steps count is the caller's business: first ones of a shape compile, and must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

SHAPE = np.array([0.3, 1.0 / 32, 0.01 / 32, 0.0])
"""Assumed proportions: a chunk of 32 tokens takes 1.3 where its tokens take 1; 1,024 positions
before a token make it a hundredth slower."""
DOUBT = np.array([0.6, 2.0 / 32, 0.1 / 32])
"""Standard deviations of the first three, in the same units."""
MIXED_DOUBT = 0.2
"""Standard deviation of `mixed` in units of the first sample."""
CYCLES = 1.5
"""A chunk of 32 tokens is guessed to take so many decode cycles, when nothing else is known: about
what the bundled model takes on a CPU. Devices that read many tokens as fast as one take less."""
DRIFT = 0.01
"""What may change from one sample to the next, as a share of each coefficient's first doubt."""
CLIP, CLIP_SLOW = 2.5, 1.5
"""A step is interrupted more easily than sped up."""
NOISE = 0.15
"""Standard deviation of log seconds assumed of a step; then measured, within `NOISE_BOUNDS`."""
NOISE_BOUNDS = (0.02, 0.4)
SURPRISE = 1.8
"""Smoothed standardised error at which the world is taken to have changed."""
REACH_UNIT = 1024.0


@dataclass(frozen=True, slots=True)
class Work:
    """Chunks of one step."""

    chunks: int = 0
    tokens: int = 0
    reach: float = 0.0
    """Σ tokens · middle position / `REACH_UNIT`."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.chunks + other.chunks, self.tokens + other.tokens, self.reach + other.reach
        )

    @classmethod
    def chunk(cls, tokens: int, start: int) -> Work:
        return cls(1, tokens, tokens * (start + tokens / 2) / REACH_UNIT)

    def terms(self, *, mixed: bool) -> Vector:
        return np.array([self.chunks, self.tokens, self.reach, float(mixed)])


class PrefillCosts:
    """Seconds of prefill work."""

    def __init__(self) -> None:
        self.samples = 0
        """Steps learned from."""
        self.changes = 0
        """Times that the world was taken to have changed."""
        self._mean: Vector = np.zeros(4)
        self._covariance = np.zeros((4, 4))
        self._drift = np.zeros((4, 4))
        self._noise = NOISE**2
        self._surprise = 0.0
        self._guessed = math.inf
        """Seconds of the cycle behind the guess."""

    @property
    def noise(self) -> float:
        """Standard deviation of a step's seconds, as a share of them."""
        return math.sqrt(self._noise)

    def guess(self, cycle_s: float) -> None:
        """Until a sample comes, go by what a decode cycle takes, at the fastest: interruptions only
        slow it down."""
        if not self.samples and 0 < cycle_s < self._guessed:
            self._guessed = cycle_s
            self._begin(SHAPE * (cycle_s * CYCLES / 1.3), cycle_s)

    def seconds(self, work: Work, *, mixed: bool) -> tuple[float, float]:
        """What this work adds to a step, and the standard deviation of this estimate. `mixed`: a
        decode cycle runs too."""
        terms = work.terms(mixed=mixed and work.chunks > 0)
        seconds = float(terms @ self._mean)
        if not self.samples:  # a guess is taken at its word: doubt would keep it from being tried
            return seconds, 0.0
        return seconds, math.sqrt(float(terms @ self._covariance @ terms))

    def observe(self, work: Work, *, mixed: bool, step_s: float, cycle_s: float) -> None:
        """A step with this work took `step_s`, of which its cycle is estimated to be `cycle_s`."""
        terms = work.terms(mixed=mixed)
        value = step_s - cycle_s
        if not self._covariance.any():  # nothing to go by: it was no cycle's neighbour, then
            self._begin(SHAPE * (max(value, 0.05 * step_s) / float(SHAPE @ terms)), step_s)
        self.samples += 1
        self._covariance = self._covariance + self._drift
        along = self._covariance @ terms
        expected = max(cycle_s + float(terms @ self._mean), 0.1 * step_s)
        own, noise = float(terms @ along), self._noise * expected**2
        deviation = math.sqrt(own + noise)
        error = value - float(terms @ self._mean)
        clipped = min(max(error, -CLIP * deviation), CLIP * deviation)
        believed = min(clipped, CLIP_SLOW * deviation)
        self._mean = self._mean + along * (believed / (own + noise))
        self._mean[:3] = np.maximum(self._mean[:3], 0.0)
        self._covariance = self._covariance - np.outer(along, along) / (own + noise)
        self._watch(clipped, own, noise, deviation, expected)

    def _begin(self, mean: Vector, step_s: float) -> None:
        unit = float(mean[1] / SHAPE[1])
        doubt = np.append(DOUBT * unit, MIXED_DOUBT * step_s)
        self._mean = mean.copy()
        self._covariance = np.diag(doubt**2)
        self._drift = np.diag((DRIFT * doubt) ** 2)

    def _watch(
        self, error: float, own: float, noise: float, deviation: float, step_s: float
    ) -> None:
        """Measure the noise, and notice when errors are no longer noise."""
        if own < noise:  # else the error is mostly ignorance
            low, high = NOISE_BOUNDS
            excess = (error * error - own) / step_s**2 - self._noise
            self._noise = min(max(self._noise + 0.05 * excess, low**2), high**2)
        self._surprise += 0.4 * (error / deviation - self._surprise)
        if abs(self._surprise) > SURPRISE:
            self._surprise = 0.0
            self.changes += 1
            self._covariance = self._covariance + self._drift * (0.5 / DRIFT) ** 2
