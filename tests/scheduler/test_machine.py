"""The core under random use: a hypothesis state machine and long random runs.

`Bench` checks after every move; here are the moves.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from scheduler.config import SchedulerConfig
from scheduler.request import (
    FinishReason,
    GenerationRequest,
    Priority,
    QueueFullError,
    Refusal,
)
from tests.scheduler.bench import (
    SMALL,
    TICK_S,
    TINY,
    Bench,
    Multiples,
    fuzz,
    make_request,
    small_engine,
)


class CoreMachine(RuleBasedStateMachine):
    in_flight: ClassVar[int]
    pages: ClassVar[int] = 60
    config: ClassVar[SchedulerConfig] = SMALL

    def __init__(self) -> None:
        super().__init__()
        engine = small_engine(boundaries=5, pages=self.pages)
        self.bench = Bench(engine=engine, config=self.config, in_flight=self.in_flight)
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 59), min_size=1, max_size=40),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 2**64 - 1),
        stop_ids=st.lists(st.integers(0, 59), max_size=3).map(tuple),
        depth_cap=st.none() | st.integers(0, 5),
        due=st.none() | st.integers(-1, 30),
        reads=st.booleans(),
        session=st.none() | st.sampled_from(["s", "t", "u"]),
        form=st.none() | st.sampled_from([2, 3]),
        follows=st.none() | st.integers(0, 20),
        samples=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from(Priority),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        stop_ids: tuple[int, ...],
        depth_cap: int | None,
        due: int | None,
        reads: bool,
        session: str | None,
        form: int | None,
        follows: int | None,
        samples: int,
        priority: Priority,
    ) -> None:
        """`follows`: the prompt goes on from what an earlier stream has had so far."""
        streams = list(self.bench.streams.values())
        if follows is not None and streams:
            stream = streams[-1 - follows % len(streams)]
            prompt = [*stream.request.prompt_ids, *stream.tokens, *prompt][:56]
        group = f"g{self.count}" if samples > 1 else None
        for _ in range(samples):
            self.count += 1
            request = make_request(
                f"r{self.count}",
                prompt=prompt,
                max_tokens=max_tokens,
                seed=seed + self.count & 2**64 - 1,
                stop_ids=stop_ids,
                depth_cap=depth_cap,
                deadline=None if due is None else self.bench.now + due * TICK_S,
                session_id=session,
                constraint=None if form is None else Multiples(form, 60),
                group=group,
                priority=priority,
            )
            self._submit(request, reads)

    def _submit(self, request: GenerationRequest, reads: bool) -> None:
        try:
            self.bench.submit(request).reads = reads
        except QueueFullError as refusal:
            if refusal.reason is Refusal.DEADLINE:
                assert request.deadline is not None
                assert request.deadline > self.bench.now
                return
            statistics = self.bench.core.statistics(self.bench.now)
            full = statistics.queued_requests == SMALL.max_queue
            size = len(request.prompt_ids)
            assert full or statistics.queued_tokens + size > SMALL.max_queued_tokens

    @rule(session=st.sampled_from(["s", "t", "u"]))
    def release_session(self, session: str) -> None:
        kept = {info.session_id for info in self.bench.core.sessions(self.bench.now)}
        assert self.bench.core.release_session(session) is (session in kept)
        self.bench.core.integrity()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Pressure from somewhere: any entry may go between two plans."""
        if entries := list(self.bench.core.keeping.cache):
            entry = entries[data.draw(st.integers(0, len(entries) - 1))]
            self.bench.core.keeping.cache.evict(entry, "pages")
            self.bench.core.integrity()

    @precondition(lambda self: self.bench.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.ABORTED]))
    def cancel(self, data: st.DataObject, reason: FinishReason) -> None:
        assert self.bench.cancel(data.draw(st.sampled_from(sorted(self.bench.live))), reason)

    @rule()
    def cancel_unknown(self) -> None:
        ended = next((i for i, s in self.bench.streams.items() if s.finished), "nobody")
        assert not self.bench.cancel(ended)

    @precondition(lambda self: self.bench.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bench.live)))
        self.bench.read(self.bench.live[name])

    @precondition(lambda self: len(self.bench.outstanding) < self.in_flight)
    @rule()
    def plan(self) -> None:
        self.bench.plan()

    @precondition(lambda self: self.bench.outstanding)
    @rule()
    def commit(self) -> None:
        self.bench.commit()

    @rule(ticks=st.integers(1, 8))
    def steps(self, ticks: int) -> None:
        for _ in range(ticks):
            self.bench.step()

    @rule(ticks=st.integers(1, 60))
    def wait(self, ticks: int) -> None:
        self.bench.now += ticks * TICK_S

    def teardown(self) -> None:
        self.bench.finish()


class PlainMachine(CoreMachine):
    in_flight = 1


class PipelinedMachine(CoreMachine):
    in_flight = 2


class TinyPlainMachine(PlainMachine):
    """Any request may fill the pool, so that rows are preempted all the time."""

    pages = 24
    config = TINY


class TinyPipelinedMachine(PipelinedMachine):
    pages = 24
    config = TINY


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPlain = PlainMachine.TestCase
TestPlain.settings = SETTINGS
TestPipelined = PipelinedMachine.TestCase
TestPipelined.settings = SETTINGS
TestTinyPlain = TinyPlainMachine.TestCase
TestTinyPlain.settings = SETTINGS
TestTinyPipelined = TinyPipelinedMachine.TestCase
TestTinyPipelined.settings = SETTINGS


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_thousand_requests_leave_nothing(in_flight: int) -> None:
    """Ended for every reason there is here; each stream is what the request gets alone."""
    bench = fuzz(seed=in_flight, requests=1000, in_flight=in_flight)
    statistics = bench.core.statistics(bench.now)
    assert statistics.submitted == 1000
    seen = {reason for reason, count in statistics.finished.items() if count >= 10}
    assert {"stop", "length", "cancelled", "deadline", "slow_reader"} <= seen
    assert statistics.refused["max_queue"] + statistics.refused["max_queued_tokens"] > 0
    assert statistics.pages_peak <= statistics.pages_total
    assert min(statistics.prefix_hits, statistics.guided_cycles) > 100
    assert {"pages", "boundaries"} <= set(statistics.evictions)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("engine", [{}, {"boundaries": 0}, {"max_rows": 3}], ids=str)
def test_rows_that_are_preempted_all_the_time_get_what_they_get_alone(
    engine: dict[str, Any], in_flight: int
) -> None:
    bench = fuzz(
        seed=in_flight,
        requests=250,
        in_flight=in_flight,
        config=TINY,
        priorities=True,
        pages=24,
        **engine,
    )
    statistics = bench.core.statistics(bench.now)
    assert min(statistics.preemptions.values()) > 3
    assert statistics.recomputed_tokens > 50
    ends = [stream.finished for stream in bench.streams.values() if stream.finished]
    most = max(end.usage.preemptions for end in ends)
    assert sum(end.usage.preemptions for end in ends) == sum(statistics.preemptions.values())
    assert most > 1


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_preempt_each_other_are_done_before_rows_one_by_one(
    seed: int, in_flight: int
) -> None:
    """No livelock: a trace takes fewer steps than its requests would one after the other."""
    rng = random.Random(seed)
    engine = small_engine(pages=24, boundaries=rng.choice([0, 5]))
    config = replace(TINY, max_queue=40, max_queued_tokens=2000, depth=rng.choice([0, 3]))
    bench = Bench(engine=engine, config=config, in_flight=in_flight)
    steps = 0
    for number in range(30):
        prompt, most = rng.randint(1, 50), rng.randint(1, 46)
        priority = rng.choice(list(Priority))
        bench.submit(
            make_request(
                f"r{number}", prompt=prompt, max_tokens=most, seed=number, priority=priority
            )
        )
        steps += -(-prompt // 16) + most
    assert bench.run(steps) > 0
    assert sum(bench.core.statistics(bench.now).preemptions.values()) > 5
    bench.finish()


def test_the_same_inputs_give_the_same_plans() -> None:
    first, second = (fuzz(seed=7, requests=60, in_flight=2) for _ in range(2))
    assert len(first.engine.plans) > 50
    assert str(first.engine.plans) == str(second.engine.plans)


def test_steps_in_flight_do_not_change_tokens() -> None:
    """Without cancels or deadlines, plain and pipelined give the same tokens."""
    outcomes = []
    for in_flight in (1, 2):
        bench = Bench(engine=small_engine(), in_flight=in_flight)
        for number in range(40):
            bench.submit(
                make_request(
                    f"r{number}",
                    prompt=1 + number * 7 % 50,
                    max_tokens=1 + number * 5 % 40,
                    seed=number,
                    stop_ids=(number % 60,),
                )
            )
        bench.finish()
        outcomes.append({name: stream.tokens for name, stream in bench.streams.items()})
    assert outcomes[0] == outcomes[1]
