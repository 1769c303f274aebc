"""Turns at something of which few can be done at once, fair between tenants."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class Turns:
    """At most `at_once` turns at a time; for one event loop. Those of a tenant come in order. Of
    tenants that wait, the one with the fewest turns under way is next, then the one that has waited
    the longest. `reserve`: no tenant has more than all but one, so that another's next need not
    wait for any of its own."""

    def __init__(self, at_once: int, *, reserve: bool) -> None:
        self._free = at_once
        self._most = max(1, at_once - 1) if reserve else at_once
        self._running: Counter[str] = Counter()
        """By tenant, those that have any."""
        self._waiting: dict[str, deque[anyio.Event]] = {}
        """By tenant, those that wait, whose turn was longest ago first."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a turn, which the block is."""
        await self._begin(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    async def _begin(self, tenant: str) -> None:
        mine = anyio.Event()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._next()
        try:
            await mine.wait()
        except anyio.get_cancelled_exc_class():
            if mine.is_set():
                self._end(tenant)
            else:
                self._forget(tenant, mine)
            raise

    def _forget(self, tenant: str, event: anyio.Event) -> None:
        self._waiting[tenant].remove(event)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _end(self, tenant: str) -> None:
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._next()

    def _next(self) -> None:
        """Whoever may begin does."""
        while self._free:
            ready = [name for name in self._waiting if self._running[name] < self._most]
            if not ready:
                return
            tenant = min(ready, key=self._running.__getitem__)
            line = self._waiting.pop(tenant)
            line.popleft().set()
            if line:
                self._waiting[tenant] = line
            self._free -= 1
            self._running[tenant] += 1
