"""Who holds what, and do the books balance? Checked after every step in tests, and whenever the
scheduler is idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.ticket import Ticket
from scheduler.timers import Timers


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All state of one core that something can be missing from."""

    live: dict[str, Sequence]
    """Accepted requests that have not ended, by id."""
    rows: dict[int, Sequence]
    """Sequences that hold device state, by row id, oldest first."""
    tickets: deque[Ticket]
    """Steps in flight, oldest first."""
    queue: WaitingQueue
    pool: PagePool
    tables: PageTables
    memory: RowMemory
    keeping: Keeping
    groups: Groups
    timers: Timers

    def check(self, *, idle: bool) -> None:
        """Account for every page, boundary, slot, row, session and registry entry. `idle`: after
        an empty plan with nothing in flight. Raises IntegrityError."""
        self.queue.integrity(self.rows)
        self.keeping.integrity(idle=idle)
        self.pool.integrity(self.rows, [entry.pages for entry in self.keeping.cache])
        held = [(s.request.tenant, self.pool.owned(row)) for row, s in self.rows.items()]
        self.keeping.cache.shelves.check_pages(self.keeping.cache, held)
        self.tables.integrity(s.slot for s in self.rows.values())
        self._check_rows()
        self._check_registry()
        _check_in_flight(self.rows, self.tickets)
        if idle:
            _check(not self.tickets, "a step is in flight")
            _check(all(s.cause is None for s in self.rows.values()), "an ended row was kept")
            _check(all(s.leaving is None for s in self.rows.values()), "a preempted row was kept")
        self.groups.integrity(self.live)
        self.timers.integrity(self.live.values())

    def _check_rows(self) -> None:
        for row, s in self.rows.items():
            _check(s.row == row, f"row {row} is filed under another id")
            _check(
                self.tables.pages(s.slot) == self.pool.owned(row),
                f"row {row}: its table is not what it owns",
            )
            _check((s.cause is None) == (self.live.get(s.request_id) is s), f"row {row}: registry")
            _check(0 <= s.emitted <= s.request.max_tokens, f"row {row}: tokens emitted")
            _check(0 <= s.unread <= s.emitted, f"row {row}: tokens unread")
            _check(s.cached <= s.cursor <= len(s.prompt), f"row {row}: prompt cursor")
            _check(
                s.emitted <= len(s.output), f"row {row}: the device emitted less than the host saw"
            )
            # The last token emitted is in no cache yet.
            covered = s.cause is not None or not self.memory.missing(s, s.reach(-2))
            _check(
                self.tables.length(s.slot) <= self.memory.at_most(s),
                f"row {row}: more pages than it may have",
            )
            _check(covered, f"row {row}: steps in flight may write where it has no page")

    def _check_registry(self) -> None:
        for request_id, s in self.live.items():
            _check(s.cause is None, f"{request_id} has ended and is registered")
            queued, running = request_id in self.queue, self.rows.get(s.row) is s
            _check(queued != running, f"{request_id} is neither queued nor running, or both")
        for s in self.queue:
            _check(self.live.get(s.request_id) is s, f"{s.request_id} is queued and not registered")
            holds_nothing = s.row < 0 and s.slot < 0 and not (s.tickets or s.ceiling or s.floor)
            _check(holds_nothing and s.leaving is None, f"{s.request_id} is queued and holds a row")
            own = s.asked_tokens == len(s.request.prompt_ids)
            whole = len(s.prompt) == s.asked_tokens + s.emitted and not s.produced
            _check(
                own and whole, f"{s.request_id}: its prompt and output are not what it goes on with"
            )

    def snapshot(self, now: float) -> dict[str, Any]:
        """The gauges of `Statistics` that count these, by field."""
        running = [s for s in self.rows.values() if s.cause is None]
        oldest = self.queue.oldest(now)
        return {
            "at": now,
            "queued_requests": len(self.queue),
            "queued_tokens": self.queue.tokens,
            "running": len(running),
            "prefilling": sum(not s.produced for s in running),
            "prefilling_tokens": sum(len(s.prompt) - s.cursor for s in running if not s.produced),
            "paused": sum(s.paused_at is not None for s in running),
            "guided_rows": sum(s.guided for s in running),
            "rows_held": len(self.rows),
            "in_flight": len(self.tickets),
            "pages_total": self.pool.total,
            "pages_used": self.pool.used,
            "pages_cached": self.pool.cached,
            "pages_peak": self.pool.peak,
            "queued_by_class": self.queue.by_class(),
            "oldest_wait_by_class": oldest,
            "oldest_wait_s": max(oldest.values()),
            "served": dict(self.queue.tenants.served),
            "preempted_waiting": self.queue.returned,
        }


def _check_in_flight(rows: Mapping[int, Sequence], tickets: Collection[Ticket]) -> None:
    """Each row's in-flight counts are the sums over the tickets that name it."""
    counted = {row: [0, 0, 0] for row in rows}
    for ticket in tickets:
        named = [(s, int(chunk.last), int(chunk.last)) for s, chunk in ticket.chunks]
        named += [(s, most, 1) for s, most in ticket.decode.rows + ticket.guided.rows]
        for s, ceiling, floor in named:
            _check(s.row in counted, f"row {s.row} was freed while in flight")
            counts = counted[s.row]
            counts[0] += 1
            counts[1] += ceiling
            counts[2] += floor
    for row, s in rows.items():
        _check(counted[row] == [s.tickets, s.ceiling, s.floor], f"row {row}: in-flight counts")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)
