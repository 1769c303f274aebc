"""How large a soak is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of one soak."""

    seconds: float
    """From the first call to the last one sent; what is under way then is waited for."""
    rows: int
    """Rows of the server, and streams that must be seen running at once."""
    waiting: int
    """Requests that must be seen in the queue at once; the queue holds some more."""
    workers: int
    """Well-behaved clients that send one call after the other."""
    longest: int
    """Most tokens of an ordinary text."""
    crowd_tokens: int
    """Of the texts that keep all rows busy while the queue fills."""
    connections: int
    """Connections that are opened in one go."""
    max_connections: int
    """The server's bound."""
    big_bytes: int
    """Size of the messages that are too large."""
    slow_readers: int
    sample_s: float
    """Between two samples of the server's memory."""
    growth_limit_mb_h: float | None
    """Slope of memory above which it grows; None where the time is too short to tell a slope."""
    level_limit: float
    """The median memory of the last third of the time may be above that of the second by this
    share. In a short soak kept prefixes are still filling their budget."""
    round_s: float
    """Between two rounds of each attack."""

    @property
    def max_queue(self) -> int:
        return self.waiting + max(self.waiting // 20, 4)

    @property
    def max_calls(self) -> int:
        return 2 * (self.rows + self.waiting)


def full(seconds: float) -> Scale:
    """What was asked for."""
    return Scale(
        seconds=seconds,
        rows=256,
        waiting=2000,
        workers=320,
        longest=48,
        crowd_tokens=400,
        connections=10_000,
        max_connections=4096,
        big_bytes=100 * 1024 * 1024,
        slow_readers=8,
        sample_s=10.0 if seconds >= 600 else 3.0,
        growth_limit_mb_h=40.0,
        level_limit=0.05,
        round_s=60.0,
    )


def short(seconds: float) -> Scale:
    """The same in little, for a test on two busy cores."""
    return Scale(
        seconds=seconds,
        rows=16,
        waiting=80,
        workers=24,
        longest=12,
        crowd_tokens=200,
        connections=600,
        max_connections=400,
        big_bytes=40 * 1024 * 1024,
        slow_readers=2,
        sample_s=1.0,
        growth_limit_mb_h=None,
        level_limit=0.25,
        round_s=10.0,
    )
