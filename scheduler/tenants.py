"""Tenants: what each has queued, runs and was served, and whose turn it is.

Fair share is the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024), one per tenant and priority class. What a tenant is served, divided by its
weight, is added to its counter, and the lowest counter goes first. A tenant that comes back is
lifted to the lowest counter of those that wait, or, when nobody does, to that of whoever left
last: time without work earns no credit. A tenant at its `max_rows` counts as away for the same
reason: what it gives up by its own limit is not paid back later.

While tenants f and g both wait in a class, W tokens served to each since any moment of that time
differ by (section 4 of the paper)

    |W_f / w_f - W_g / w_g|  <=  2 * max over both of (P + M) / w

with P the longest prompt, M what all rows of a tenant may still generate, and w the weight.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scheduler.ageing import Lane
from scheduler.config import TenantPolicy
from scheduler.pages import IntegrityError
from scheduler.request import Priority
from scheduler.sequence import Sequence
from scheduler.throughput import SAMPLES

Line = list[tuple[int, Sequence]]
"""(arrival number, sequence) in order of arrival."""

Key = tuple[float, int]
"""(counter, arrival number of the first in line): lower goes first. Arrival numbers are unique."""

MOST_IDLE: Final = 1024
"""Tenants without a request whose counters are remembered. A forgotten one comes back as new."""

OTHER: Final = "other"
"""In statistics: all tenants without a policy of their own."""


def _lines() -> dict[Priority, Line]:
    return {level: [] for level in Priority}


@dataclass(slots=True, eq=False, kw_only=True)
class Tenant:
    """One tenant's account. Mappings are by the class that requests wait in, ageing included."""

    name: str
    policy: TenantPolicy
    lines: dict[Priority, Line] = field(default_factory=_lines)
    work: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    """Prompt tokens in each line that somebody will have to prefill."""
    counters: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))
    """Weighted tokens served."""
    keys: dict[Priority, Key] = field(default_factory=dict)
    """Where it stands in each class's order, when it does."""
    lanes: dict[Priority, Lane] = field(init=False)
    """By the class the requests came with."""
    tokens: int = 0
    """Prompt tokens in its lines."""
    rows: int = 0
    """Rows that hold device state for it."""
    row_times: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """Seconds for which its latest rows were held, when their number is limited."""

    def __post_init__(self) -> None:
        self.lanes = {p: Lane(tenant=self.name, priority=p, level=p) for p in Priority}

    @property
    def queued(self) -> int:
        return sum(map(len, self.lines.values()))

    @property
    def full(self) -> bool:
        """It runs as many rows as it may."""
        return self.policy.max_rows is not None and self.rows >= self.policy.max_rows

    @property
    def idle(self) -> bool:
        return not (self.rows or self.queued)


class Turns:
    """Whose turn it is within one class."""

    def __init__(self, level: Priority) -> None:
        self.level = level
        self.order: list[tuple[float, int, Tenant]] = []
        """Tenants that have somebody to start, first come first."""
        self._left: Tenant | None = None
        """Who left the order last."""

    def update(self, tenant: Tenant) -> None:
        """Something about the tenant has changed: its line, its counter, its rows."""
        level, old = self.level, tenant.keys.get(self.level)
        line = tenant.lines[level]
        if not line or tenant.full:
            if old is not None:
                self._take_out(old)
                del tenant.keys[level]
                self._left = tenant
            return
        if old is None:
            tenant.counters[level] = max(tenant.counters[level], self.floor())
        key = (tenant.counters[level], line[0][0])
        if key == old:
            return
        if old is not None:
            self._take_out(old)
        insort(self.order, (*key, tenant))
        tenant.keys[level] = key

    def charge(self, tenant: Tenant, tokens: int) -> None:
        tenant.counters[self.level] += tokens / tenant.policy.weight
        if self.level in tenant.keys:
            self.update(tenant)

    def floor(self) -> float:
        """Counter that a tenant has at least when it comes back."""
        if self.order:
            return self.order[0][0]
        return self._left.counters[self.level] if self._left is not None else 0.0

    def _take_out(self, key: Key) -> None:
        del self.order[bisect_left(self.order, key)]

    def integrity(self, tenants: Mapping[str, Tenant]) -> None:
        """Raises IntegrityError."""
        expected = []
        for tenant in tenants.values():
            if (line := tenant.lines[self.level]) and not tenant.full:
                expected.append((tenant.counters[self.level], line[0][0], tenant))
        keys = {t.name: t.keys[self.level] for t in tenants.values() if self.level in t.keys}
        if self.order != sorted(expected) or keys != {t.name: (c, n) for c, n, t in expected}:
            raise IntegrityError(f"the order of tenants in {self.level.name} is off")


class Tenants:
    """All tenants that have a request, and as many others as are remembered."""

    def __init__(self, policies: Mapping[str, TenantPolicy], default: TenantPolicy) -> None:
        self._policies = policies
        self._default = default
        self._tenants: dict[str, Tenant] = {}
        self._idle: dict[str, None] = {}
        """Those without a request, the longest idle first."""
        self.served: Counter[str] = Counter(dict.fromkeys((*policies, OTHER), 0))
        """Tokens, by `label`."""

    def policy(self, name: str) -> TenantPolicy:
        return self._policies.get(name, self._default)

    def find(self, name: str) -> Tenant | None:
        return self._tenants.get(name)

    def of(self, name: str) -> Tenant:
        """The account of a tenant that has a request, or is about to."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name=name, policy=self.policy(name))
        self._idle.pop(name, None)
        return tenant

    def rest(self, tenant: Tenant) -> None:
        """It may have no request any more."""
        if not tenant.idle:
            return
        self._idle[tenant.name] = None
        if len(self._idle) > MOST_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._tenants[oldest]

    def label(self, name: str) -> str:
        """The tenant's name in statistics, of which there are as many as policies and one more."""
        return name if name in self._policies else OTHER

    def all(self) -> Mapping[str, Tenant]:
        return self._tenants

    def integrity(self) -> None:
        """Raises IntegrityError."""
        idle = {name for name, tenant in self._tenants.items() if tenant.idle}
        if idle != set(self._idle) or len(idle) > MOST_IDLE:
            raise IntegrityError("idle tenants are miscounted or too many")
