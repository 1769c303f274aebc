"""How fast the queue moves, measured: what a prompt token and a place cost those behind them.

After each plan somebody waits for a reason: for the next step's budget of prompt tokens, for room
(a row, pages), or nobody waits. The time until the next plan is put down to that reason, so the
times do not overlap, and a request behind n others with w tokens waits about

    w * (seconds for budget per prompt token) + n * (seconds for room per start)

Time in which nobody waited says nothing about what this machine can do, and is left out.

A tenant that may run m rows waits for its own, too, however fast the queue moves: with n of its own
before it, a request starts when the (n mod m)-th of the rows there are has ended, and n div m times
as long as a row of its takes after that (`own_turn`). The two waits pass together,
so the longer one holds: their sum was up to a half too long, and its fast end refuses
calls that would have started in time. What one waits for others once an own row has ended is not in
it.

Rows take as long as they generate, which few rounds do not average out: over 346 random histories
one start in sixteen comes later than the likely estimate, a third of it and four steps, about as
often without others on the machine as with them; one in 400 comes before the least estimate. So a
refused call would almost certainly have missed its deadline, and one that is let in may still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from math import sqrt
from statistics import mean, median, pstdev
from typing import Final, NamedTuple

SAMPLES: Final = 64
"""Newest steps, or starts, that count."""

LEAST: Final = 8
"""Fewer than this many are no evidence."""


class Waits(Enum):
    """What those that wait after a plan wait for."""

    NOBODY = auto()
    BUDGET = auto()
    ROOM = auto()


class Estimate(NamedTuple):
    """Seconds."""

    likely: float
    least: float
    """At the fast end of what was measured, by one standard error."""


class Throughput:
    """Fed at every plan."""

    def __init__(self) -> None:
        self._at = 0.0
        self._waits = Waits.NOBODY
        self._budget_s = self._room_s = 0.0
        """Spent since the last prompt token, or start."""
        self._per_token: deque[float] = deque(maxlen=SAMPLES)
        self._per_start: deque[float] = deque(maxlen=SAMPLES)
        self._started: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        """(prompt tokens prefilled, expected to be) of those that started."""

    @property
    def waits(self) -> Waits:
        """What those wait for whom the last plan left."""
        return self._waits

    def start(self, *, prefilled: int, expected: int) -> None:
        """A request starts, and some of its prompt is there already."""
        self._started.append((prefilled, expected))

    def plan(self, *, tokens: int, starts: int, waits: Waits, now: float) -> None:
        """A plan has put `tokens` of prompts on a step and started `starts` requests; those left
        wait for `waits`."""
        if self._waits is Waits.BUDGET:
            self._budget_s += now - self._at
        elif self._waits is Waits.ROOM:
            self._room_s += now - self._at
        if self._waits is not Waits.NOBODY:
            self._sample(tokens, starts)
        if waits is Waits.NOBODY:
            self._budget_s = self._room_s = 0.0
        self._waits, self._at = waits, now

    def _sample(self, tokens: int, starts: int) -> None:
        if tokens and self._budget_s:
            self._per_token.append(self._budget_s / tokens)
            self._budget_s = 0.0
        for _ in range(starts):
            self._per_start.append(self._room_s)
            self._room_s = 0.0

    def seconds(self, *, tokens: float, starts: float, begun: int) -> Estimate:
        """Seconds until `starts` requests with `tokens` of prompts have started and `begun` prompt
        tokens of running ones are done. A part of which too little is known counts nothing."""
        likely = least = 0.0
        if len(self._per_token) >= LEAST:
            # The median: a first call of a shape compiles, and takes a hundred times as long.
            part = (begun + tokens * self._fresh()) * median(self._per_token)
            likely, least = likely + part, least + _fast(part, len(self._per_token))
        if len(self._per_start) >= LEAST:
            part = starts * sum(self._per_start) / len(self._per_start)
            likely, least = likely + part, least + _fast(part, len(self._per_start))
        return Estimate(likely, least)

    def _fresh(self) -> float:
        """Share of the expected prompt tokens that was not kept from before."""
        expected = sum(e for _, e in self._started)
        return sum(p for p, _ in self._started) / expected if expected else 1.0


def own_turn(times: Sequence[float], held: Iterable[float], *, most: int, ahead: int) -> Estimate:
    """Seconds until a tenant's request starts that has `ahead` others of the tenant's before it and
    waits for nothing but its `most` rows. `times`: seconds that earlier rows of the tenant's were
    held; `held`: those that are there have been so far, inf for one that is about to go. 0 when too
    little is known, or a row is free."""
    if len(times) < LEAST:
        return Estimate(0.0, 0.0)
    rest = [[t - so_far for t in times if t > so_far] or [0.0] for so_far in held]
    free = [0.0] * (most - len(rest))
    rounds, index = divmod(ahead, most)
    likely = sorted(free + [mean(left) for left in rest])[index] + rounds * mean(times)
    least = sorted(free + [min(left) for left in rest])[index]
    spread = 2 * pstdev(times) * sqrt(ahead) / most  # of the sum of so many, two deviations
    return Estimate(likely, least + max(0.0, rounds * _fast(mean(times), len(times)) - spread))


def _fast(seconds: float, samples: int) -> float:
    return seconds / (1 + 1 / sqrt(samples))
