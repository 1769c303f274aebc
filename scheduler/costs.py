"""What a step costs: t(B, K), seconds of one cycle of B rows at depth K.

Nothing is assumed of t's shape: on real devices a wider verify can be cheaper than a narrower one.
But steps are not unrelated either, and a table of independent averages wastes what they share. So
log t(B, 0 … 8) of one batch size is estimated as a vector, by a Kalman filter (Kalman 1960): every
depth's estimate has a variance, and covariances say what one measurement tells about the others.

- *Common drift.* Somebody else's load, a hot chip or a longer context slow all depths alike, so a
  slow step at one depth does not make the others look good.
- *Slope.* A step at depth 1 says something about depth 3.
- *Deviation.* Each depth has its own, neighbours similar ones (a plateau is wider than one depth);
  an unmeasured one may lie far off, until it is measured.
- First calls compile and other things interrupt: a sample counts for at most `CLIP` deviations
  above what was expected, and a slow first one of a shape for as little as first ones deserve on
  this machine. Where they turn out to compile, estimates that rest on one are dropped.
- Several surprises in a row mean that the world has changed: what was known is doubted.

What is known of other batch sizes, or of an earlier run (`CostTable`), is where a new one begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.plan import MAX_DEPTH

Vector = NDArray[np.float64]

POSITION, DRAFT = 0.02, 0.1
"""Assumed of a model nothing is known of: seconds per verified position and per drafted token, in
units of a step's fixed part."""
PLATEAU = 0.6
"""Correlation of the deviations of neighbouring depths."""
EXACT_ROWS = 8
"""Batch sizes up to this are kept apart; larger ones share up to the next power of two."""
CLIP = 2.5
FIRST_NOISE = 0.3
"""Standard deviation of log seconds assumed of a shape's first step; then measured, as the ratio
of first to second steps."""
SCALE_NOISE = 0.6
"""The same of the very first step of a batch size: it must not decide what a step takes."""
NOISE = 0.15
"""The same of others, before any is known; then measured, within `NOISE_BOUNDS`."""
NOISE_BOUNDS = (0.03, 0.4)
SUSPECT = 0.5
"""A step that took this much longer than expected (log seconds) may have compiled."""
SURPRISE = 1.8
"""Smoothed standardised error at which the world is taken to have changed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of log seconds: what all depths share, of the slope, of each alone."""

    common: float
    slope: float
    alone: float

    def covariance(self, slope: Vector) -> NDArray[np.float64]:
        depths = np.arange(len(slope))
        near = PLATEAU ** np.abs(depths[:, None] - depths)
        shared = self.common**2 + self.slope**2 * np.outer(slope, slope)
        covariance: NDArray[np.float64] = shared + self.alone**2 * near
        return covariance


UNKNOWN = Spread(10.0, 1.2, 0.3)
"""Nothing is known."""
RELATED = Spread(0.5, 0.4, 0.1)
"""Other batch sizes are known."""
TABLED = Spread(0.5, 0.15, 0.06)
"""It was measured in an earlier run, on a machine as busy as it was then."""
DRIFT = Spread(0.02, 0.004, 0.008)
"""What may change from one cycle to the next."""
CHANGE = Spread(0.3, 1.0, 0.35)
"""What may have changed after a series of surprises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measured costs to begin with. ValueError names what is out of range."""

    seconds: Mapping[tuple[int, int], float]
    """(rows, depth) → seconds of a cycle."""
    deviation: float = 0.06
    """Standard error of log seconds, of each entry: how soon newer samples outweigh it."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deviation) and self.deviation > 0):
            raise ValueError(f"deviation must be > 0 and finite, not {self.deviation}")
        for (rows, depth), seconds in self.seconds.items():
            if rows < 1:
                raise ValueError(f"rows must be >= 1, not {rows}")
            if not 0 <= depth <= MAX_DEPTH:
                raise ValueError(f"depth must be in 0 … {MAX_DEPTH}, not {depth}")
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(
                    f"seconds at {rows} rows, depth {depth} must be > 0 and finite, not {seconds}"
                )

    def at(self, rows: int) -> dict[int, float]:
        """depth → seconds at exactly this batch size."""
        return {depth: s for (size, depth), s in self.seconds.items() if size == rows}


def bucket_of(rows: int) -> int:
    """The batch size under which steps of `rows` rows are kept."""
    return rows if rows <= EXACT_ROWS else 1 << (rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Plane:
    """t(B, K) ≈ fixed + position · B · (K + 1) + draft · K: a first guess, never a bound."""

    fixed: float = 1.0
    position: float = POSITION
    draft: float = DRAFT

    def seconds(self, rows: int, depths: Vector) -> Vector:
        return self.fixed + self.position * rows * (depths + 1) + self.draft * depths

    @classmethod
    def fit(cls, points: Iterable[tuple[int, int, float]]) -> Plane:
        """Least squares of relative errors over (rows, depth, seconds). With few points, or points
        of one batch size, the assumed proportions decide what they leave open."""
        known = np.array(list(points), dtype=np.float64)
        rows, depths, seconds = known.T
        terms = np.stack([np.ones_like(rows), rows * (depths + 1), depths], axis=1)
        assumed = np.array([1.0, POSITION, DRAFT])
        unit = float(np.median(seconds / (terms @ assumed)))
        pull = 0.1 * np.eye(3)
        left = np.concatenate((terms * (assumed * unit) / seconds[:, None], pull))
        right = np.concatenate((np.ones(len(seconds)), pull.sum(axis=1)))
        solution = np.linalg.lstsq(left, right, rcond=None)[0]
        fixed, position, draft = np.maximum(solution, 1e-3) * assumed * unit
        return cls(float(fixed), float(position), float(draft))


class StepCosts:
    """log seconds of a cycle at every depth, at one batch size."""

    def __init__(self, size: int, mean: Vector, spread: Spread) -> None:
        self.size = size
        self.changes = 0
        """Times that the world was taken to have changed."""
        self.mean = mean
        self.samples = np.zeros(len(mean), dtype=np.intp)
        """Steps observed at each depth."""
        self.known = np.zeros(len(mean), dtype=bool)
        """Depths with anything behind them but an assumption."""
        self.measured = np.zeros(len(mean), dtype=bool)
        """Depths measured here, now or in an earlier run."""
        steps = np.arange(len(mean), dtype=np.float64) * (POSITION + DRAFT)
        self._slope = steps / (1 + steps)
        self.covariance = spread.covariance(self._slope)
        self._drift = DRIFT.covariance(self._slope)
        self._noise = NOISE**2
        self._surprise = 0.0

    def observe(self, depth: int, seconds: float, *, first_noise: float = 0.0) -> bool:
        """One step's time. `first_noise`: deviation of log seconds that a slow one is granted,
        because it was the first of its exact shape and may have compiled something. False when it
        seems it did."""
        sample = math.log(seconds)
        self.covariance += self._drift
        own = float(self.covariance[depth, depth])
        error = sample - float(self.mean[depth])
        slow_first = error > 0 and first_noise > 0
        noise = max(self._noise, first_noise**2) if slow_first else self._noise
        if not self.known.any():
            noise = SCALE_NOISE**2
        deviation = math.sqrt(own + noise)
        if self.known.any():
            error = min(error, CLIP * deviation)
        gain = self.covariance[:, depth] / (own + noise)
        self.mean = self.mean + gain * error
        self.covariance = self.covariance - np.outer(gain, self.covariance[depth])
        if not slow_first and self.known[depth]:
            self._watch(error, own, deviation)
        self.samples[depth] += 1
        trusted = not slow_first or min(error, first_noise) < SUSPECT or not self.known.any()
        if trusted:
            self.known[depth] = self.measured[depth] = True
        return trusted

    def _watch(self, error: float, own: float, deviation: float) -> None:
        """Measure the noise, and notice when errors are no longer noise."""
        if own < self._noise:  # else the error is mostly ignorance
            low, high = NOISE_BOUNDS
            noise = self._noise + 0.05 * (error * error - own - self._noise)
            self._noise = min(max(noise, low**2), high**2)
        standard = max(-CLIP, error / deviation)
        self._surprise += 0.4 * (standard - self._surprise)
        if abs(self._surprise) > SURPRISE:
            self._surprise = 0.0
            self.changes += 1
            self.covariance += CHANGE.covariance(self._slope)

    def deviation_from(self, depth: int) -> Vector:
        """[K]: standard deviation of log t(K) - log t(depth)."""
        own = np.diagonal(self.covariance)
        spread = own + self.covariance[depth, depth] - 2 * self.covariance[depth]
        deviation: Vector = np.sqrt(np.maximum(spread, 0.0))
        return deviation

    def assume_known(self, depths: Iterable[int], *, measured: bool) -> None:
        for depth in depths:
            self.known[depth] = True
            self.measured[depth] |= measured


class Costs:
    """t(B, K) over all batch sizes met so far."""

    def __init__(self, max_depth: int, table: CostTable | None = None) -> None:
        self._depths = np.arange(max_depth + 1, dtype=np.float64)
        self._buckets: dict[int, StepCosts] = {}
        self._firsts: dict[tuple[int, int], float] = {}
        """(rows, depth) → seconds of its first step in this process, 0 once it has run again."""
        self._first_noise = FIRST_NOISE
        self._take(table)

    def _take(self, table: CostTable | None) -> None:
        if table is None:
            return
        last = len(self._depths) - 1
        points = [(b, k, s) for (b, k), s in table.seconds.items() if k <= last]
        if not points:
            return
        plane = Plane.fit(points)
        for size in sorted({bucket_of(rows) for rows, _, _ in points}):
            # A shared bucket takes the costs of its largest batch size in the table.
            rows = max(rows for rows, _, _ in points if bucket_of(rows) == size)
            found = {k: math.log(s) for b, k, s in points if b == rows}
            guess = np.log(plane.seconds(rows, self._depths))
            near = sorted(found)
            offsets = np.interp(self._depths, near, [found[k] - guess[k] for k in near])
            spread = replace(TABLED, alone=max(TABLED.alone, table.deviation))
            costs = StepCosts(size, guess + offsets, spread)
            costs.assume_known(near, measured=True)
            self._buckets[size] = costs

    def bucket(self, rows: int) -> StepCosts:
        """The costs at this batch size; made from what is known of others when it is new."""
        size = bucket_of(rows)
        found = self._buckets.get(size)
        if found is None:
            found = self._buckets[size] = self._derived(size)
        return found

    def _derived(self, size: int) -> StepCosts:
        informed = [bucket for bucket in self._buckets.values() if bucket.measured.any()]
        if not informed:
            return StepCosts(size, np.log(Plane().seconds(size, self._depths)), UNKNOWN)
        plane = Plane.fit(
            (bucket.size, int(depth), math.exp(bucket.mean[depth]))
            for bucket in informed
            for depth in np.flatnonzero(bucket.measured)
        )
        below = max((b for b in informed if b.size < size), key=lambda b: b.size, default=None)
        above = min((b for b in informed if b.size > size), key=lambda b: b.size, default=None)
        near = [bucket for bucket in (below, above) if bucket is not None]
        distance = [abs(math.log2(bucket.size / size)) for bucket in near]
        shares = [1.0] if len(near) == 1 else [d / sum(distance) for d in reversed(distance)]
        mean = np.log(plane.seconds(size, self._depths))
        for bucket, share in zip(near, shares, strict=True):
            mean += share * (bucket.mean - np.log(plane.seconds(bucket.size, self._depths)))
        costs = StepCosts(size, mean, RELATED)
        for bucket in near:
            costs.assume_known(np.flatnonzero(bucket.known).tolist(), measured=False)
        return costs

    def observe(self, rows: int, depth: int, seconds: float) -> bool:
        """One step's time. False when it seems to have compiled something."""
        shape = (rows, depth)
        first = shape not in self._firsts
        if first:
            self._firsts[shape] = seconds
        elif self._firsts[shape]:
            excess = min(abs(math.log(self._firsts[shape] / seconds)), 10.0)
            if excess > 2 * SUSPECT > self._first_noise:
                self._drop_firsts()
            self._first_noise += 0.5 * (excess - self._first_noise)
            self._firsts[shape] = 0.0
        noise = self._first_noise if first else 0.0
        return self.bucket(rows).observe(depth, seconds, first_noise=noise)

    def _drop_firsts(self) -> None:
        """First steps compile on this machine: begin again from what rests on more than one."""
        old = [b for b in self._buckets.values() if b.samples.any()]
        self._buckets = {b.size: b for b in self._buckets.values() if not b.samples.any()}
        for bucket in old:
            again = self.bucket(bucket.size)
            for depth in np.flatnonzero(bucket.samples > 1):
                again.observe(int(depth), math.exp(bucket.mean[depth]))

    def measured(self) -> dict[tuple[int, int], float]:
        """(batch bucket, depth) → seconds, of what was measured more than once, now or in an
        earlier run."""
        return {
            (size, int(depth)): math.exp(bucket.mean[depth])
            for size, bucket in self._buckets.items()
            for depth in np.flatnonzero(bucket.measured & (bucket.samples != 1))
        }
