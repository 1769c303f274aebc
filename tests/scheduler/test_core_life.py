"""How requests end, who waits for whom, and the numbers about it."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler.config import SchedulerConfig
from scheduler.request import Finished, FinishReason
from tests.scheduler.bench import make_request
from tests.scheduler.cores import bench, reason

# --- ends -----------------------------------------------------------------------------------------


def test_cancel_while_queued_leaves_at_once() -> None:
    b = bench()
    b.submit(make_request())
    assert b.cancel("r")
    assert reason(b) == "cancelled"
    assert b.core.is_empty
    assert b.plan().is_empty


@pytest.mark.parametrize("in_flight", [1, 2])
def test_cancel_between_prefill_chunks(in_flight: int) -> None:
    b = bench(SchedulerConfig(prefill_chunk=16), in_flight=in_flight)
    b.submit(make_request(prompt=160))
    b.step()
    b.step()
    b.cancel("r", FinishReason.ABORTED)
    assert reason(b) == "aborted"
    chunks = sum(len(plan.prefill) for plan in b.engine.plans)
    b.finish()
    assert sum(len(plan.prefill) for plan in b.engine.plans) == chunks, "not one chunk more"


def test_cancel_while_decoding_drops_what_is_in_flight() -> None:
    b = bench()
    stream = b.submit(make_request(max_tokens=100))
    while len(stream.tokens) < 10:
        b.step()
    assert b.outstanding
    seen = len(stream.tokens)
    b.cancel("r")
    assert not b.cancel("r", FinishReason.ABORTED), "the first cause stays"
    b.finish()
    assert reason(b) == "cancelled"
    assert len(stream.tokens) == seen
    assert b.core.statistics(0).discarded_tokens > 0


def test_cancel_after_the_end_changes_nothing() -> None:
    b = bench()
    b.submit(make_request())
    b.finish()
    assert not b.cancel("r")
    assert not b.cancel("nobody")
    assert reason(b) == "length"


def test_deadlines_end_queued_and_running_requests() -> None:
    b = bench(max_rows=1)
    b.submit(make_request("running", max_tokens=1000, deadline=0.2))
    b.submit(make_request("queued", deadline=0.1))
    b.submit(make_request("past", deadline=-1.0))
    b.submit(make_request("patient", deadline=100.0))
    assert b.core.next_due() == -1.0
    b.finish()
    reasons = {name: reason(b, name) for name in b.streams}
    assert reasons == {
        "running": "deadline",
        "queued": "deadline",
        "past": "deadline",
        "patient": "length",
    }
    assert b.streams["running"].tokens
    assert not b.streams["queued"].tokens


def test_a_slow_reader_pauses_only_itself_and_is_ended() -> None:
    b = bench(SchedulerConfig(stream_buffer=10, slow_reader_timeout_s=5.0))
    slow = b.submit(make_request("slow", max_tokens=300))
    fast = b.submit(make_request("fast", max_tokens=300))
    slow.reads = False
    while fast.finished is None:
        b.step()
    assert 10 <= len(slow.tokens) <= 10 + 2 * 5, "the buffer and what was in flight"
    assert b.core.statistics(b.now).paused == 1
    assert b.core.next_due() is not None
    b.run()
    assert slow.finished is None
    b.now = b.core.next_due() or 0.0
    b.run()
    assert reason(b, "slow") == "slow_reader"
    assert slow.finished is not None
    assert "unread" in slow.finished.detail
    b.finish()


def test_a_paused_row_goes_on_when_it_is_read() -> None:
    b = bench(SchedulerConfig(stream_buffer=10, slow_reader_timeout_s=1.0))
    stream = b.submit(make_request(max_tokens=100))
    stream.reads = False
    b.run()
    paused = len(stream.tokens)
    pages = b.core.statistics(b.now).pages_used
    assert pages > 0, "it keeps its pages"
    b.now += 0.9
    assert not b.core.acknowledge("r", 1, b.now), "still full, but it was read"
    b.now += 0.9
    b.run()
    assert stream.finished is None, "the time runs from the last read"
    assert b.core.acknowledge("r", paused - 1, b.now)
    stream.unread = 0
    b.finish()
    assert reason(b) == "length"


# --- numbers --------------------------------------------------------------------------------------


def test_usage_and_statistics_agree() -> None:
    b = bench(SchedulerConfig(depth=3))
    for number in range(20):
        b.submit(make_request(f"r{number}", prompt=7, max_tokens=30, seed=number))
    b.finish()
    usages = [s.finished.usage for s in b.streams.values() if s.finished]
    total = b.core.statistics(b.now)
    assert total.generated_tokens == sum(u.completion_tokens for u in usages) == 600
    assert total.prompt_tokens == 140
    assert total.drafted == sum(u.draft_tokens for u in usages) > 0
    assert total.accepted == sum(u.accepted_tokens for u in usages)
    assert sum(total.drafted_per_position) == total.drafted
    assert sum(total.accepted_per_position) == total.accepted
    assert len(total.drafted_per_position) == len(total.accepted_per_position) == 3
    assert total.cycles == sum(total.cycles_by_depth) == total.cycles_by_depth[3]
    assert total.row_cycles == sum(u.cycles for u in usages) + total.wasted_rows
    assert total.tokens_per_second > 0
    for usage in usages:
        assert usage.completion_tokens == 1 + usage.cycles + usage.accepted_tokens
        assert usage.started_at is not None
        assert usage.first_token_at is not None
        assert usage.last_token_at == usage.finished_at
        assert usage.submitted_at <= usage.started_at <= usage.first_token_at


def test_rows_that_must_not_draft() -> None:
    b = bench(SchedulerConfig(depth=4))
    b.submit(make_request("off", max_tokens=20, depth_cap=0))
    b.submit(make_request("two", max_tokens=20, depth_cap=2))
    b.submit(make_request("free", max_tokens=20, depth_cap=99))
    b.finish()
    positions = {
        name: len(s.finished.usage.drafted_per_position)
        for name, s in b.streams.items()
        if s.finished
    }
    assert positions == {"off": 0, "two": 2, "free": 4}
    specs = [c.spec.speculative for plan in b.engine.plans for c in plan.prefill if c.spec]
    assert specs == [False, True, True]


def test_without_a_head_there_is_no_drafting() -> None:
    b = bench(SchedulerConfig(depth="auto"), max_depth=0)
    b.submit(make_request(max_tokens=20))
    b.finish()
    assert b.core.statistics(0).drafted == 0
    assert b.engine.plans[0].prefill[0].spec is not None
    assert not b.engine.plans[0].prefill[0].spec.speculative


def test_a_snapshot_is_a_value() -> None:
    b = bench()
    before = b.core.statistics(0.0)
    b.submit(make_request())
    b.finish()
    assert before.submitted == 0
    assert before.finished == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.submitted = 1  # type: ignore[misc]


def test_a_client_cut_off_at_its_deadline_ended_by_it() -> None:
    """gRPC cancels the handler when the deadline passes, maybe before a plan sees it."""
    for at, cause in ((0.97, FinishReason.DEADLINE), (0.5, FinishReason.CANCELLED)):
        b = bench()
        b.core.submit(make_request(deadline=1.0), 0.0)
        b.core.cancel("r", FinishReason.CANCELLED, at)
        ((_, event),) = b.core.take_events()
        assert isinstance(event, Finished)
        assert event.reason is cause
