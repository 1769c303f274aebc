"""Ageing: when those that higher classes go before have their turn all the same.

A *lane* is what one tenant has waiting of one class. Its first request is *passed* when a request
starts that came with a higher class than the first waits in. `ageing_s` seconds after it was first
passed it is lifted by one class, and again `ageing_s` after it was first passed there, up to the
highest. A start from the lane takes that back: the next one begins in its own class, and its clock
stands until it is passed. A preempted request comes back in the class that it had started in, if
it is the first again.

So a lane is lifted for having been left out for the sake of higher classes, and by one request at a
time: not for its own length, nor for what other tenants of its class are served, which is for fair
share to say. Who was lifted passes nobody: one ageing does not bring about another. Where all
requests are of one class nothing ages.

A start costs O(log n) for each lane that it is the first to pass. Between two starts of its own
that is at most one per class of a lane, so O(log n) per start and arrival in the long run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.pages import IntegrityError
from scheduler.request import Priority
from scheduler.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class Lane:
    """What a tenant has waiting of one class."""

    tenant: str
    priority: Priority
    level: Priority
    """The class that its first request waits in; the others wait in `priority`."""
    waiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """(arrival number, sequence) in order of arrival."""
    due: float = math.inf
    """When it is lifted next; inf while its clock stands."""
    mark: int = -1
    """Arrival number of the first when it was first passed: unique among lanes that are due."""

    @property
    def first(self) -> Sequence | None:
        return self.waiting[0][1] if self.waiting else None


class Ageing:
    """The clocks of all lanes."""

    def __init__(self, ageing_s: float) -> None:
        self._seconds = ageing_s
        self._unpassed: dict[Priority, dict[Lane, None]] = {level: {} for level in Priority}
        """Lanes whose first nobody has passed, by the class it waits in."""
        self._due: list[tuple[float, int, Lane]] = []
        """(when, `mark`, lane): which is lifted next."""

    def reset(self, lane: Lane) -> None:
        """It was served, or the first came, or the last went."""
        if lane.due < math.inf:
            del self._due[bisect_left(self._due, (lane.due, lane.mark))]
            lane.due = math.inf
        self._unpassed[lane.level].pop(lane, None)
        lane.level = lane.priority
        if lane.waiting:
            self._unpassed[lane.level][lane] = None

    def back(self, lane: Lane, level: Priority) -> None:
        """Its first has had a row, for which it was lifted to `level`, and gave it up again."""
        if level > lane.level:
            self.reset(lane)
            del self._unpassed[lane.level][lane]
            lane.level = level
            self._unpassed[level][lane] = None

    def passed(self, priority: Priority, now: float) -> None:
        """A request that came with this class starts."""
        if math.isinf(self._seconds):
            return
        for level, lanes in self._unpassed.items():
            if level < priority:
                for lane in lanes:
                    lane.due, lane.mark = now + self._seconds, lane.waiting[0][0]
                    insort(self._due, (lane.due, lane.mark, lane))
                lanes.clear()

    def lifted(self, now: float) -> Iterator[Lane]:
        """Lanes whose time has come; `level` is the new one."""
        while self._due and self._due[0][0] <= now:
            _, _, lane = self._due.pop(0)
            lane.due, lane.level = math.inf, Priority(lane.level + 1)
            self._unpassed[lane.level][lane] = None
            yield lane

    def integrity(self, lanes: list[Lane]) -> None:
        """These are all there are. Raises IntegrityError."""
        due = sorted((lane.due, lane.mark, lane) for lane in lanes if lane.due < math.inf)
        unpassed = {lane for lane in lanes if lane.waiting and math.isinf(lane.due)}
        kept = [(level, lane) for level, those in self._unpassed.items() for lane in those]
        if self._due != due or len(kept) != len(unpassed):
            raise IntegrityError("which lanes age is off")
        if any(lane not in unpassed or lane.level is not level for level, lane in kept):
            raise IntegrityError("which lanes nobody has passed is off")
        for lane in lanes:
            levels = [sequence.level for _, sequence in lane.waiting]
            if levels and levels != [lane.level] + [lane.priority] * (len(levels) - 1):
                raise IntegrityError(f"tenant {lane.tenant!r}: others than its first are lifted")
            if not levels and (lane.due < math.inf or lane.level is not lane.priority):
                raise IntegrityError(f"tenant {lane.tenant!r}: nobody waits and ages")
