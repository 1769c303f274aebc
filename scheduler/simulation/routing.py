"""Which machine of a fleet gets a request. A router knows what passed through it, and loads.

- `round-robin`: each in turn.
- `least-loaded`: the fewest requests queued or running, lowest index on ties.
- `session-hash`: a session stays where its hash points, on a ring of many points per machine
  (Karger et al., "Consistent Hashing and Random Trees", STOC 1997): when a machine leaves, only its
  own sessions move. Requests without a session go to the least loaded.
- `prefix-aware`: the machine that was sent the longest prefix of the prompt, if that is a large
  enough share of it and loads are not too far apart; else the least loaded one. This is the policy
  that SGLang's router and the Shepherd Model Gateway call cache-aware, with their thresholds.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from scheduler.simulation.work import Work


class Loaded(Protocol):
    """What a router sees of a machine."""

    @property
    def load(self) -> int: ...


class Router(Protocol):
    def choose(self, work: Work, machines: Mapping[int, Loaded]) -> int:
        """One of `machines` (by index, not empty): those that are up and have not just refused
        this request."""


class RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def choose(self, work: Work, machines: Mapping[int, Loaded]) -> int:
        later = [index for index in machines if index > self._last]
        self._last = min(later or machines)
        return self._last


class LeastLoaded:
    def choose(self, work: Work, machines: Mapping[int, Loaded]) -> int:
        return min(machines, key=lambda index: (machines[index].load, index))


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _chain(before: int, block: bytes) -> int:
    """Not `hash`, which differs from process to process."""
    digest = hashlib.blake2b(block, digest_size=8, salt=before.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big")


class SessionHash:
    def __init__(self, machines: int, *, points: int = 160) -> None:
        ring = sorted(
            (_point(f"machine {index}, point {n}"), index)
            for index in range(machines)
            for n in range(points)
        )
        self._points = [point for point, _ in ring]
        self._owners = [index for _, index in ring]
        self._others = LeastLoaded()

    def choose(self, work: Work, machines: Mapping[int, Loaded]) -> int:
        if work.session is None:
            return self._others.choose(work, machines)
        start = bisect.bisect(self._points, _point(work.session))
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner in machines:
                return owner
        return self._others.choose(work, machines)


class PrefixAware:
    """Remembers, per machine, the hashes of the blocks of prompts it was sent, by recency."""

    def __init__(
        self,
        machines: int,
        *,
        block: int = 64,
        share: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
        blocks: int = 8192,
    ) -> None:
        """`block`: tokens per block. `share`: least part of a prompt that must match. Loads are
        apart when highest - lowest > `absolute` and highest > `relative` · lowest. `blocks`:
        remembered per machine."""
        self._block = block
        self._share = share
        self._absolute = absolute
        self._relative = relative
        self._most = blocks
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(machines)]
        self._others = LeastLoaded()

    def choose(self, work: Work, machines: Mapping[int, Loaded]) -> int:
        blocks = self._blocks(work.prompt)
        index = self._matching(blocks, machines, len(work.prompt))
        if index is None:
            index = self._others.choose(work, machines)
        self._remember(index, blocks)
        return index

    def _blocks(self, prompt: Sequence[int]) -> list[int]:
        """Chained hashes of the whole blocks of a prompt."""
        tokens = np.array(prompt, dtype=np.int32)
        found, before = [], 0
        for start in range(0, len(prompt) - self._block + 1, self._block):
            before = _chain(before, tokens[start : start + self._block].tobytes())
            found.append(before)
        return found

    def _matching(
        self, blocks: list[int], machines: Mapping[int, Loaded], length: int
    ) -> int | None:
        loads = [machine.load for machine in machines.values()]
        low, high = min(loads), max(loads)
        if high - low > self._absolute and high > self._relative * low:
            return None
        best, found = 0, None
        for index in sorted(machines, key=lambda index: machines[index].load):
            sent = self._sent[index]
            matched = next((n for n, block in enumerate(blocks) if block not in sent), len(blocks))
            if matched > best:
                best, found = matched, index
        return found if best * self._block >= self._share * length else None

    def _remember(self, index: int, blocks: list[int]) -> None:
        sent = self._sent[index]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._most:
            sent.popitem(last=False)


POLICIES = ("round-robin", "least-loaded", "session-hash", "prefix-aware")


def make_router(policy: str, machines: int) -> Router:
    """Raises ValueError for a policy that does not exist."""
    match policy:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "session-hash":
            return SessionHash(machines)
        case "prefix-aware":
            return PrefixAware(machines)
    raise ValueError(f"routing must be one of {', '.join(POLICIES)}, not {policy!r}")
