"""Who gives up its row so that others get on.

Rows start when their prompt fits, and take pages as they grow, so they may run out. *Seniority* is
the order in which they are served: higher class first, then rows whose readers keep up, then those
of tenants that hold no more than their share of the pages (`scheduler.shares`), then older ones. So
at equal class no row of a tenant at or below its share leaves for one of a tenant above. A row that
cannot grow sits a cycle out, and makes its juniors leave, most junior first, when what they and the
rows that leave already hold is enough. Kept prefixes have gone before that. A row leaves when no
step in flight names it, and goes back to the queue: what it has emitted is then
computed again (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, sec. 4.5: recomputation; all of a row or nothing).

Nobody waits for ever. The most senior row that is read always gets on: all that it does not hold
itself is held by its juniors or by kept prefixes, and its worst case fits the pool, or it would not
have been admitted. So the requests that are read end one after the other. (What its tenant holds
counts against a request for its first `max_displacements` preemptions only: then age decides, and
newcomers of other tenants cannot push it out again and again.) A row is made to leave
for pages only by the growth of a senior, of which there is so much and no more; it comes back when
its whole prompt has room again, with some to grow into.

A class can be displaced by a higher one that waits for a row or for pages, each request a bounded
number of times. Then the class alone counts: that a request has waited long helps it to start and
not to stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scheduler.memory import RowMemory
from scheduler.pages import PagePool, PageTables
from scheduler.prefix import PrefixCache, Yield
from scheduler.sequence import Preempted, Sequence
from scheduler.ticket import Ticket

Reap = Callable[[], None]
"""Frees the rows that leave and that no step in flight names."""


def seniority(sequence: Sequence) -> tuple[int, bool, int]:
    """Sorts the most senior row first, whatever their tenants hold."""
    return -sequence.priority, sequence.paused_at is not None, sequence.order


class Preemption:
    """Marks rows that must leave, over state that `SchedulerCore` owns; frees none."""

    def __init__(
        self,
        *,
        rows: Mapping[int, Sequence],
        pool: PagePool,
        tables: PageTables,
        memory: RowMemory,
        cache: PrefixCache,
        max_displacements: int,
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._tables = tables
        self._memory = memory
        self._cache = cache
        self._max_displacements = max_displacements

    def serve(self, ready: list[Sequence], reap: Reap) -> set[Sequence]:
        """Give rows that are to decode the pages of a cycle without drafts; returns those that
        have them. What the others lack is `RowMemory.owed`."""
        self._memory.owed = 0
        if sum(map(self._lacks, ready)) > self._pool.unused:
            ready = sorted(ready, key=self._rank)
            self._make_leave(ready)
            reap()
        served: set[Sequence] = set()
        for sequence in ready:
            lack = self._lacks(sequence) if sequence.can_decode else 0
            if lack and not self._has_room(lack + self._memory.owed):
                self._memory.owed += lack
            elif sequence.can_decode:
                self._memory.grow(sequence, sequence.reach(0))
                served.add(sequence)
        return served

    def _lacks(self, sequence: Sequence) -> int:
        return self._memory.missing(sequence, sequence.reach(0))

    def _has_room(self, pages: int) -> bool:
        return self._cache.can_make_room(pages, most=Yield.AWAITED)

    def _make_leave(self, ready: list[Sequence]) -> None:
        """Mark juniors of rows that cannot grow, where that helps."""
        lack = 0
        for sequence in ready:
            if sequence.leaving is None and self._lacks(sequence):
                lack += self._lacks(sequence)
                if not self._has_room(lack):
                    self._make_juniors_leave(sequence, lack)

    def _make_juniors_leave(self, needy: Sequence, pages: int) -> None:
        """Until `pages` pages, those of the row and its seniors, are free or will be; nobody when
        all of its juniors hold too little."""
        rank = self._rank(needy)
        juniors = [s for s in self._staying() if self._rank(s) > rank]
        lack = pages - self._pool.unused - self._cache.evictable(Yield.AWAITED)
        going = self._going()
        victims: list[Sequence] = []
        while self._pool.only_of(going) < lack:
            if not juniors:
                return
            victims.append(juniors.pop())
            going.append(victims[-1].row)
        for victim in victims:
            victim.leaving = Preempted.PAGES

    def displace(self, waiting: Sequence, ticket: Ticket) -> bool:
        """Make rows of lower classes leave, most junior first, so that `waiting` can start; False
        when that would not do. Rows that the plan being made has started stay."""
        fresh = {sequence.row for sequence, chunk in ticket.chunks if chunk.spec is not None}
        victims: list[Sequence] = []
        juniors = [
            s
            for s in self._staying()
            if s.priority < waiting.priority
            and s.displaced < self._max_displacements
            and s.row not in fresh
        ]
        while not self._would_do(waiting, victims):
            if not juniors:
                return False
            victims.append(juniors.pop())
        for victim in victims:
            victim.leaving = Preempted.PRIORITY
        return bool(victims)

    def _would_do(self, waiting: Sequence, victims: list[Sequence]) -> bool:
        """Whether a row could start once `victims`, and who leaves already, are gone."""
        going = self._going() + [victim.row for victim in victims]
        if not self._tables.free_slots + len(going):
            return False
        have = self._pool.unused + self._cache.evictable(Yield.SESSIONS, busy=True)
        have += self._pool.only_of(going)
        margin = self._memory.margin(alone=len(going) == len(self._rows))
        return self._memory.needed(waiting, 0) + margin <= have

    def _staying(self) -> list[Sequence]:
        """Rows that have neither ended nor been preempted, most senior first."""
        rows = self._rows.values()
        return sorted((s for s in rows if s.cause is None and s.leaving is None), key=self._rank)

    def _rank(self, sequence: Sequence) -> tuple[int, bool, bool, int]:
        """`seniority`, and what the row's tenant holds."""
        level, paused, order = seniority(sequence)
        above = sequence.preemptions < self._max_displacements
        above = above and self._cache.shelves.above(sequence.request.tenant)
        return level, paused, above, order

    def _going(self) -> list[int]:
        """Rows that will be freed when their steps have come back."""
        return [s.row for s in self._rows.values() if s.cause is not None or s.leaving is not None]
