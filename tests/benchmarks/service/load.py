"""A load, and what came of it; the same for both ways in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Cpu = Callable[[], float]
"""CPU seconds of the measured process so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams that start together."""

    prompts: Sequence[Sequence[int]]
    """One per stream."""
    tokens: int
    """Per stream."""
    seed: int = 0
    temperature: float = 0.0
    logprobs: int | None = None
    stops: Sequence[str] = ()
    gateway: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Seconds. *Steady*: from when every stream had begun until the first one ended."""

    wall_s: float
    tokens: int
    bursts: int
    cpu_s: float
    steady_cpu_s: float
    steady_tokens: int
    ttft_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """Per stream, between its first and its last token, over the tokens after the first."""


class Watch:
    """Told of every burst as it is read, by the one loop that reads all streams."""

    def __init__(self, streams: int, cpu: Cpu) -> None:
        self._streams = streams
        self._cpu = cpu
        self._tokens = [0] * streams
        self._first = [0.0] * streams
        self._last = [0.0] * streams
        self._bursts = self._begun = 0
        self._steady: list[tuple[float, int]] = []
        """(CPU seconds, tokens read) when all had begun, and when one ended."""
        self._cpu_at_start = cpu()
        self._start = time.perf_counter()

    def burst(self, stream: int, tokens: int) -> None:
        now = time.perf_counter()
        self._bursts += 1
        if not self._tokens[stream]:
            self._first[stream] = now
            self._begun += 1
        self._tokens[stream] += tokens
        self._last[stream] = now
        if not self._steady and self._begun == self._streams:
            self._mark()

    def end(self) -> None:
        """Of a stream."""
        if len(self._steady) == 1:
            self._mark()

    def _mark(self) -> None:
        self._steady.append((self._cpu(), sum(self._tokens)))

    def outcome(self) -> Outcome:
        """Once all have ended."""
        wall = time.perf_counter() - self._start
        (cpu, read), (cpu_after, read_after) = self._steady
        spans = zip(self._first, self._last, self._tokens, strict=True)
        return Outcome(
            wall_s=wall,
            tokens=sum(self._tokens),
            bursts=self._bursts,
            cpu_s=self._cpu() - self._cpu_at_start,
            steady_cpu_s=cpu_after - cpu,
            steady_tokens=read_after - read,
            ttft_s=[first - self._start for first in self._first],
            token_s=[(last - first) / (n - 1) for first, last, n in spans if n > 1],
        )
