"""Who waits for a row, in which order, and how many may.

Order, first to last:

1. Class: `Priority`, no higher than the tenant's `max_priority`. The first that a tenant has
   waiting in a class is lifted by one, up to the highest, `ageing_s` seconds after a higher class
   first went before it (`scheduler.ageing`).
2. Tenant: the one with the fewest weighted tokens served in that class (`scheduler.tenants`).
   Charged are the prompt tokens that are really prefilled, when the request first starts, and
   generated tokens as they come, in the class the request had when it started. What is prefilled
   again after a preemption is the server's doing and is not charged.
3. Arrival.

A tenant at its `max_rows` is passed over. So is a member of a group that waits for another's
prefill; beyond `MOST_PASSED` of those the step looks no further (beyond a quarter of it of one
tenant with a policy, or of all others, at that one's no more), which starves nobody: they wait
for a row that runs.

Starvation is bounded, whatever else arrives. The first that a tenant has waiting of class c stays
in a class below the highest for at most `ageing_s` seconds after a request that came with a higher
one started: for `(INTERACTIVE - c) * ageing_s` in all, while higher classes go before it. While
none does, and in the highest class, only its tenant's earlier requests there do, and other tenants
within the bound of `scheduler.tenants`, and at most one of each (tenant, class) that was on its way
up before. (A tenant that comes back is lifted to the lowest counter there is, and has come later:
it goes before none that has that counter, too.) This holds for each in turn: with n of its tenant
and class before it a request waits at most n + 1 times as long. Among those in the highest class
the first that does not fit blocks the others, so a big request is not starved by small ones.

Ageing puts no backlog before another tenant's share. Of another (tenant, class <= c) at most one
request goes before one of class c out of its turn in every `ageing_s` seconds, and after that one
none unless a request that came with a class above c starts: all the rest is within the bound of
`scheduler.tenants`.

Every change costs O(log n) comparisons (and moving a slice of a list of pointers), ageing at most
five of them for each start. A step looks only at those it starts or passes over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from scheduler.ageing import Ageing, Lane
from scheduler.config import SchedulerConfig
from scheduler.pages import IntegrityError
from scheduler.request import Priority
from scheduler.sequence import Sequence
from scheduler.tenants import Line, Tenant, Tenants, Turns

MOST_PASSED: Final = 128
"""Requests of waiting groups that one step passes over."""


class WaitingQueue:
    """Requests without a row. Its bounds are the door's to keep: `push` does not refuse."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.tokens = 0
        """Prompt tokens waiting."""
        self.requests_of: Counter[str] = Counter()
        self.tokens_of: Counter[str] = Counter()
        """Requests and prompt tokens waiting, by `Tenants.label`."""
        self._waiting: dict[str, Sequence] = {}
        self._by_class: dict[Priority, Line] = {priority: [] for priority in Priority}
        """By the class asked for, in order of arrival."""
        self._ageing = Ageing(config.ageing_s)
        self.tenants = Tenants(config.tenants, config.default_tenant)
        self._turns = {level: Turns(level) for level in sorted(Priority, reverse=True)}
        """Highest class first."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no promised order; see `candidates`."""
        return iter(self._waiting.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    # --- in and out ------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        """A new request, which the door has let in."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        request = sequence.request
        sequence.priority = self.priority_of(request.tenant, request.priority)
        self._add(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """A preempted request waits again, before all of its tenant and class that came later, and
        lifted as far as it was when it started. It may exceed the door's bounds.

        Its row must be given back as well (`row_freed`), now or later.
        """
        sequence.returned = True
        sequence.work = len(sequence.prompt)
        level = sequence.level
        self._add(sequence)
        tenant = self.tenants.of(sequence.request.tenant)
        lane = tenant.lanes[sequence.priority]
        if lane.first is sequence:
            self._ageing.back(lane, level)
            self._settle(tenant, lane)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        tenant = self._take(sequence)
        self.tenants.rest(tenant)

    def start(self, sequence: Sequence, now: float) -> None:
        """It gets a row, and pays for its prompt unless it has before. `cached` is known."""
        tenant = self._take(sequence, served=True)
        self._ageing.passed(sequence.priority, now)
        tenant.rows += 1
        self._update(tenant)
        if not sequence.charged:
            sequence.charged = True
            self.charge(sequence, len(sequence.prompt) - sequence.cached)

    def row_freed(self, sequence: Sequence, now: float) -> None:
        """The row it had was given back."""
        tenant = self.tenants.of(sequence.request.tenant)
        tenant.rows -= 1
        began = None if sequence.preemptions else sequence.started_at
        if tenant.policy.max_rows is not None and sequence.cause is not None and began is not None:
            tenant.row_times.append(now - began)
        self._update(tenant)
        self.tenants.rest(tenant)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """The device served a started request this many tokens."""
        name = sequence.request.tenant
        self.tenants.served[self.tenants.label(name)] += tokens
        self._turns[sequence.level].charge(self.tenants.of(name), tokens)

    def _add(self, sequence: Sequence) -> None:
        tenant = self.tenants.of(sequence.request.tenant)
        self._waiting[sequence.request_id] = sequence
        label = self.tenants.label(tenant.name)
        self.requests_of[label] += 1
        self.tokens_of[label] += len(sequence.prompt)
        self.tokens += len(sequence.prompt)
        tenant.tokens += len(sequence.prompt)
        insort(self._by_class[sequence.priority], (sequence.arrival, sequence))
        sequence.level = sequence.priority
        self._join(tenant, sequence)
        lane = tenant.lanes[sequence.priority]
        first = lane.first
        insort(lane.waiting, (sequence.arrival, sequence))
        if first is None:
            self._ageing.reset(lane)
        elif lane.first is sequence:
            self._move(tenant, first, lane.priority)
        self._settle(tenant, lane)

    def _take(self, sequence: Sequence, *, served: bool = False) -> Tenant:
        tenant = self.tenants.of(sequence.request.tenant)
        del self._waiting[sequence.request_id]
        label = self.tenants.label(tenant.name)
        self.requests_of[label] -= 1
        self.tokens_of[label] -= len(sequence.prompt)
        self.tokens -= len(sequence.prompt)
        tenant.tokens -= len(sequence.prompt)
        _delete(self._by_class[sequence.priority], sequence)
        self._leave(tenant, sequence)
        lane = tenant.lanes[sequence.priority]
        _delete(lane.waiting, sequence)
        if served or not lane.waiting:
            self._ageing.reset(lane)
        self._settle(tenant, lane)
        return tenant

    def _settle(self, tenant: Tenant, lane: Lane) -> None:
        """The first of the lane, whoever that is now, waits in the lane's class."""
        if lane.first is not None:
            self._move(tenant, lane.first, lane.level)

    def _move(self, tenant: Tenant, sequence: Sequence, level: Priority) -> None:
        if sequence.level is not level:
            self._leave(tenant, sequence)
            sequence.level = level
            self._join(tenant, sequence)

    def _join(self, tenant: Tenant, sequence: Sequence) -> None:
        """Into the tenant's line of its class."""
        level = sequence.level
        insort(tenant.lines[level], (sequence.arrival, sequence))
        tenant.work[level] += sequence.work
        self._turns[level].update(tenant)

    def _leave(self, tenant: Tenant, sequence: Sequence) -> None:
        level = sequence.level
        _delete(tenant.lines[level], sequence)
        tenant.work[level] -= sequence.work
        self._turns[level].update(tenant)

    def _update(self, tenant: Tenant) -> None:
        for turns in self._turns.values():
            turns.update(tenant)

    # --- order -----------------------------------------------------------------------------------

    def priority_of(self, tenant: str, asked: Priority) -> Priority:
        """The class in which a request of this tenant begins to wait."""
        return min(asked, self.tenants.policy(tenant).max_priority)

    def candidates(self, now: float) -> Iterator[Sequence]:
        """Who may start, in order; `level` is the class each waits in, ageing included, `priority`
        the one it came with. Each must be started or passed over before the next is asked for; who
        is started was charged, so the order follows."""
        self._age(now)
        passed: Counter[str] = Counter()
        most_of_one = MOST_PASSED // 4 if self._config.tenants else MOST_PASSED
        for level, turns in self._turns.items():
            last: dict[str, int] = {}
            """Arrival number of the last that was passed over, by tenant."""
            index = 0
            while index < len(turns.order):
                tenant = turns.order[index][2]
                sequence = _after(tenant.lines[level], last.get(tenant.name, -1))
                label = self.tenants.label(tenant.name)
                if sequence is None or passed[label] == most_of_one:
                    index += 1
                    continue
                yield sequence
                if self._waiting.get(sequence.request_id) is not sequence:
                    index = 0
                    continue
                last[tenant.name] = sequence.arrival
                passed[label] += 1
                if passed.total() == MOST_PASSED:
                    return

    def _age(self, now: float) -> None:
        for lane in self._ageing.lifted(now):
            self._settle(self.tenants.of(lane.tenant), lane)

    def ahead(self, tenant: str, asked: Priority, *, generated: float) -> tuple[float, float]:
        """Requests, and prompt tokens to prefill, that go before a request that came now: higher
        classes, its tenant's own, and as much of other tenants' as their counters allow when each
        request generates `generated` tokens. Costs one pass over the tenants that wait."""
        level = self.priority_of(tenant, asked)
        requests = work = 0.0
        mine = self.tenants.find(tenant)
        counter, turns = self._turns[level].floor(), self._turns[level]
        if mine is not None:
            requests, work = len(mine.lines[level]), mine.work[level]
            if level not in mine.keys:
                counter = max(counter, mine.counters[level])
            else:
                counter = mine.counters[level]
            counter += (work + requests * generated) / mine.policy.weight
        for _, _, other in turns.order:
            if other.counters[level] > counter:
                break
            if other is mine:
                continue
            count = len(other.lines[level])
            most = other.work[level] + count * generated
            credit = (counter - other.counters[level]) * other.policy.weight
            share = min(1.0, credit / most) if most else 1.0
            requests += count * share
            work += other.work[level] * share
        for higher in self._turns.values():
            if higher.level > level:
                requests += sum(len(other.lines[higher.level]) for *_, other in higher.order)
                work += sum(other.work[higher.level] for *_, other in higher.order)
        return requests, work

    def own_ahead(self, tenant: str, asked: Priority) -> int:
        """Requests of the same tenant that go before one that came now."""
        mine, level = self.tenants.find(tenant), self.priority_of(tenant, asked)
        if mine is None:
            return 0
        return sum(len(line) for its, line in mine.lines.items() if its >= level)

    @property
    def returned(self) -> int:
        """Preempted requests that wait again."""
        return sum(sequence.returned for sequence in self._waiting.values())

    # --- looking in ------------------------------------------------------------------------------

    def by_class(self) -> dict[Priority, int]:
        """Requests, by the class they came with."""
        return {priority: len(line) for priority, line in self._by_class.items()}

    def oldest(self, now: float) -> dict[Priority, float]:
        """Seconds since the oldest came, by the class it came with; 0 where nobody waits."""
        return {
            priority: now - line[0][1].submitted_at if line else 0.0
            for priority, line in self._by_class.items()
        }

    def integrity(self, rows: Mapping[int, Sequence]) -> None:
        """Count everything again. Raises IntegrityError."""
        waiting = list(self._waiting.values())
        tokens = sum(len(sequence.prompt) for sequence in waiting)
        let_in = [sequence for sequence in waiting if not sequence.returned]
        beyond = len(let_in) > self._config.max_queue
        beyond |= sum(len(s.prompt) for s in let_in) > self._config.max_queued_tokens
        of: Counter[str] = Counter(self.tenants.label(s.request.tenant) for s in waiting)
        weight: Counter[str] = Counter()
        for s in waiting:
            weight[self.tenants.label(s.request.tenant)] += len(s.prompt)
        beyond |= (+self.requests_of, +self.tokens_of) != (of, weight)
        if self.tokens != tokens or beyond:
            raise IntegrityError("the queue's counts are off or beyond its bounds")
        if any(sequence.started or sequence.cause for sequence in waiting):
            raise IntegrityError("a started or ended sequence is still queued")
        for priority, line in self._by_class.items():
            if line != sorted((s.arrival, s) for s in waiting if s.priority is priority):
                raise IntegrityError(f"requests of class {priority.name} are miscounted")
        held = dict.fromkeys(self.tenants.all(), 0)
        for row in rows.values():
            held[row.request.tenant] += 1
        mine: dict[str, list[Sequence]] = {name: [] for name in held}
        for sequence in waiting:
            mine[sequence.request.tenant].append(sequence)
        for name, tenant in self.tenants.all().items():
            _check_tenant(tenant, mine[name], held[name])
        for turns in self._turns.values():
            turns.integrity(self.tenants.all())
        everybody = self.tenants.all().values()
        self._ageing.integrity([lane for tenant in everybody for lane in tenant.lanes.values()])
        self.tenants.integrity()


def _after(line: Line, arrival: int) -> Sequence | None:
    """The first that came after this arrival number."""
    index = bisect_right(line, arrival, key=lambda place: place[0])
    return line[index][1] if index < len(line) else None


def _delete(line: Line, sequence: Sequence) -> None:
    index = bisect_left(line, sequence.arrival, key=lambda place: place[0])
    if line[index][1] is not sequence:
        raise IntegrityError(f"{sequence.request_id} is not where it should wait")
    del line[index]


def _check_tenant(tenant: Tenant, waiting: list[Sequence], rows: int) -> None:
    """Raises IntegrityError."""
    name, policy = tenant.name, tenant.policy
    for level, line in tenant.lines.items():
        expected = sorted((s.arrival, s) for s in waiting if s.level is level)
        if line != expected or tenant.work[level] != sum(s.work for _, s in expected):
            raise IntegrityError(f"tenant {name!r}: who waits in {level.name} is miscounted")
    for level, lane in tenant.lanes.items():
        if lane.waiting != sorted((s.arrival, s) for s in waiting if s.priority is level):
            raise IntegrityError(f"tenant {name!r}: its lane of {level.name} is miscounted")
    if tenant.tokens != sum(len(s.prompt) for s in waiting) or tenant.rows != rows:
        raise IntegrityError(f"tenant {name!r}: its tokens or rows are miscounted")
    let_in = sum(len(s.prompt) for s in waiting if not s.returned)
    if policy.max_queued_tokens is not None and let_in > policy.max_queued_tokens:
        raise IntegrityError(f"tenant {name!r}: more waits than may")
    if policy.max_rows is not None and rows > policy.max_rows:
        raise IntegrityError(f"tenant {name!r}: more rows than it may have")
