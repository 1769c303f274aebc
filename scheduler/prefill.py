"""Prompts into chunks: who starts, from which saved prefix, where it is cut, what is saved.

A prompt is cut at absolute multiples of `chunk`, whoever its neighbours are and wherever it starts,
and, if it leads a group, one token before its end. A boundary of a model with recurrent layers is
tens of megabytes, so only these points are saved:

- the last cut before the prompt's end, for whoever comes with the same prompt again;
- the *branch point*, where the prompt parts from what is in the index, rounded down to a cut:
  two requests with that prefix have come, so a third is likely (Pan et al., "Marconi: Prefix
  Caching for the Era of Hybrid LLMs", MLSys 2025);
- one token before the end, for a group (see `scheduler.groups`), instead of the first.
"""

from __future__ import annotations

from engine.plan import PrefillChunk
from scheduler.groups import Groups
from scheduler.memory import RowMemory
from scheduler.pages import PagePool, PageTables
from scheduler.prefix import Entry, PrefixCache, Yield, root
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.ticket import Ticket

Copies = tuple[tuple[int, int], ...]


class PrefillPlanner:
    """Plans one step's chunks over state that `SchedulerCore` owns."""

    def __init__(
        self,
        *,
        chunk: int,
        rows: dict[int, Sequence],
        queue: WaitingQueue,
        pool: PagePool,
        tables: PageTables,
        memory: RowMemory,
        cache: PrefixCache,
        groups: Groups,
    ) -> None:
        self._size = chunk
        self._rows = rows
        self._queue = queue
        self._pool = pool
        self._tables = tables
        self._memory = memory
        self._cache = cache
        self._groups = groups
        self._next_row = 1

    def plan(self, ticket: Ticket, now: float) -> Copies:
        """Put one budget's worth of chunks on the ticket: prompts already begun first, then from
        the queue. Returns the pages to copy before they run."""
        budget = self._size
        for sequence in [s for s in self._rows.values() if s.prefilling and s.cause is None]:
            if self._end(sequence) - sequence.cursor > budget:
                return ()
            budget -= self._chunk(sequence, ticket)
        copies: list[tuple[int, int]] = []
        for sequence in list(self._queue):
            if budget == 0:
                break
            if self._groups.waits(sequence):
                continue
            if not self._begin(sequence, budget, copies, now):
                break
            budget -= self._chunk(sequence, ticket)
        return tuple(copies)

    def saved(self, ticket: Ticket) -> None:
        """A step has come back: what it saved may be used, unless its row broke."""
        for sequence, entry in ticket.saves:
            entry.ready = True
            if entry.group is not None:
                self._let_go(sequence)

    # --- start -----------------------------------------------------------------------------------

    def _begin(
        self, sequence: Sequence, budget: int, copies: list[tuple[int, int]], now: float
    ) -> bool:
        """Start a row from the longest prefix there is; without one if only that has room."""
        most = self._memory.needed(sequence, len(sequence.prompt) - 1)
        unshared = self._pool.reserved - self._pool.cached
        if not self._tables.free_slots or unshared + most > self._pool.total:
            return False
        entry = self._match(sequence)
        for choice in (entry, None) if entry else (None,):
            start = choice.position if choice else 0
            if self._cut(sequence, start) - start > budget:
                return False
            pages = self._memory.needed(sequence, start)
            yields = Yield.SESSIONS if self._rows else Yield.AWAITED
            if self._cache.make_room(pages, spare=choice, most=yields):
                self._start(sequence, choice, copies, now)
                return True
        return False

    def _match(self, sequence: Sequence) -> Entry | None:
        if not self._cache.total or not sequence.request.reuse_prefix:
            return None
        if sequence.hashes is None:
            known = root(sequence.request.cache_salt)
            sequence.hashes = self._cache.hashes(sequence.prompt, known)
        if not sequence.restores:
            return None
        return self._cache.match(sequence.prompt, sequence.hashes, mtp=sequence.speculative)

    def _start(
        self, sequence: Sequence, entry: Entry | None, copies: list[tuple[int, int]], now: float
    ) -> None:
        self._queue.remove(sequence)
        self._groups.start(sequence)
        sequence.row, self._next_row = self._next_row, self._next_row + 1
        sequence.started_at = now
        if copy := self._memory.start(sequence, entry):
            copies.append(copy)
        if entry is not None:
            sequence.cached = sequence.cursor = entry.position
            sequence.origin = entry.boundary
            self._cache.use(entry)
        if self._cache.total and sequence.restores:
            self._cache.started(sequence.cached)
        sequence.saves = self._saves(sequence)
        self._rows[sequence.row] = sequence

    def _saves(self, sequence: Sequence) -> tuple[int, ...]:
        """Where this prompt is to be saved; makes it its group's leader if there is none."""
        if sequence.hashes is None:
            return ()
        end = len(sequence.prompt) - 1
        last = end - end % self._size
        group = self._groups.of(sequence)
        if group is not None and group.leader is None and sequence.cached < end:
            group.leader = sequence
            last = end
        common = self._cache.common(sequence.prompt, sequence.hashes)
        branch = common - common % self._size
        return tuple(sorted({p for p in (last, branch) if sequence.cached < p <= end}))

    def _let_go(self, sequence: Sequence) -> None:
        """This member of a group leads no longer: the others need not wait for it."""
        group = self._groups.of(sequence)
        if group is not None and group.leader is sequence:
            group.leader = None

    # --- chunks ----------------------------------------------------------------------------------

    def _cut(self, sequence: Sequence, start: int) -> int:
        """Where a chunk that begins at `start` ends at the latest."""
        return min(start - start % self._size + self._size, len(sequence.prompt))

    def _end(self, sequence: Sequence) -> int:
        cursor, end = sequence.cursor, self._cut(sequence, sequence.cursor)
        return min([end, *(position for position in sequence.saves if position > cursor)])

    def _chunk(self, sequence: Sequence, ticket: Ticket) -> int:
        """Put the row's next chunk on the ticket; returns its length."""
        start, end = sequence.cursor, self._end(sequence)
        last = end == len(sequence.prompt)
        first = start == sequence.cached
        self._memory.grow(sequence, end)
        save = self._save(sequence, end, ticket) if end in sequence.saves else None
        sequence.cursor = end
        sequence.tickets += 1
        if last:
            sequence.ceiling += 1
            sequence.floor += 1
        restored = first and start > 0
        chunk = PrefillChunk(
            row=sequence.row,
            tokens=sequence.prompt[start:end],
            start=start,
            pages=self._tables.table(sequence.slot),
            last=last,
            spec=sequence.spec() if first else None,
            restore=sequence.origin if restored else None,
            prefix=sequence.prompt[:start] if restored else None,
            save=save,
        )
        ticket.chunks.append((sequence, chunk))
        return end - start

    def _save(self, sequence: Sequence, position: int, ticket: Ticket) -> int | None:
        """The boundary to save after a chunk that ends at `position`; None when it cannot be had,
        or is there already."""
        group = self._groups.of(sequence)
        leads = group is not None and group.leader is sequence
        leads = leads and position == len(sequence.prompt) - 1
        tokens, hashes = sequence.prompt[:position], sequence.hashes or []
        there = self._cache.find(tokens, hashes, mtp=sequence.speculative)
        if there or not self._cache.make_boundary(Yield.SESSIONS if leads else Yield.LOOSE):
            if leads:
                self._let_go(sequence)
            return None
        entry = self._cache.add(
            tokens=tokens,
            hashes=hashes,
            pages=self._tables.table(sequence.slot),
            mtp=sequence.speculative,
            row=sequence.row,
            ready=False,
        )
        entry.group = group if leads else None
        ticket.saves.append((sequence, entry))
        return entry.boundary
