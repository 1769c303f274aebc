"""Measuring cycles through the engine protocol, on an engine whose costs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine import tune
from engine.plan import StepPlan
from engine.tune import expected_tokens, measure, measure_acceptance
from tests.scheduler.fake_engine import FakeEngine


def cost(rows: int, depth: int) -> float:
    """Not monotonic in depth, as on real devices."""
    return 0.010 * rows * (0.5 if depth == 2 else 1 + depth)


class Lenient(FakeEngine):
    """Takes steps of several drivers, each with numbers of its own."""

    def submit(self, plan: StepPlan) -> None:
        super().submit(replace(plan, step=self._next_step))


class Clock:
    """Seconds that pass when somebody looks."""

    def __init__(self, tick: float = 1.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def engine(
    cost: Callable[[int, int], float] = cost,
    *,
    pages: int = 400,
    page_size: int = 16,
    acceptance: float = 0.7,
) -> FakeEngine:
    return Lenient(
        max_rows=4,
        pages=pages,
        page_size=page_size,
        max_depth=4,
        acceptance=acceptance,
        cost=cost,
    )


def points(made: FakeEngine, seconds: float = 6.0) -> dict[tuple[int, int], float]:
    found = measure(
        made, rows=(1, 2, 4), depths=(0, 2, 4), seconds=seconds, clock=Clock(), context=20
    )
    assert found.rounds >= 2
    return {(p.rows, p.depth): p.seconds for p in found.points}


def test_medians_are_the_costs() -> None:
    made = engine()
    assert points(made) == pytest.approx({(b, k): cost(b, k) for b in (1, 2, 4) for k in (0, 2, 4)})
    assert made.rows == 0, "rows were left behind"


def check_compiling() -> None:
    """The first step of a shape takes a thousand times longer, and is not measured."""
    seen: set[tuple[int, int]] = set()

    def compiling(rows: int, depth: int) -> float:
        first = (rows, depth) not in seen
        seen.add((rows, depth))
        return 1000 * cost(rows, depth) if first else cost(rows, depth)

    made = engine(compiling)
    found = measure(made, rows=(1, 4), depths=(0, 4), seconds=1.0, clock=Clock(), context=20)
    assert max(point.high for point in found.points) < 1.0


def test_first_calls_are_not_measured() -> None:
    check_compiling()


def test_the_check_of_first_calls_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "WARM_UP", 0)
    with pytest.raises(AssertionError):
        check_compiling()


def test_a_drift_falls_on_all_points_alike() -> None:
    """The machine gets slower all the time; the order of the costs is kept all the same."""
    steps = [0]

    def drifting(rows: int, depth: int) -> float:
        steps[0] += 1
        return (1 + depth) * (1 + steps[0] / 400)

    found = measure(
        engine(drifting), rows=(1,), depths=range(5), seconds=40.0, clock=Clock(), context=20
    )
    seconds = [point.seconds / (1 + point.depth) for point in found.points]
    assert max(seconds) < 1.15 * min(seconds)
    assert all(point.low <= point.seconds <= point.high for point in found.points)
    assert any(point.spread > 0.05 for point in found.points)


def test_a_context_that_just_fits_is_measured_in_pieces() -> None:
    made = engine(pages=24, page_size=4)
    found = measure(made, rows=(2,), depths=(0, 1), seconds=1.0, clock=Clock(), context=32)
    assert [p.seconds for p in found.points] == pytest.approx([cost(2, 0), cost(2, 1)])


def test_rows_outlive_their_cycles_when_every_draft_stands() -> None:
    for depths in ((0,), (4,), (0, 4)):
        made = engine(acceptance=1.0)
        found = measure(made, rows=(1, 2), depths=depths, seconds=1.0, clock=Clock(), context=20)
        assert len(found.points) == 2 * len(depths)


def test_acceptance_is_per_position_and_conditional() -> None:
    chances = measure_acceptance(
        FakeEngine(acceptance=0.7, max_rows=8, pages=1000), depth=3, prompt=[1], rows=8, tokens=900
    )
    assert chances == pytest.approx((0.7, 0.7, 0.7), abs=0.06)
    assert measure_acceptance(engine(), depth=0, prompt=[1]) == ()


def test_expected_tokens() -> None:
    assert expected_tokens((0.5, 0.5), 0) == 1
    assert expected_tokens((0.5, 0.4), 2) == pytest.approx(1.7)
    assert expected_tokens((0.5,), 4) == 1.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rows": ()}, "rows and depths"),
        ({"rows": (5,)}, "rows must be in 1 … 4"),
        ({"rows": (0,)}, "rows must be in 1 … 4"),
        ({"depths": (5,)}, "depths must be in 0 … 4"),
        ({"context": 0}, "context must be"),
        ({"context": 4090}, "context: 4 rows have 1600 positions"),
    ],
)
def test_what_does_not_fit_is_named(wrong: dict[str, object], said: str) -> None:
    asked: dict[str, object] = {"rows": (1, 4), "depths": (0, 4), "context": 20} | wrong
    with pytest.raises(ValueError, match=said):
        measure(engine(), seconds=1.0, clock=Clock(), **asked)  # type: ignore[arg-type]
