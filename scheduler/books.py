"""Do the books balance? Run after every step in tests, and whenever the scheduler is idle."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.queue import WaitingQueue
from scheduler.sequence import Sequence
from scheduler.ticket import Ticket


def check_books(
    *,
    live: Mapping[str, Sequence],
    rows: Mapping[int, Sequence],
    tickets: Collection[Ticket],
    queue: WaitingQueue,
    pool: PagePool,
    tables: PageTables,
    memory: RowMemory,
    keeping: Keeping,
    idle: bool,
) -> None:
    """Account for every page, boundary, slot, row, session and registry entry. Raises
    IntegrityError."""
    queue.integrity(rows)
    keeping.integrity(idle=idle)
    pool.integrity(rows, [entry.pages for entry in keeping.cache])
    held = [(s.request.tenant, pool.owned(row)) for row, s in rows.items()]
    keeping.cache.shelves.check_pages(keeping.cache, held)
    tables.integrity(s.slot for s in rows.values())
    for row, s in rows.items():
        _check(s.row == row, f"row {row} is filed under another id")
        _check(tables.pages(s.slot) == pool.owned(row), f"row {row}: its table is not what it owns")
        _check((s.cause is None) == (live.get(s.request_id) is s), f"row {row}: registry")
        _check(0 <= s.emitted <= s.request.max_tokens, f"row {row}: tokens emitted")
        _check(0 <= s.unread <= s.emitted, f"row {row}: tokens unread")
        _check(s.cached <= s.cursor <= len(s.prompt), f"row {row}: prompt cursor")
        _check(s.emitted <= len(s.output), f"row {row}: the device emitted less than the host saw")
        # The last token emitted is in no cache yet.
        covered = s.cause is not None or not memory.missing(s, s.reach(-2))
        _check(
            tables.length(s.slot) <= memory.at_most(s), f"row {row}: more pages than it may have"
        )
        _check(covered, f"row {row}: steps in flight may write where it has no page")
    for request_id, s in live.items():
        _check(s.cause is None, f"{request_id} has ended and is registered")
        queued, running = request_id in queue, rows.get(s.row) is s
        _check(queued != running, f"{request_id} is neither queued nor running, or both")
    for s in queue:
        _check(live.get(s.request_id) is s, f"{s.request_id} is queued and not registered")
        holds_nothing = s.row < 0 and s.slot < 0 and not (s.tickets or s.ceiling or s.floor)
        _check(holds_nothing and s.leaving is None, f"{s.request_id} is queued and holds a row")
        own = s.asked_tokens == len(s.request.prompt_ids)
        whole = len(s.prompt) == s.asked_tokens + s.emitted and not s.produced
        _check(own and whole, f"{s.request_id}: its prompt and output are not what it goes on with")
    _check_in_flight(rows, tickets)
    if idle:
        _check(not tickets, "a step is in flight")
        _check(all(s.cause is None for s in rows.values()), "an ended row was kept")
        _check(all(s.leaving is None for s in rows.values()), "a preempted row was kept")


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
