"""Ageing as `scheduler.ageing` states it, worked out by looking at everybody at every start."""

from __future__ import annotations

from scheduler.queue import WaitingQueue
from scheduler.request import Priority
from scheduler.sequence import Sequence

Lane = tuple[str, Priority]
"""(tenant, the class its requests came with)."""


class Clocks:
    """Looks over a queue's shoulder: starts and removals."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._ageing_s = queue._config.ageing_s
        self._since: dict[Lane, float] = {}
        """When the lane was first passed, at its level."""
        self._level: dict[Lane, Priority] = {}
        self._began: dict[Sequence, Priority] = {}
        """The class it last started in."""
        self._start, self._remove, self._requeue = queue.start, queue.remove, queue.requeue
        queue.start = self.start  # type: ignore[method-assign]
        queue.remove = self.remove  # type: ignore[method-assign]
        queue.requeue = self.requeue  # type: ignore[method-assign]

    def lane(self, sequence: Sequence) -> Lane:
        policy = self._queue.tenants.policy(sequence.request.tenant)
        return sequence.request.tenant, min(sequence.request.priority, policy.max_priority)

    def levels(self, now: float) -> dict[Sequence, Priority]:
        """The class that each waiting request counts as."""
        lanes = {sequence: self.lane(sequence) for sequence in self._queue}
        firsts: dict[Lane, Sequence] = {}
        for sequence, lane in lanes.items():
            first = firsts.setdefault(lane, sequence)
            if sequence.arrival < first.arrival:
                firsts[lane] = sequence
        return {
            sequence: self._level_of(lane, now) if firsts[lane] is sequence else lane[1]
            for sequence, lane in lanes.items()
        }

    def _level_of(self, lane: Lane, now: float) -> Priority:
        if self._since.get(lane, now) + self._ageing_s <= now:
            del self._since[lane]
            self._level[lane] = Priority(self._level.get(lane, lane[1]) + 1)
        return self._level.get(lane, lane[1])

    def start(self, sequence: Sequence, now: float) -> None:
        mine = self.lane(sequence)
        self._began[sequence] = self.levels(now)[sequence]
        for lane in {self.lane(other) for other in self._queue}:
            if self._level_of(lane, now) < mine[1]:
                self._since.setdefault(lane, now)
        self._reset(mine)
        self._start(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        self._remove(sequence)
        if self.lane(sequence) not in {self.lane(other) for other in self._queue}:
            self._reset(self.lane(sequence))

    def requeue(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        lane, level = self.lane(sequence), self._began[sequence]
        others = [other for other in self._queue if self.lane(other) == lane]
        first = all(other.arrival >= sequence.arrival for other in others)
        if first and level > self._level.get(lane, lane[1]):
            self._level[lane] = level
            self._since.pop(lane, None)

    def _reset(self, lane: Lane) -> None:
        self._since.pop(lane, None)
        self._level.pop(lane, None)
