"""The first text is the server's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import EngineError
from engine.plan import StepPlan
from engine.warmup import ROWS, warm_up
from tests.scheduler.fake_engine import FakeEngine


class Patient(FakeEngine):
    """As the real one: it does not mind that each text counts its steps anew."""

    def submit(self, plan: StepPlan) -> None:
        super().submit(replace(plan, step=self._next_step))


def test_every_kind_of_step_has_run_and_nothing_is_left() -> None:
    engine = Patient(max_rows=8, max_depth=3)
    warm_up(engine)
    decoded = {(len(p.decode.rows), p.decode.depth) for p in engine.plans if p.decode is not None}
    assert {(1, 0), (1, 3), (ROWS, 0), (ROWS, 3)} <= decoded
    longest = max(len(chunk.tokens) for plan in engine.plans for chunk in plan.prefill)
    assert longest == engine.info.prefill_chunk
    assert not engine.rows


@pytest.mark.parametrize(
    ("pages", "max_rows", "max_depth"), [(1, 1, 0), (2, 8, 4), (1024, 1, 4), (5, 3, 1)]
)
def test_small_engines_are_warmed_as_far_as_there_is_room(
    pages: int, max_rows: int, max_depth: int
) -> None:
    engine = Patient(pages=pages, max_rows=max_rows, max_depth=max_depth)
    warm_up(engine)
    assert not engine.rows


def test_an_engine_that_cannot_speak_is_no_engine() -> None:
    engine = Patient()
    prompt = tuple(range(engine.info.prefill_chunk))
    with pytest.raises(EngineError, match="warm-up at 1 rows and depth 0: "):
        warm_up(Patient(faults={prompt: 2}))
