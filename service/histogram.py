"""Equal observations of a histogram, at the price of one."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


def observe_times(histogram: Histogram, amount: float, count: int) -> None:
    """As `count` calls of `histogram.observe(amount)`. The library has no such call; a burst of
    tokens is several equal observations, for every stream and cycle."""
    bucket = bisect_left(histogram._upper_bounds, amount)  # the last bound is infinity
    histogram._sum.inc(amount * count)
    histogram._buckets[bucket].inc(count)
