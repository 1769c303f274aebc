"""A running scheduler over a fake engine, and readers of its streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from scheduler import Finished, RequestHandle, Scheduler, SchedulerConfig, Tokens
from scheduler.config import LoopKind
from tests.scheduler.fake_engine import FakeEngine

LOOPS: list[LoopKind] = ["plain", "pipelined"]


def scheduler(engine: FakeEngine | None = None, *, on_step: Any = None, **config: Any) -> Scheduler:
    made = engine or FakeEngine()
    return Scheduler(engine_factory=lambda: made, config=SchedulerConfig(**config), on_step=on_step)


async def drink(handle: RequestHandle) -> tuple[list[int], Finished]:
    """All tokens and the end."""
    tokens: list[int] = []
    async with handle:
        async for event in handle:
            if isinstance(event, Tokens):
                tokens += event.ids
    assert handle.finished is not None
    return tokens, handle.finished


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.002)


async def settled(s: Scheduler) -> None:
    """Rows and pages are free; nothing is in flight."""
    await until(lambda: s.statistics().rows_held == 0 and s.statistics().in_flight == 0)
    assert s.statistics().pages_used == 0
    assert s.failure is None


def slow_engine(**options: Any) -> FakeEngine:
    return FakeEngine(step_s=0.003, **options)
