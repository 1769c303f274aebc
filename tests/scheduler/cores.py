"""A core over a fake engine, for tests of one promise at a time."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from tests.scheduler.bench import Bench
from tests.scheduler.fake_engine import FakeEngine


def bench(config: SchedulerConfig | None = None, *, in_flight: int = 2, **engine: int) -> Bench:
    return Bench(
        engine=FakeEngine(**engine),  # type: ignore[arg-type]
        config=config,
        in_flight=in_flight,
    )


def reason(b: Bench, request_id: str = "r") -> str | None:
    finished = b.streams[request_id].finished
    return finished.reason if finished else None
