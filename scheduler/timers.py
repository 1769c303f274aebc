"""What ends requests by time: deadlines, and readers that are too slow.

Cost: O(log n) per request with a deadline, and a look at the paused ones, per step; nothing per
request that waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from scheduler.pages import IntegrityError
from scheduler.request import FinishReason
from scheduler.sequence import Sequence


class Timers:
    """Of live requests. `Sequence.paused_at` is set here and nowhere else."""

    def __init__(self, *, slow_reader_timeout_s: float) -> None:
        self._timeout_s = slow_reader_timeout_s
        self._heap: list[tuple[float, int, Sequence]] = []
        """(deadline, serial, request), some of which may have ended."""
        self._serial = 0
        self._ended = 0
        """How many of them have."""
        self._paused: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        if sequence.request.deadline is not None:
            self._serial += 1
            heapq.heappush(self._heap, (sequence.request.deadline, self._serial, sequence))

    def pause(self, sequence: Sequence, now: float) -> None:
        """Its stream is full; its reader has from `now` on."""
        sequence.paused_at = now
        self._paused[sequence.request_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        if sequence.paused_at is not None:
            sequence.paused_at = None
            del self._paused[sequence.request_id]

    def forget(self, sequence: Sequence) -> None:
        """It has ended, `cause` is set."""
        self.resume(sequence)
        self._ended += sequence.request.deadline is not None
        if 2 * self._ended > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].cause is None]
            heapq.heapify(self._heap)
            self._ended = 0

    def due(self, now: float) -> Iterator[tuple[Sequence, FinishReason, str]]:
        """Requests that are past their time, with the reason and its detail. Each must be ended
        before the next is asked for."""
        while (first := self.next_deadline()) is not None and first <= now:
            yield self._heap[0][2], FinishReason.DEADLINE, ""
        for sequence in list(self._paused.values()):
            if sequence.paused_at is not None and now >= sequence.paused_at + self._timeout_s:
                detail = f"{sequence.unread} tokens unread for {self._timeout_s:g} s"
                yield sequence, FinishReason.SLOW_READER, detail

    def next_deadline(self) -> float | None:
        while self._heap and self._heap[0][2].cause is not None:
            heapq.heappop(self._heap)
            self._ended -= 1
        return self._heap[0][0] if self._heap else None

    def next(self) -> float | None:
        """When `due` has something to say next."""
        paused = [s.paused_at for s in self._paused.values() if s.paused_at is not None]
        ends = [at + self._timeout_s for at in paused]
        if (deadline := self.next_deadline()) is not None:
            ends.append(deadline)
        return min(ends, default=None)

    def integrity(self, live: Iterable[Sequence]) -> None:
        """Raises IntegrityError."""
        timed = {s.request_id for s in live if s.request.deadline is not None}
        paused = {s.request_id for s in live if s.paused_at is not None}
        kept = [s for _, _, s in self._heap if s.cause is None]
        if {s.request_id for s in kept} != timed or len(kept) != len(timed):
            raise IntegrityError("a live request's deadline is lost or kept twice")
        if len(self._heap) - len(kept) != self._ended:
            raise IntegrityError("ended requests among the deadlines are miscounted")
        if self._paused.keys() != paused:
            raise IntegrityError("paused requests are miscounted")
