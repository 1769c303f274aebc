"""When requests come and how long they are: seeded arrival processes and lengths, and trace files.

Arrival processes yield ascending times in seconds:

- `poisson`: exponential gaps; the number in any interval is Poisson.
- `bursts`: a Markov-modulated Poisson process with two states (Fischer and Meier-Hellstern, "The
  Markov-modulated Poisson process (MMPP) cookbook", 1993), quiet and busy for exponential times.
- `diurnal`: a sinusoidal rate, by thinning (Lewis and Shedler, 1979).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from scheduler.request import Priority
from scheduler.simulation.engine import MOST_TOKENS

P95 = 1.6448536269514722
"""The standard normal law's 95th percentile."""


class TraceError(ValueError):
    """A line of a trace file cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A positive quantity: lognormal by its median and 95th percentile, or constant."""

    median: float
    p95: float | None = None
    """None: always the median."""
    low: float = 0.0
    high: float = math.inf
    """Samples are cut off at these."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median) and self.median > 0):
            raise ValueError(f"median must be finite and > 0, not {self.median}")
        if self.p95 is not None and not (math.isfinite(self.p95) and self.p95 >= self.median):
            raise ValueError(f"p95 must be finite and >= the median, not {self.p95}")
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low must be in 0 … high, not {self.low}")

    def sample(self, rng: random.Random) -> float:
        value = self.median
        if self.p95 is not None:
            value *= math.exp(rng.gauss(0, 1) * math.log(self.p95 / self.median) / P95)
        return min(max(value, self.low), self.high)

    def tokens(self, rng: random.Random) -> int:
        """A sample as a number of tokens, 1 … `MOST_TOKENS`."""
        return min(max(1, round(self.sample(rng))), MOST_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of an open-loop load, and the fields of a trace file's lines."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    """Requests of one session go on from one another: what a prompt has room for of the
    conversation so far is its beginning."""
    priority: str = Priority.DEFAULT.name.lower()
    tenant: str = ""
    deadline_s: float | None = None
    """Seconds after its arrival."""


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrivals at `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(
    rng: random.Random, *, quiet_rate: float, busy_rate: float, quiet_s: float, busy_s: float
) -> Iterator[float]:
    """Arrivals at two rates in turn, each for exponential times of these means; quiet first."""
    now, busy = 0.0, False
    end = rng.expovariate(1 / quiet_s)
    while True:
        rate = busy_rate if busy else quiet_rate
        gap = rng.expovariate(rate) if rate else math.inf
        if now + gap < end:
            now += gap
            yield now
        else:  # exponential gaps have no memory: begin anew in the other state
            now, busy = end, not busy
            end = now + rng.expovariate(1 / (busy_s if busy else quiet_s))


def diurnal(
    rng: random.Random, *, rate: float, amplitude: float, period_s: float
) -> Iterator[float]:
    """Arrivals at rate · (1 - amplitude · cos(2π t / period)): the night first."""
    peak = rate * (1 + amplitude)
    for now in poisson(rng, peak):
        here = rate * (1 - amplitude * math.cos(2 * math.pi * now / period_s))
        if rng.random() * peak < here:
            yield now


def until(times: Iterable[float], end: float) -> Iterator[float]:
    for time in times:
        if time >= end:
            return
        yield time


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request in a mix."""

    prompt_tokens: Amount
    output_tokens: Amount
    share: float = 1.0
    """Of the requests, relative to the other kinds."""
    priority: str = Priority.DEFAULT.name.lower()
    tenant: str = ""
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.share) and self.share > 0):
            raise ValueError(f"share must be finite and > 0, not {self.share}")
        priority_of(self.priority)
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be > 0, not {self.deadline_s}")


def mixed(times: Iterable[float], kinds: Iterable[Kind], rng: random.Random) -> Iterator[Arrival]:
    """A request of a random kind at each time."""
    choices = list(kinds)
    shares = [kind.share for kind in choices]
    for time in times:
        kind = rng.choices(choices, shares)[0] if len(choices) > 1 else choices[0]
        yield Arrival(
            arrival_s=time,
            prompt_tokens=kind.prompt_tokens.tokens(rng),
            output_tokens=kind.output_tokens.tokens(rng),
            priority=kind.priority,
            tenant=kind.tenant,
            deadline_s=kind.deadline_s,
        )


def priority_of(name: str) -> Priority:
    """Raises ValueError for a class that does not exist."""
    try:
        return Priority[name.upper()]
    except KeyError:
        known = ", ".join(p.name.lower() for p in Priority)
        raise ValueError(f"priority must be one of {known}, not {name!r}") from None


# --- trace files ---------------------------------------------------------------------------------

_NUMBERS = {"arrival_s": (int, float), "prompt_tokens": (int,), "output_tokens": (int,)}
_NAMES = frozenset(f.name for f in fields(Arrival))


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """A JSONL trace, one `Arrival` per line, by time. Raises TraceError naming line and field."""
    arrivals = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("must be a JSON object")
            arrivals.append(_arrival(content))
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def _arrival(content: Mapping[str, Any]) -> Arrival:
    if unknown := sorted(set(content) - _NAMES):
        raise ValueError(f"{unknown[0]}: no such field; there are {', '.join(sorted(_NAMES))}")
    for name, kinds in _NUMBERS.items():
        value = content.get(name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name}: must be {'a number' if float in kinds else 'an integer'}")
    arrival = Arrival(**content)
    if not (math.isfinite(arrival.arrival_s) and arrival.arrival_s >= 0):
        raise ValueError(f"arrival_s: must be >= 0, not {arrival.arrival_s}")
    for name in ("prompt_tokens", "output_tokens"):
        if not 1 <= content[name] <= MOST_TOKENS:
            raise ValueError(f"{name}: must be in 1 … {MOST_TOKENS}, not {content[name]}")
    if arrival.session is not None and not isinstance(arrival.session, str):
        raise ValueError("session: must be a string")
    if not isinstance(arrival.tenant, str):
        raise ValueError("tenant: must be a string")
    if not isinstance(arrival.priority, str):
        raise ValueError("priority: must be a string")
    priority_of(arrival.priority)
    due = arrival.deadline_s
    if due is not None and (isinstance(due, bool) or not isinstance(due, (int, float)) or due <= 0):
        raise ValueError(f"deadline_s: must be a number > 0, not {due!r}")
    return arrival
