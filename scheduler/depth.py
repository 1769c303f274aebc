"""How many tokens to draft in the next cycle.

`AutoDepth` maximises expected tokens per second of the cohort:

    rate(K) = sum over rows of E(min(K, cap of the row)) / t(bucket, K)
    E(K)    = 1 + p1 + p1 p2 + … + p1 … pK

where t is the measured step time for a bucket of batch sizes and p_j the measured probability that
draft j stands given that drafts 1 … j-1 did. Nothing is assumed of t: verify widths step up and
down on real devices, so every depth is measured, depth 0 among them.

- A new bucket is *toured*, from depth 0 up: each depth runs until it has one sample, as long as one
  more draft would pay if it were free (a few cycles; touring depths beyond that would cost a short
  request more than it could win). What lies further is left to probes.
- After that the best depth is kept until another is better by `MARGIN`.
- Every so often the depth measured longest ago, or never, is *probed* for two cycles. Once all are
  known, probes double their distance while they change nothing; and what probes lose stays under
  `PROBE_SHARE` of the time.
- A depth is neither toured nor probed while it could not win even at the cheapest step time known:
  when hardly any draft stands, deep steps are not worth a look.
- Acceptance fades with every cycle towards an optimistic prior, so a depth switched off on old
  evidence gets another try, and so do deeper positions that are no longer reached.
- First calls compile kernels. The first step of a (bucket, depth) is not measured, the first of an
  exact shape can only lower an estimate, the lowest of three samples starts one, and later
  outliers are clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.plan import MAX_DEPTH, RowResult
from scheduler.config import Depth
from scheduler.sequence import per_position

MARGIN = 0.05
"""A depth must promise this much more tokens per second to replace the current one."""
FADE = 0.99
"""Weight that evidence about acceptance keeps per cycle: half of it is gone after 69 cycles."""
PRIOR, PRIOR_WEIGHT = 0.7, 1.0
"""Acceptance assumed without evidence, and how many trials that assumption is worth."""
TIME_WEIGHT = 0.2
"""Weight of the newest sample in a step time."""
DOUBT_WEIGHT = 0.6
"""The same when the estimate is old, or so much higher that it must have been an outlier."""
CLIP = 3.0
"""A sample counts for at most this many times the current estimate."""
START_SAMPLES = 3
"""Samples of which the lowest starts an estimate."""
TOUR_CYCLES = 6
"""Cycles after which a tour gives up on a depth (no step time was reported); probes take over."""
PROBE_CYCLES = 2
PROBE_EVERY = (32, 256)
"""Cycles between probes: first, and at most (but see `PROBE_SHARE`)."""
PROBE_SHARE = 0.03
"""Share of the time that probes may lose: after a costly one the next waits accordingly."""
FIRST_DEPTH = 1
"""Used before anything was measured, as in steps that also prefill: pays almost everywhere, and
costs little where it does not."""


class DepthPolicy(Protocol):
    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        """Depth of the next cycle, 0 … max(caps). `caps`: one per row of the cohort, not empty.
        `prefilling`: the step also runs prompt chunks, so its time says nothing about depth."""

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        """What a cycle of `rows` rows brought; `device_s` is None when it is not comparable."""

    def step_times(self) -> Mapping[tuple[int, int], float]:
        """Measured seconds per (batch bucket, depth)."""


def depth_policy(depth: Depth, max_depth: int) -> DepthPolicy:
    return AutoDepth(max_depth) if depth == "auto" else FixedDepth(min(depth, max_depth))


class FixedDepth:
    """The same depth always, as far as some row of the cohort wants it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        return min(self._depth, max(caps))

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        pass

    def step_times(self) -> Mapping[tuple[int, int], float]:
        return {}


class Acceptance:
    """Per position: how often a draft stood when it was reached. Fades per cycle."""

    def __init__(self, depth: int) -> None:
        self._tried = [0.0] * depth
        self._stood = [0.0] * depth

    def observe(self, results: Iterable[RowResult]) -> None:
        tried, stood = [0] * (MAX_DEPTH + 1), [0] * (MAX_DEPTH + 1)
        for result in results:
            if result.drafted:
                tried[min(result.accepted + 1, result.drafted)] += 1
                stood[result.accepted] += 1
        self._fade_and_add(self._tried, per_position(tried))
        self._fade_and_add(self._stood, per_position(stood))

    @staticmethod
    def _fade_and_add(totals: list[float], counts: tuple[int, ...]) -> None:
        for j in range(len(totals)):
            totals[j] = totals[j] * FADE + (counts[j] if j < len(counts) else 0)

    def probability(self, j: int) -> float:
        """That draft j + 1 stands, given that the ones before it did."""
        return (self._stood[j] + PRIOR * PRIOR_WEIGHT) / (self._tried[j] + PRIOR_WEIGHT)

    def expected_tokens(self) -> list[float]:
        """[K]: tokens one row is expected to emit in a cycle at depth K."""
        expected, reach = [1.0], 1.0
        for j in range(len(self._tried)):
            reach *= self.probability(j)
            expected.append(expected[-1] + reach)
        return expected


@dataclass(slots=True)
class _Cost:
    """Step time at one depth in one bucket."""

    seconds: float = 0.0
    samples: int = 0
    steps: int = 0
    toured: int = 0
    last: int = -1
    """Cycle of the last sample."""

    def add(self, seconds: float, *, cycle: int, first_of_shape: bool) -> None:
        self.steps += 1
        if self.steps == 1:
            return
        if self.samples == 0:
            self.seconds = seconds
        elif self.samples < START_SAMPLES:
            self.seconds = min(self.seconds, seconds)
        else:
            doubtful = cycle - self.last > PROBE_EVERY[0] or 2 * seconds < self.seconds
            most = self.seconds * (1.0 if first_of_shape else CLIP)
            weight = DOUBT_WEIGHT if doubtful else TIME_WEIGHT
            self.seconds += weight * (min(seconds, most) - self.seconds)
        self.samples += 1
        self.last = cycle


@dataclass(slots=True)
class _Bucket:
    """What is known about one range of batch sizes."""

    depth: int
    costs: list[_Cost]
    next_probe: int
    interval: int = field(default=PROBE_EVERY[0])
    probing: int = 0
    """Depth being probed."""
    probes_left: int = 0
    probed: int = -1
    """Cycle in which the last probe ended and what it lost is not yet earned back, or -1."""

    def rates(self, tokens: list[float]) -> dict[int, float]:
        """Tokens per second by measured depth; `tokens[K]` is what a cycle is expected to emit."""
        return {
            depth: tokens[depth] / cost.seconds
            for depth, cost in enumerate(self.costs[: len(tokens)])
            if cost.samples
        }

    def promising(self, tokens: list[float], rates: dict[int, float]) -> list[int]:
        """Depths other than the best one that might beat it if they were cheap enough."""
        if not rates:
            return list(range(len(tokens)))
        cheapest = min(cost.seconds for cost in self.costs if cost.samples)
        enough = max(rates.values()) * cheapest * (1 + MARGIN)
        return [depth for depth, expected in enumerate(tokens) if expected > enough]

    def tour(self, depths: list[int], tokens: list[float], rates: dict[int, float]) -> int | None:
        """The first of `depths` that has no step time, was not given up on, and would win if it
        cost no more than the deepest measured depth before it."""
        enough = max(rates.values(), default=0.0) * (1 + MARGIN)
        for depth in depths:
            cost = self.costs[depth]
            if cost.samples or cost.toured >= TOUR_CYCLES:
                continue
            before = [cost.seconds for cost in self.costs[:depth] if cost.samples]
            if not before or tokens[depth] / before[-1] > enough:
                cost.toured += 1
                return depth
        return None

    def settle(self, rates: dict[int, float], cycle: int) -> None:
        """Move to the best depth if it beats the current one by MARGIN."""
        best = max(rates, key=lambda depth: rates[depth], default=self.depth)
        if best != self.depth and rates[best] > rates.get(self.depth, 0.0) * (1 + MARGIN):
            self.depth = best
            self.interval = PROBE_EVERY[0]
            self.next_probe = cycle + self.interval

    def probe(
        self, depths: list[int], tokens: list[float], rates: dict[int, float], cycle: int
    ) -> int | None:
        """The one of `depths` to probe now, or None."""
        if self.probed >= 0 and cycle >= self.next_probe:
            self.next_probe = max(self.next_probe, self.probed + self._recovery(tokens, rates))
            self.probed = -1
        if not self.probes_left and cycle >= self.next_probe:
            others = [depth for depth in depths if depth != self.depth]
            if all(self.costs[depth].samples for depth in others):
                self.interval = min(2 * self.interval, PROBE_EVERY[1])
            self.next_probe = cycle + self.interval
            if others:
                self.probing = min(others, key=lambda depth: self.costs[depth].last)
                self.probes_left = PROBE_CYCLES
        if not self.probes_left:
            return None
        self.probes_left -= 1
        if not self.probes_left:
            self.probed = cycle
        return self.probing

    def _recovery(self, tokens: list[float], rates: dict[int, float]) -> int:
        """Cycles that must pass for what the last probe lost to be `PROBE_SHARE` of the time."""
        if self.probing >= len(tokens) or not (rates and self.costs[self.depth].seconds):
            return 0
        worth = tokens[self.probing] / max(rates.values())
        lost = PROBE_CYCLES * max(0.0, self.costs[self.probing].seconds - worth)
        return int(lost / (PROBE_SHARE * self.costs[self.depth].seconds))


class AutoDepth:
    """Chooses from measurements; see the module docstring."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._acceptance = Acceptance(max_depth)
        self._buckets: dict[int, _Bucket] = {}
        self._seen: set[tuple[int, int]] = set()
        """Shapes (rows, depth) that have run once."""
        self._cycle = 0

    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        self._cycle += 1
        deepest = min(max(caps), self._max_depth)
        if deepest == 0:
            return 0
        bucket = self._bucket(len(caps))
        if prefilling:
            return min(bucket.depth, deepest)
        tokens = self._cohort_tokens(caps, deepest)
        rates = bucket.rates(tokens)
        promising = bucket.promising(tokens, rates)
        if (depth := bucket.tour(promising, tokens, rates)) is not None:
            return depth
        bucket.settle(rates, self._cycle)
        if (depth := bucket.probe(promising, tokens, rates, self._cycle)) is not None:
            return min(depth, deepest)
        return min(bucket.depth, deepest)

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        self._acceptance.observe(results)
        if device_s:
            first = (rows, depth) not in self._seen
            self._seen.add((rows, depth))
            cost = self._bucket(rows).costs[depth]
            cost.add(device_s, cycle=self._cycle, first_of_shape=first)

    def step_times(self) -> Mapping[tuple[int, int], float]:
        return {
            (size, depth): cost.seconds
            for size, bucket in self._buckets.items()
            for depth, cost in enumerate(bucket.costs)
            if cost.samples
        }

    def _bucket(self, rows: int) -> _Bucket:
        """Batch sizes up to the same power of two share a bucket. A new one starts at the depth of
        the nearest smaller one."""
        size = 1 << (rows - 1).bit_length()
        if size not in self._buckets:
            smaller = [other for other in self._buckets if other < size]
            depth = self._buckets[max(smaller)].depth if smaller else FIRST_DEPTH
            self._buckets[size] = _Bucket(
                depth=min(depth, self._max_depth),
                costs=[_Cost() for _ in range(self._max_depth + 1)],
                next_probe=self._cycle + PROBE_EVERY[0],
            )
        return self._buckets[size]

    def _cohort_tokens(self, caps: list[int], deepest: int) -> list[float]:
        """[K]: tokens the whole cohort is expected to emit in a cycle at depth K."""
        expected = self._acceptance.expected_tokens()
        rows = [0] * (deepest + 1)
        for cap in caps:
            rows[min(cap, deepest)] += 1
        tokens = []
        capped, free = 0.0, len(caps)  # rows whose cap is below K, and the others
        for depth in range(deepest + 1):
            tokens.append(capped + free * expected[depth])
            capped += rows[depth] * expected[depth]
            free -= rows[depth]
        return tokens
