"""The server's size while it is soaked, and whether it grows."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.benchmarks.soak.process import Served
from tests.benchmarks.soak.scale import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the server."""

    at: float
    """Seconds since the first call."""
    rss_mb: float
    device_active_mb: float
    device_cache_mb: float
    files: int
    threads: int
    cpu_s: float
    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    boundaries_used: int
    sessions: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look(server: Served, began: float) -> Sample:
    """Raises OSError when the metrics page does not answer."""
    metrics = server.metrics()

    def gauge(name: str) -> int:
        return int(metrics[f"selfdraft_{name}"])

    def device(kind: str) -> float:
        return round(metrics[f'selfdraft_device_memory_bytes{{kind="{kind}"}}'] / 1e6, 1)

    return Sample(
        at=round(time.monotonic() - began, 1),
        rss_mb=round(server.rss() / 1e6, 1),
        device_active_mb=device("active"),
        device_cache_mb=device("cache"),
        files=server.files(),
        threads=server.threads(),
        cpu_s=round(server.cpu_s(), 1),
        running=gauge("requests_running"),
        waiting=gauge("requests_waiting"),
        pages_used=gauge("kv_pages_used"),
        pages_cached=gauge("kv_pages_cached"),
        boundaries_used=gauge("boundaries_used"),
        sessions=gauge("sessions"),
    )


async def watch(server: Served, began: float, every_s: float, into: list[Sample]) -> None:
    """Looks until cancelled."""
    while True:
        into.append(await asyncio.to_thread(look, server, began))
        await asyncio.sleep(every_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A line through the resident memory of the last two thirds of a soak."""

    slope_mb_h: float
    error_mb_h: float
    """Standard error of the slope, with the residuals' correlation from one sample to the next."""
    noise_mb: float
    """Standard deviation of the residuals."""
    middle_mb: float
    """Median of the second third."""
    last_mb: float
    """Median of the last third."""

    def flat(self, scale: Scale) -> bool:
        """The slope is not above the limit by more than twice its error, nor has the level risen
        above its own."""
        limit = scale.growth_limit_mb_h
        if limit is not None and self.slope_mb_h - 2 * self.error_mb_h > limit:
            return False
        return self.last_mb <= self.middle_mb * (1 + scale.level_limit)


def growth(samples: Sequence[Sample]) -> Growth:
    """Of at least nine samples under one kind of load; the first third of the time is warm-up:
    kept prefixes fill their budget, the allocator finds its level."""
    begin, end = samples[0].at, samples[-1].at
    third = (end - begin) / 3
    settled = [sample for sample in samples if sample.at >= begin + third]
    hours = [sample.at / 3600 for sample in settled]
    sizes = [sample.rss_mb for sample in settled]
    slope, start = statistics.linear_regression(hours, sizes)
    rest = [size - start - slope * hour for hour, size in zip(hours, sizes, strict=True)]
    noise = statistics.stdev(rest)
    spread = math.sqrt(sum((hour - statistics.fmean(hours)) ** 2 for hour in hours))
    tied = 0.0
    if noise:
        tied = statistics.correlation(rest[:-1], rest[1:]) if len(set(rest)) > 2 else 0.0
    tied = min(max(tied, 0.0), 0.95)
    error = noise / spread * math.sqrt((1 + tied) / (1 - tied))
    last = [sample.rss_mb for sample in settled if sample.at >= end - third]
    middle = [sample.rss_mb for sample in settled if sample.at < end - third]
    return Growth(
        slope_mb_h=round(slope, 1),
        error_mb_h=round(error, 1),
        noise_mb=round(noise, 1),
        middle_mb=statistics.median(middle),
        last_mb=statistics.median(last),
    )
