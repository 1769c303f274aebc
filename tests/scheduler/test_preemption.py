"""Rows that give up what others need, one promise at a time. Random use is in test_machine.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from engine.plan import PrefillChunk
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Priority, Usage
from scheduler.sequence import Preempted
from tests.scheduler.bench import TICK_S, Bench, Multiples, Stream, make_request
from tests.scheduler.fake_engine import FakeEngine

CONFIG = SchedulerConfig(depth=0, prefill_chunk=16, page_watermark=0.0)
LOW, MID, HIGH = Priority


def bench(config: SchedulerConfig = CONFIG, *, in_flight: int = 1, **options: int) -> Bench:
    defaults = {"page_size": 4, "pages": 12, "context_length": 48, "max_rows": 6}
    engine = FakeEngine(**{**defaults, **options})  # type: ignore[arg-type]
    return Bench(engine=engine, config=config, in_flight=in_flight)


def usage(stream: Stream) -> Usage:
    assert stream.finished is not None
    return stream.finished.usage


def steps(b: Bench, count: int) -> None:
    for _ in range(count):
        b.step()


def preemptions(b: Bench, name: str) -> int:
    stream = b.streams[name]
    if stream.finished is not None:
        return usage(stream).preemptions
    return b.core._live[name].preemptions


def order_of_first_preemptions(b: Bench, names: Iterable[str]) -> list[str]:
    """Run to the end; who was preempted, in the order in which each was for the first time."""
    seen: list[str] = []
    while b.step():
        seen += [name for name in names if name not in seen and preemptions(b, name)]
    return seen


def until_preempted(b: Bench, name: str) -> None:
    """Step until the request waits for a row once more."""
    for _ in range(200):
        b.step()
        if preemptions(b, name) and not b.core._live[name].started:
            return
    raise AssertionError(f"{name} was never preempted")


def first_chunks(b: Bench) -> list[PrefillChunk]:
    return [chunk for plan in b.engine.plans for chunk in plan.prefill if chunk.spec is not None]


# --- for pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_lowest_class_goes_first_then_the_youngest(in_flight: int) -> None:
    b = bench(in_flight=in_flight)
    classes = {"low": LOW, "old": MID, "young": MID, "high": HIGH}
    for name, priority in classes.items():
        b.submit(make_request(name, prompt=4, max_tokens=40, priority=priority))
        b.step()
    assert order_of_first_preemptions(b, classes) == ["low", "young", "old"]
    b.finish()
    assert preemptions(b, "high") == 0, "the most senior row stays"


def test_of_several_juniors_the_most_junior_leaves() -> None:
    b = bench(replace(CONFIG, prefill_chunk=64))
    for name, priority in (("mid", MID), ("old", LOW), ("young", LOW)):
        b.submit(make_request(name, prompt=8, max_tokens=27, priority=priority))
    b.step()
    core = b.core
    core._pool.open(99)
    core._pool.allocate(99, core._pool.unused)  # somebody else has all the others
    assert core._preemption.serve([core._live["mid"]], lambda: None) == set()
    leaving = {name: core._live[name].leaving for name in b.live}
    assert leaving == {"mid": None, "old": None, "young": Preempted.PAGES}


def test_a_resumed_row_is_as_old_as_it_was() -> None:
    """It left first because nobody read it; when it is back, the younger one leaves."""
    b = bench(replace(CONFIG, stream_buffer=8), pages=14)
    for name, most in (("a", 24), ("b", 40), ("c", 40)):
        b.submit(make_request(name, prompt=4, max_tokens=most))
    b.streams["b"].reads = False
    until_preempted(b, "b")
    b.read(b.streams["b"])
    b.streams["b"].reads = True
    until_preempted(b, "c")
    assert b.core._live["b"].started
    assert preemptions(b, "b") == 1
    b.finish()
    started = [usage(b.streams[name]).started_at for name in "abc"]
    assert started == [0.0, 0.0, 0.0], "the first time counts"
    assert preemptions(b, "a") == 0


def test_of_a_class_a_row_that_nobody_reads_goes_first() -> None:
    b = bench(replace(CONFIG, stream_buffer=8))
    slow = b.submit(make_request("slow", prompt=4, max_tokens=40))
    slow.reads = False
    for name in "ab":
        b.submit(make_request(name, prompt=4, max_tokens=40))
    assert order_of_first_preemptions(b, ["slow", "a", "b"])[0] == "slow"


def test_a_row_that_nobody_reads_does_not_come_back() -> None:
    config = replace(CONFIG, stream_buffer=8, slow_reader_timeout_s=100 * TICK_S)
    b = bench(config)
    slow = b.submit(make_request("slow", prompt=4, max_tokens=40))
    slow.reads = False
    for name in "ab":
        b.submit(make_request(name, prompt=4, max_tokens=24))
    until_preempted(b, "slow")
    had = len(slow.tokens)
    while b.step():
        assert not b.core._live["slow"].started
    assert list(b.live) == ["slow"], "the others are done"
    b.read(slow)
    slow.reads = True
    b.finish()
    assert len(slow.tokens) == 40 > had

    again = bench(config)
    slow = again.submit(make_request("slow", prompt=4, max_tokens=40))
    slow.reads = False
    for name in "ab":
        again.submit(make_request(name, prompt=4, max_tokens=24))
    again.run()
    again.now += 100 * TICK_S
    again.run()
    assert slow.finished is not None
    assert slow.finished.reason is FinishReason.SLOW_READER
    assert usage(slow).preemptions == 1
    assert usage(slow).completion_tokens == len(slow.tokens)


def test_kept_prefixes_go_before_any_row() -> None:
    b = bench(boundaries=8, pages=16)
    for number in range(3):
        b.submit(make_request(f"k{number}", prompt=[50 + number] * 6, max_tokens=6))
        b.run()
    assert b.core.statistics(b.now).pages_cached >= 8
    b.submit(make_request("a", prompt=4, max_tokens=28))
    b.submit(make_request("b", prompt=[9, 9, 9], max_tokens=28))
    b.finish()
    statistics = b.core.statistics(b.now)
    assert sum(statistics.preemptions.values()) == 0
    assert statistics.evictions["pages"] > 0


def test_less_is_drafted_before_anybody_sits_out() -> None:
    b = bench(replace(CONFIG, depth=4), pages=8, context_length=32)
    for name in "ab":
        b.submit(make_request(name, prompt=8, max_tokens=16))
    while not b.core.statistics(b.now).preemptions["pages"]:
        assert b.step()
    depths = [p.decode.depth for p in b.engine.plans if p.decode and len(p.decode.rows) == 2]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 4 > depths[-1]
    b.finish()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_row_that_leaves_gets_what_is_in_flight(in_flight: int) -> None:
    """`FakeEngine` refuses to release a row that a step names; `Bench` compares the tokens."""
    b = bench(in_flight=in_flight)
    for name in "abc":
        b.submit(make_request(name, prompt=4, max_tokens=40))
    waited = 0
    for _ in range(200):
        if len(b.outstanding) == in_flight:
            b.commit()
        b.plan()
        leaving = [s for s in b.core._rows.values() if s.leaving is not None]
        assert all(s.tickets for s in leaving), "it might have left at once"
        waited += len(leaving)
    assert (waited > 0) == (in_flight > 1)
    b.finish()
    assert b.core.statistics(b.now).preemptions["pages"] > 1


def test_rows_start_only_beside_a_margin() -> None:
    """Half of the pool must be left beside others; alone a row may have all of it."""
    b = bench(replace(CONFIG, page_watermark=0.5))
    b.submit(make_request("a", prompt=16, max_tokens=8))
    b.step()
    b.submit(make_request("b", prompt=8, max_tokens=8))
    b.step()
    assert b.core.statistics(b.now).running == 1, "three of eight would leave five"
    while b.streams["a"].finished is None:
        assert not b.streams["b"].tokens
        b.step()
    b.submit(make_request("c", prompt=8, max_tokens=8))
    b.step()
    assert b.core.statistics(b.now).running == 2, "seven are left"
    b.finish()


# --- what a preempted request goes on with --------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_resumed_row_is_told(kept: bool) -> None:
    b = bench(boundaries=4 if kept else 0, max_rows=1)
    form = Multiples(3, 1000)
    request = make_request(
        "low",
        prompt=[7, 8, 9],
        max_tokens=30,
        min_tokens=12,
        stop_ids=(3,),
        logprobs=2,
        prompt_logprobs=1,
        constraint=form,
        priority=LOW,
    )
    low = b.submit(request)
    steps(b, 6)
    b.submit(make_request("high", prompt=4, max_tokens=4, priority=HIGH))
    until_preempted(b, "low")
    emitted = list(low.tokens)
    assert len(emitted) == 6
    waiting = b.core.statistics(b.now)
    assert (waiting.preempted_waiting, waiting.queued_requests) == (1, 2)
    assert waiting.preemptions == {"pages": 0, "priority": 1}
    b.finish()
    first, again = (c for c in first_chunks(b) if c.spec and c.spec.constraint is form)
    assert first.spec is not None
    assert again.spec is not None
    assert (first.spec.output_start, first.spec.prompt_logprobs) == (None, 1)
    assert again.spec == replace(
        first.spec, max_tokens=24, min_tokens=6, prompt_logprobs=None, output_start=3
    )
    assert (again.restore is not None) == kept
    prefix = [] if again.prefix is None else again.prefix.tolist()
    assert prefix + again.tokens.tolist() == [7, 8, 9, *emitted]
    assert again.start == (8 if kept else 0)
    assert b.core.statistics(b.now).recomputed_tokens == (0 if kept else 8)


def test_what_is_counted_goes_on() -> None:
    b = bench(boundaries=6)
    b.submit(make_request("before", prompt=17, max_tokens=4))
    b.run()
    b.submit(make_request("senior", prompt=4, max_tokens=36))
    junior = b.submit(make_request("junior", prompt=[*range(1, 17), 3], max_tokens=20))
    until_preempted(b, "junior")
    first_token_at = b.core._live["junior"].first_token_at
    b.finish()
    end = usage(junior)
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (17, 20, 16)
    assert end.preemptions == preemptions(b, "junior") >= 1
    assert end.first_token_at == first_token_at
    assert end.cycles == 20 - 1 - end.preemptions, "a first token after each start is no cycle"
    hits = b.core.statistics(b.now)
    assert (hits.prefix_lookups, hits.prefix_hits) == (3, 1), "starts, not resumptions"


@pytest.mark.parametrize("how", ["cancel", "deadline", "drain"])
def test_a_preempted_request_ends_properly_while_it_waits(how: str) -> None:
    b = bench()
    b.submit(make_request("senior", prompt=4, max_tokens=40))
    due = 1.0 if how == "deadline" else None
    junior = b.submit(make_request("junior", prompt=[7, 8], max_tokens=40, deadline=due))
    until_preempted(b, "junior")
    if how == "deadline":
        b.now = 1.0
    else:
        b.cancel("junior", FinishReason.SHUTDOWN if how == "drain" else FinishReason.CANCELLED)
    b.plan()
    assert junior.finished is not None
    assert junior.finished.reason.value == {"cancel": "cancelled", "drain": "shutdown"}.get(
        how, how
    )
    assert usage(junior).completion_tokens == len(junior.tokens) > 0
    assert usage(junior).preemptions == 1
    b.finish()


def test_a_session_keeps_what_its_preempted_turn_left() -> None:
    b = bench(boundaries=6, max_rows=1)
    low = make_request("low", prompt=[7, 8], max_tokens=40, session_id="s", priority=LOW)
    stream = b.submit(low)
    steps(b, 6)
    b.submit(make_request("high", prompt=4, max_tokens=4, priority=HIGH))
    until_preempted(b, "low")
    assert not b.core.sessions(b.now), "the turn is not over"
    b.cancel("low")
    kept = [info.tokens for info in b.core.sessions(b.now)]
    assert kept == [2 + len(stream.tokens) - 1]
    b.finish()


def test_preempted_requests_come_back_in_their_order() -> None:
    b = bench(max_rows=3)
    for name in "abc":
        b.submit(make_request(name, prompt=4, max_tokens=40))
    b.step()
    b.submit(make_request("late", prompt=4, max_tokens=4))
    until_preempted(b, "b")
    assert [s.request_id for s in b.core._queue.candidates(b.now)] == ["b", "c", "late"]
    b.finish()


def test_the_bounds_of_the_queue_are_for_newcomers() -> None:
    b = bench(replace(CONFIG, max_queue=1, max_queued_tokens=20))
    for name in "ab":
        b.submit(make_request(name, prompt=[5] * 12, max_tokens=30))
        b.step()
    b.submit(make_request("late", prompt=20, max_tokens=4))
    until_preempted(b, "b")
    statistics = b.core.statistics(b.now)
    assert statistics.queued_requests == 2
    assert statistics.queued_tokens > 20
    b.finish()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_leader_that_is_preempted_holds_nobody_up(in_flight: int) -> None:
    """Its samples go on as before: another one leads, and each gets its own tokens."""
    b = bench(replace(CONFIG, prefill_chunk=4), boundaries=4, in_flight=in_flight)
    b.submit(make_request("senior", prompt=4, max_tokens=30, priority=HIGH))
    steps(b, 3)
    for number in range(3):
        b.submit(make_request(f"s{number}", prompt=[6] * 25, max_tokens=12, group="g"))
    b.finish()
    assert sum(preemptions(b, f"s{number}") for number in range(3)) > 0


# --- for a higher class ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_higher_class_takes_a_row(in_flight: int) -> None:
    b = bench(max_rows=2, pages=40, in_flight=in_flight)
    low = b.submit(make_request("low", prompt=4, max_tokens=30, priority=LOW))
    mid = b.submit(make_request("mid", prompt=4, max_tokens=30))
    steps(b, 5)
    high = b.submit(make_request("high", prompt=4, max_tokens=6, priority=HIGH))
    steps(b, 5)
    assert high.tokens
    b.finish()
    assert [usage(s).preemptions for s in (low, mid, high)] == [1, 0, 0]
    assert b.core.statistics(b.now).preemptions == {"pages": 0, "priority": 1}


def test_the_same_class_takes_nothing() -> None:
    b = bench(max_rows=1)
    b.submit(make_request("a", prompt=4, max_tokens=30, priority=HIGH))
    steps(b, 5)
    b.submit(make_request("b", prompt=4, max_tokens=6, priority=HIGH))
    b.finish()
    assert b.core.statistics(b.now).preemptions == {"pages": 0, "priority": 0}


def test_a_higher_class_takes_pages_from_as_few_as_it_needs() -> None:
    b = bench()
    for number in range(3):
        b.submit(make_request(f"low{number}", prompt=[number] * 9, max_tokens=7, priority=LOW))
    steps(b, 3)
    high = b.submit(make_request("high", prompt=26, max_tokens=6, priority=HIGH))
    steps(b, 4)
    assert high.tokens
    assert [preemptions(b, f"low{number}") for number in range(3)] == [0, 1, 1]
    b.finish()


def test_nobody_is_displaced_in_vain() -> None:
    """The lower class holds three of the pages, the same class the others, and ten are needed."""
    b = bench()
    b.submit(make_request("high", prompt=16, max_tokens=24, priority=HIGH))
    low = b.submit(make_request("low", prompt=[9] * 6, max_tokens=4, priority=LOW))
    steps(b, 2)
    b.submit(make_request("next", prompt=32, max_tokens=6, priority=HIGH))
    steps(b, 3)
    assert usage(low).preemptions == 0 if low.finished else preemptions(b, "low") == 0
    b.finish()


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_request_is_displaced_so_often_and_no_more(most: int) -> None:
    b = bench(replace(CONFIG, max_displacements=most), max_rows=1)
    low = b.submit(make_request("low", prompt=4, max_tokens=40, priority=LOW))
    for number in range(5):
        steps(b, 3)
        b.submit(make_request(f"high{number}", prompt=4, max_tokens=4, priority=HIGH))
        steps(b, 6)
    b.finish()
    assert usage(low).preemptions == most


def test_a_row_that_nobody_reads_is_displaced_when_nothing_else_happens() -> None:
    """It is in no step, and there is none: the next plan must still free it."""
    b = bench(replace(CONFIG, stream_buffer=4), max_rows=1)
    low = b.submit(make_request("low", prompt=4, max_tokens=30, priority=LOW))
    low.reads = False
    while b.step():
        pass
    high = b.submit(make_request("high", prompt=4, max_tokens=6, priority=HIGH))
    steps(b, 10)
    assert high.finished is not None
    b.finish()


@pytest.mark.parametrize(
    "bad", [{"page_watermark": 1.0}, {"page_watermark": -0.1}, {"max_displacements": -1}], ids=str
)
def test_config_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SchedulerConfig(**bad)
