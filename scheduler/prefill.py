"""Prompts into chunks: who starts, from which saved prefix, where it is cut, what is saved.

A prompt is cut at absolute multiples of `chunk`, whoever its neighbours are and wherever it starts,
and, if it leads a group, one token before its end. While rows decode under a bound on their gap
(`scheduler.pace`) there may be more cuts between, never fewer.

Prompts share a step, each at its own length, at most one chunk of each. In this order:

1. the oldest unfinished prompt, if others have passed it: since it became the oldest, those before
   it never get more tokens than itself and one step's (`prefill_chunk`);
2. prompts that one chunk completes, by class, then shortest remaining first;
3. new prompts from the queue, in its order, while fewer than `OPEN` are unfinished; one that fits a
   chunk may start beside these too;
4. the others, by class, then shortest remaining first (Schrage 1968), the oldest among them.

So a short prompt waits for one chunk of a book, not for the book, and a book for as many tokens of
others as it has itself.

A boundary of a model with recurrent layers is tens of megabytes, so only these points are saved:

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
from scheduler.pace import Budget
from scheduler.pages import PagePool, PageTables
from scheduler.prefix import Entry, PrefixCache, Yield, root
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.throughput import Throughput, Waits
from scheduler.ticket import Ticket

Copies = tuple[tuple[int, int], ...]

OPEN = 4
"""Unfinished prompts beside which one longer than a chunk may start: more would only hold rows and
pages for longer, fewer would hide short prompts behind books in the queue."""


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
        throughput: Throughput,
    ) -> None:
        self._size = chunk
        self._rows = rows
        self._queue = queue
        self._pool = pool
        self._tables = tables
        self._memory = memory
        self._cache = cache
        self._groups = groups
        self._throughput = throughput
        self._next_row = 1
        self.blocked: Sequence | None = None
        """Whom the newest plan could not start for lack of a row or of pages."""
        self.recomputed = 0
        """Positions that rows had computed before they were preempted, and compute again."""
        self._oldest: Sequence | None = None
        """The unfinished prompt that has run the longest, when last looked at."""
        self._passed = 0
        """Tokens that others got before it beyond its own."""

    def plan(self, ticket: Ticket, now: float, budget: Budget) -> Copies:
        """Put one budget's worth of chunks on the ticket; see the module docstring. Returns the
        pages to copy before they run."""
        copies: list[tuple[int, int]] = []
        waits = self._fill(ticket, copies, now, budget)
        self._throughput.plan(
            tokens=ticket.prompt_tokens,
            starts=sum(chunk.spec is not None for _, chunk in ticket.chunks),
            waits=waits,
            now=now,
        )
        return tuple(copies)

    def _fill(
        self, ticket: Ticket, copies: list[tuple[int, int]], now: float, budget: Budget
    ) -> Waits:
        """Returns what those wait for whom the step leaves."""
        running = [s for s in self._rows.values() if s.prefilling and s.cause is None]
        oldest = running[0] if running else None
        if oldest is not self._oldest:
            self._oldest, self._passed = oldest, 0
        owed = oldest is not None and self._passed > 0
        if oldest is not None and owed and not self._turn(oldest, ticket, budget):
            return Waits.BUDGET  # what it cannot pay for now is not to be spent on others
        turns = sorted(running[owed:], key=_order)
        nearly = [s for s in turns if _remaining(s) <= self._size]
        for sequence in nearly:
            self._turn(sequence, ticket, budget)
        unfinished = sum(s.prefilling for s in running)
        waits = self._starts(ticket, copies, now, budget, unfinished)
        for sequence in turns:
            if sequence not in nearly:
                self._turn(sequence, ticket, budget)
        self._note_passing(ticket)
        begun = any(s.prefilling for s in running)
        begun |= any(sequence.prefilling for sequence, _ in ticket.chunks)
        return Waits.BUDGET if begun and waits is Waits.NOBODY else waits

    def _starts(
        self,
        ticket: Ticket,
        copies: list[tuple[int, int]],
        now: float,
        budget: Budget,
        unfinished: int,
    ) -> Waits:
        """First chunks of prompts from the queue. Returns what those that are left wait for."""
        for sequence in self._queue.candidates(now):
            if budget.tokens == 0:
                return Waits.BUDGET
            if self._groups.waits(sequence) or sequence.paused_at is not None:
                continue
            if unfinished >= OPEN and len(sequence.prompt) > self._size:
                return Waits.BUDGET
            if waits := self._begin(sequence, budget, copies, now):
                return waits
            self._turn(sequence, ticket, budget)
            unfinished += sequence.prefilling
        return Waits.NOBODY

    def _note_passing(self, ticket: Ticket) -> None:
        """Reckon who got tokens before the oldest unfinished prompt in this step."""
        if self._oldest is None:
            return
        for sequence, chunk in ticket.chunks:
            if sequence is self._oldest:
                self._passed = max(0, self._passed - len(chunk.tokens))
                break
            self._passed += len(chunk.tokens)

    def saved(self, ticket: Ticket) -> None:
        """A step has come back: what it saved may be used, unless its row broke."""
        for sequence, entry in ticket.saves:
            entry.ready = True
            if entry.group is not None:
                self._let_go(sequence)

    # --- start -----------------------------------------------------------------------------------

    def _begin(
        self, sequence: Sequence, budget: Budget, copies: list[tuple[int, int]], now: float
    ) -> Waits | None:
        """Start a row from the longest prefix there is; without one if only that has room. Returns
        what it must wait for, None when it has started."""
        margin = self._memory.margin(alone=not self._rows)
        least = self._memory.needed(sequence, len(sequence.prompt) - 1)
        have = self._pool.unused + self._pool.cached
        if not self._tables.free_slots or least + margin > have:
            self.blocked = sequence
            return Waits.ROOM
        entry = self._match(sequence)
        for choice in (entry, None) if entry else (None,):
            start = choice.position if choice else 0
            if not budget.piece(start, self._cut(sequence, start), whole=True):
                return Waits.BUDGET
            pages = self._memory.needed(sequence, start)
            yields = Yield.SESSIONS if self._rows else Yield.AWAITED
            if self._cache.make_room(pages, spare=choice, most=yields, margin=margin):
                self._start(sequence, choice, copies, now)
                return None
        self.blocked = sequence
        return Waits.ROOM

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
        self._groups.start(sequence)
        sequence.row, self._next_row = self._next_row, self._next_row + 1
        if sequence.started_at is None:
            sequence.started_at, sequence.order = now, sequence.row
        if copy := self._memory.start(sequence, entry):
            copies.append(copy)
        if entry is not None:
            sequence.cached = sequence.cursor = entry.position
            sequence.origin = entry.boundary
            self._cache.use(entry)
        if sequence.cached_at_first is None:
            sequence.cached_at_first = sequence.cached
            if self._cache.total and sequence.restores:
                self._cache.started(sequence.cached)
        self.recomputed += max(0, sequence.computed - sequence.cached)
        self._queue.start(sequence, now)
        prefilled = len(sequence.prompt) - sequence.cached
        self._throughput.start(prefilled=prefilled, expected=sequence.work)
        sequence.saves = self._saves(sequence)
        self._rows[sequence.row] = sequence

    def _saves(self, sequence: Sequence) -> tuple[int, ...]:
        """Where this prompt is to be saved; makes it its group's leader if there is none."""
        if sequence.hashes is None:
            return ()
        end = len(sequence.prompt) - 1
        last = end - end % self._size
        group = self._groups.of(sequence)
        leads = group is not None and group.leader is None and not sequence.resumes
        if group is not None and leads and sequence.cached < end:
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

    def _turn(self, sequence: Sequence, ticket: Ticket, budget: Budget) -> bool:
        """Put the row's next chunk on the ticket, as much of it as the budget allows; False when
        that is nothing."""
        start, end = sequence.cursor, self._end(sequence)
        rest = start % self._size and start != sequence.cached and start not in sequence.saves
        tokens = budget.piece(start, end, whole=not rest or end % self._size != 0)
        if tokens:
            budget.spend(start, tokens)
            self._chunk(sequence, ticket, start + tokens)
        return tokens > 0

    def _chunk(self, sequence: Sequence, ticket: Ticket, end: int) -> None:
        """Put the row's prompt up to `end` on the ticket."""
        start = sequence.cursor
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

    def _save(self, sequence: Sequence, position: int, ticket: Ticket) -> int | None:
        """The boundary to save after a chunk that ends at `position`; None when it cannot be had,
        or is there already."""
        group = self._groups.of(sequence)
        leads = group is not None and group.leader is sequence
        leads = leads and position == len(sequence.prompt) - 1
        tokens, hashes = sequence.prompt[:position], sequence.hashes or []
        there = self._cache.find(tokens, hashes, mtp=sequence.speculative)
        tenant = sequence.request.tenant
        most = Yield.SESSIONS if leads else Yield.LOOSE
        if there or not self._cache.make_boundary(most, tenant):
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
            tenant=tenant,
            group=group if leads else None,
        )
        ticket.saves.append((sequence, entry))
        return entry.boundary


def _remaining(sequence: Sequence) -> int:
    """Prompt tokens not handed to the engine yet."""
    return len(sequence.prompt) - sequence.cursor


def _order(sequence: Sequence) -> tuple[int, int]:
    """Who goes first among prompts that have begun."""
    return -sequence.priority, _remaining(sequence)
