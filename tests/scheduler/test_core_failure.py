"""Faults, dead engines, and results that must not be."""

from __future__ import annotations

import pytest

from engine.plan import EngineFailedError, RowResult, StepResult
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.pages import IntegrityError
from scheduler.request import FinishReason, GenerationRequest, NotRunningError
from tests.scheduler.bench import Bench, make_request
from tests.scheduler.cores import bench, reason
from tests.scheduler.fake_engine import FakeEngine, fake_logprobs


def test_a_fault_ends_its_row_only() -> None:
    engine = FakeEngine(faults={(1, 2, 3): 7})
    b = Bench(engine=engine)
    b.submit(make_request("bad", prompt=3, max_tokens=50))
    b.submit(make_request("good", prompt=4, max_tokens=50))
    b.finish()
    assert reason(b, "bad") == "fault"
    assert b.streams["bad"].finished is not None
    assert b.streams["bad"].finished.detail == "scripted fault"
    assert len(b.streams["bad"].tokens) >= 7
    assert reason(b, "good") == "length"


def test_abandon_ends_everything() -> None:
    b = bench(max_rows=2)
    for number in range(5):
        b.submit(make_request(f"r{number}", max_tokens=100))
    for _ in range(5):
        b.step()
    b.cancel("r0")
    events = b.core.abandon("the device is gone", b.now)
    assert [event.reason for _, event in events] == ["engine_failed"] * 4  # type: ignore[union-attr]
    b.core.integrity(idle=True)
    assert b.core.is_empty
    with pytest.raises(NotRunningError, match="the device is gone"):
        b.submit(make_request())


# --- results that must not be ---------------------------------------------------------------------


def running_core() -> SchedulerCore:
    core = SchedulerCore(info=FakeEngine().info, config=SchedulerConfig(depth=2), max_in_flight=2)
    core.submit(make_request(max_tokens=3), 0.0)
    core.plan(0.0)
    return core


def test_results_come_in_order() -> None:
    core = running_core()
    with pytest.raises(EngineFailedError, match="out of order"):
        core.commit(StepResult(step=1), 0.0)
    with pytest.raises(EngineFailedError, match="out of order"):
        SchedulerCore(info=FakeEngine().info, config=SchedulerConfig(), max_in_flight=2).commit(
            StepResult(step=0), 0.0
        )


def test_results_name_rows_of_the_step() -> None:
    rows = (RowResult(row=1, tokens=(4,)), RowResult(row=2, tokens=(4,)))
    with pytest.raises(EngineFailedError, match="did not run"):
        running_core().commit(StepResult(step=0, rows=rows), 0.0)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (RowResult(row=1),),
        (RowResult(row=1, tokens=(1, 2)),),
        (RowResult(row=1, tokens=(1,), drafted=1, accepted=1),),
    ],
    ids=["missing", "no token", "too many tokens", "drafts in prefill"],
)
def test_a_breach_costs_the_row(rows: tuple[RowResult, ...]) -> None:
    core = running_core()
    ((request_id, event),) = core.commit(StepResult(step=0, rows=rows), 0.0)
    assert request_id == "r"
    assert event.reason is FinishReason.FAULT  # type: ignore[union-attr]
    assert "contract" in event.detail  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("request_", "row"),
    [
        (make_request(logprobs=1), RowResult(row=1, tokens=(4,))),
        (make_request(logprobs=1), RowResult(row=1, tokens=(4,), logprobs=fake_logprobs((), 1))),
        (make_request(prompt_logprobs=1), RowResult(row=1, tokens=(4,))),
        (
            make_request(prompt_logprobs=1),
            RowResult(row=1, tokens=(4,), prompt_logprobs=fake_logprobs(range(5), 1)),
        ),
    ],
    ids=["none", "too few", "none of the prompt", "too many of the prompt"],
)
def test_missing_log_probabilities_cost_the_row(
    request_: GenerationRequest, row: RowResult
) -> None:
    core = SchedulerCore(info=FakeEngine().info, config=SchedulerConfig(), max_in_flight=2)
    core.submit(request_, 0.0)
    core.plan(0.0)
    ((_, event),) = core.commit(StepResult(step=0, rows=(row,)), 0.0)
    assert event.reason is FinishReason.FAULT  # type: ignore[union-attr]
    assert "log probabilities" in event.detail  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "row",
    [
        RowResult(row=1, tokens=(1, 2, 3), drafted=2, accepted=2),
        RowResult(row=1, tokens=(1, 2), drafted=1, accepted=1),
        RowResult(row=1, tokens=(1,), drafted=1, accepted=2),
        RowResult(row=1, tokens=(1,), drafted=3, accepted=0),
    ],
    ids=["beyond max_tokens", "no finish at max_tokens", "accepted > drafted", "over the limit"],
)
def test_a_breach_while_decoding_costs_the_row(row: RowResult) -> None:
    core = running_core()
    core.commit(StepResult(step=0, rows=(RowResult(row=1, tokens=(1,)),)), 0.0)
    core.plan(0.0)
    ((_, event),) = core.commit(StepResult(step=1, rows=(row,)), 0.0)
    assert event.reason is FinishReason.FAULT  # type: ignore[union-attr]


def test_no_more_steps_than_the_engine_takes() -> None:
    core = running_core()
    core.plan(0.0)
    with pytest.raises(IntegrityError, match="2 steps are in flight"):
        core.plan(0.0)
    core.integrity()
