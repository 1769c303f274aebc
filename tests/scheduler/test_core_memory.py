"""Prompts in pieces, pages and rows of the core. Random use is in test_machine.py."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason
from tests.scheduler.bench import Bench, make_request
from tests.scheduler.cores import bench
from tests.scheduler.fake_engine import FakeEngine

# --- prefill --------------------------------------------------------------------------------------


def test_prompts_are_cut_at_their_own_multiples() -> None:
    """Whatever its neighbours are, a prompt is cut at the same places."""
    b = bench(SchedulerConfig(prefill_chunk=16))
    for number, length in enumerate([5, 40, 10, 8, 33, 16]):
        b.submit(make_request(f"r{number}", prompt=length))
    b.finish()
    cuts: dict[int, list[tuple[int, int]]] = {}
    for plan in b.engine.plans:
        assert sum(len(chunk.tokens) for chunk in plan.prefill) <= 16
        for chunk in plan.prefill:
            cuts.setdefault(chunk.row, []).append((chunk.start, len(chunk.tokens)))
    assert list(cuts.values()) == [
        [(0, 5)],
        [(0, 16), (16, 16), (32, 8)],
        [(0, 10)],
        [(0, 8)],
        [(0, 16), (16, 16), (32, 1)],
        [(0, 16)],
    ]
    together = [len(plan.prefill) for plan in b.engine.plans if plan.prefill]
    assert max(together) == 2, "an end and a short prompt share a step"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_long_prefill_does_not_hold_up_a_stream(in_flight: int) -> None:
    """Each step that runs a chunk also runs the cohort (`Bench` checks all rows of it)."""
    b = bench(SchedulerConfig(prefill_chunk=16), in_flight=in_flight)
    stream = b.submit(make_request("stream", max_tokens=200))
    while not stream.tokens:
        b.step()
    b.submit(make_request("long", prompt=600, max_tokens=5))
    counts = [len(stream.tokens)]
    while not b.streams["long"].tokens:
        b.step()
        counts.append(len(stream.tokens))
    assert len(counts) > 30
    assert all(after > before for before, after in itertools.pairwise(counts[:31]))


def test_decode_does_not_hold_up_prefill() -> None:
    """With seven busy streams a joiner's prompt still goes one chunk per step."""
    b = bench(SchedulerConfig(prefill_chunk=16), in_flight=1)
    for number in range(7):
        b.submit(make_request(f"r{number}", max_tokens=500))
    for _ in range(10):
        b.step()
    joiner = b.submit(make_request("joiner", prompt=160, max_tokens=5))
    for _ in range(10):
        b.step()
    assert len(joiner.tokens) == 1
    b.finish()


def test_first_come_first_served() -> None:
    b = bench(SchedulerConfig(prefill_chunk=16), max_rows=2)
    for number in range(6):
        b.submit(make_request(f"r{number}", prompt=20, max_tokens=8))
    b.finish()
    started = [s.finished.usage.started_at for s in b.streams.values() if s.finished]
    assert started == sorted(started, key=lambda at: at or 0.0)


def test_a_big_request_at_the_head_is_not_overtaken_for_ever() -> None:
    """Small ones that would fit wait behind a big one that does not fit yet."""
    b = bench(pages=10, page_size=4, context_length=64)
    b.submit(make_request("first", prompt=24, max_tokens=12))
    b.step()
    b.submit(make_request("big", prompt=20, max_tokens=20))
    b.submit(make_request("small", prompt=4, max_tokens=4))
    b.step()
    assert b.core.statistics(0).running == 1
    b.finish()
    big, small = (b.streams[name].finished for name in ("big", "small"))
    assert big is not None
    assert small is not None
    assert (big.usage.started_at or 0) <= (small.usage.started_at or 0)


# --- memory and rows ------------------------------------------------------------------------------


def test_pages_follow_the_row_and_stay_within_its_worst_case() -> None:
    b = bench(SchedulerConfig(depth=4), page_size=4, in_flight=1)
    b.submit(make_request(prompt=6, max_tokens=30))
    used = []
    while b.step():
        used.append(b.core.statistics(b.now).pages_used)
    assert used[0] == 2, "the prompt"
    assert max(used) <= 9
    assert used == [*sorted(used[:-1]), 0]


def test_rows_wait_for_the_release_of_others() -> None:
    b = bench(max_rows=2)
    for number in range(5):
        b.submit(make_request(f"r{number}", max_tokens=6))
    b.finish()  # FakeEngine raises beyond max_rows
    assert b.core.statistics(0).max_rows == 2


def test_the_operator_may_allow_fewer_rows() -> None:
    b = bench(SchedulerConfig(max_rows=3), max_rows=8)
    for number in range(9):
        b.submit(make_request(f"r{number}", max_tokens=6))
    most = 0
    while b.step():
        most = max(most, b.core.statistics(b.now).rows_held)
    assert most == 3


def test_a_row_is_not_planned_when_it_must_be_finished() -> None:
    """max_tokens 1 is the last chunk's own token; no decode follows, read or unread."""
    b = bench()
    b.submit(make_request(max_tokens=1))
    b.finish()
    assert [plan.decode for plan in b.engine.plans] == [None, None]


def test_a_row_that_stopped_in_an_unread_step_costs_one_row() -> None:
    stop = make_request(max_tokens=100)
    tokens = FakeEngine(token=lambda prompt, index: 9 if index == 5 else 1, acceptance=0.0)
    b = Bench(engine=tokens, in_flight=2)
    b.core.submit(dataclasses.replace(stop, stop_ids=(9,)), 0.0)
    events = []
    while not (plan := b.core.plan(0.0)).is_empty or b.core.in_flight:
        if not plan.is_empty:
            tokens.submit(plan)
        if plan.is_empty or b.core.in_flight == 2:
            events += b.core.commit(tokens.collect(), 0.0)
        b.core.integrity()
    b.core.integrity(idle=True)
    assert events[-1][1].reason is FinishReason.STOP  # type: ignore[union-attr]
    assert b.core.statistics(0).wasted_rows == 1
    assert b.core.statistics(0).generated_tokens == 6
    assert tokens.rows == 0
