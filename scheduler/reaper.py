"""How rows are freed: what is worth it is kept, everything else given back."""

from __future__ import annotations

from engine.plan import KeepRow
from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pages import PageTables
from scheduler.preemption import seniority
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.statistics import Meter


class Reaper:
    """Frees rows over state that `SchedulerCore` owns; the only place that does."""

    def __init__(
        self,
        *,
        rows: dict[int, Sequence],
        tables: PageTables,
        memory: RowMemory,
        keeping: Keeping,
        queue: WaitingQueue,
        groups: Groups,
        meter: Meter,
    ) -> None:
        self._rows = rows
        self._tables = tables
        self._memory = memory
        self._keeping = keeping
        self._queue = queue
        self._groups = groups
        self._meter = meter

    def reap(self, now: float) -> tuple[tuple[KeepRow, ...], tuple[int, ...]]:
        """Free everything of rows that have ended or were preempted and that no step in flight
        names. Returns what the engine is to be told: rows whose end it keeps, and those it
        releases."""
        gone = [s for s in self._rows.values() if s.is_gone and not s.tickets]
        ids = tuple(sequence.row for sequence in gone)
        ended = sorted((s for s in gone if s.cause is not None), key=lambda s: s.turn)
        preempted = sorted((s for s in gone if s.cause is None), key=seniority, reverse=True)
        keep = []
        for sequence in ended + preempted:
            table = self._tables.table(sequence.slot)
            if sequence.cause is not None:
                entry = self._keeping.end(sequence, table, now)
            else:
                entry = self._keeping.leave(sequence, table)
            if entry is not None:
                keep.append(KeepRow(row=sequence.row, boundary=entry.boundary, pages=entry.pages))
            del self._rows[sequence.row]
            self._memory.free(sequence)
            self._queue.row_freed(sequence, now)
        for sequence in preempted:
            self._requeue(sequence, now)
        return tuple(keep), ids

    def _requeue(self, sequence: Sequence, now: float) -> None:
        """A preempted row is freed: it waits to be computed again."""
        assert sequence.leaving is not None
        self._meter.preempted[sequence.leaving] += 1
        sequence.suspend(now)
        if sequence.hashes is not None:
            sequence.hashes = self._keeping.cache.hashes(sequence.prompt, sequence.hashes)
        self._groups.requeue(sequence)
        self._queue.requeue(sequence)
