"""Virtual time: a queue of things that happen, in the order in which they do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timeline:
    """Runs callbacks in order of time; those of one time in the order they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan `action`; a time that has passed means now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def run(self, until: float | None = None) -> None:
        """Run everything, or what happens before `until`; the rest stays planned."""
        heap = self._heap
        while heap and (until is None or heap[0][0] < until):
            self.now, _, action = heapq.heappop(heap)
            action()
        if until is not None:
            self.now = max(self.now, until)
