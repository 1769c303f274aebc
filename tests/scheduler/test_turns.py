"""Who goes first, rule by rule: queues made by hand, and small cases through the real core."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import tenants
from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.queue import MOST_PASSED, WaitingQueue
from scheduler.request import Priority
from scheduler.sequence import Sequence
from tests.scheduler.bench import make_request
from tests.scheduler.clocks import Clocks
from tests.scheduler.test_order import FEW, POLICIES, config_of, watched

BATCH, DEFAULT, INTERACTIVE = Priority


class Line:
    """A queue of its own, with requests made by hand."""

    def __init__(self, **options: Any) -> None:
        bounds = {"max_queue": 10**6, "max_queued_tokens": 10**9}
        self.queue = WaitingQueue(SchedulerConfig(**{**bounds, **options}))
        self.clocks = Clocks(self.queue)
        self.rows: dict[int, Sequence] = {}
        self.ids = itertools.count(1)

    def push(self, name: str, *, now: float = 0.0, prompt: int = 10, **others: Any) -> Sequence:
        request = make_request(name, prompt=prompt, **others)
        sequence = Sequence(
            request=request,
            prompt=np.array(request.prompt_ids, dtype=np.int32),
            submitted_at=now,
            depth_cap=0,
            work=prompt,
        )
        self.queue.push(sequence)
        return sequence

    def start(self, sequence: Sequence, now: float = 0.0) -> None:
        sequence.row = next(self.ids)
        self.rows[sequence.row] = sequence
        self.queue.start(sequence, now)
        self.queue.integrity(self.rows)

    def end(self, sequence: Sequence) -> None:
        del self.rows[sequence.row]
        self.queue.row_freed(sequence, 0.0)
        self.queue.integrity(self.rows)

    def may_start(self, sequence: Sequence) -> bool:
        return not self.queue.tenants.of(sequence.request.tenant).full

    def rule(self, now: float) -> Callable[[Sequence], tuple[float, ...]]:
        """Sorts those who wait: class with ageing, counter, arrival; the last two by tenant."""

        levels = self.clocks.levels(now)

        def key(sequence: Sequence) -> tuple[float, ...]:
            mine, name = levels[sequence], sequence.request.tenant
            line = [s for s in self.queue if s.request.tenant == name and levels[s] is mine]
            counter = self.queue.tenants.of(name).counters[mine]
            return -mine, counter, min(s.arrival for s in line), sequence.arrival

        return key

    def order(self, now: float = 0.0) -> list[str]:
        """Everybody's names, if nobody's start cost anything."""
        self.queue.integrity(self.rows)
        names = [sequence.request_id for sequence in self.queue.candidates(now)]
        self.queue.integrity(self.rows)
        return names

    def drain(self, now: float = 0.0) -> list[str]:
        """Starts everybody, in order; the names."""
        names = []
        for sequence in self.queue.candidates(now):
            self.start(sequence, now)
            names.append(sequence.request_id)
        return names


def test_classes_then_arrival() -> None:
    line = Line()
    for name, priority in [("b", BATCH), ("d", DEFAULT), ("i", INTERACTIVE), ("j", INTERACTIVE)]:
        line.push(name, priority=priority)
    assert line.order() == ["i", "j", "d", "b"]
    assert line.queue.by_class() == {BATCH: 1, DEFAULT: 1, INTERACTIVE: 2}


def test_a_tenant_may_not_exceed_its_class() -> None:
    line = Line(tenants={"c": TenantPolicy(max_priority=BATCH)})
    line.push("c", tenant="c", priority=INTERACTIVE)
    line.push("d", priority=DEFAULT)
    assert line.order() == ["d", "c"]
    assert line.queue.by_class()[BATCH] == 1


def pass_by(line: Line, now: float, priority: Priority = INTERACTIVE) -> None:
    """A request of this class starts and ends."""
    passer = line.push(f"passer{now}", now=now, tenant="passer", priority=priority)
    line.start(passer, now)
    line.end(passer)


def test_being_passed_lifts_class_by_class() -> None:
    line = Line(ageing_s=10.0)
    line.push("b", priority=BATCH)
    line.push("d", now=5.0, priority=DEFAULT)
    assert line.order(50.0) == ["d", "b"], "nothing has gone before them"
    pass_by(line, 50.0)
    line.push("i", now=59.0, priority=INTERACTIVE)
    assert line.order(59.9) == ["i", "d", "b"]
    assert line.order(60.0) == ["d", "i", "b"], "lifted by one"
    assert line.order(90.0) == ["d", "i", "b"], "nobody has passed b as DEFAULT"
    pass_by(line, 90.0)
    assert line.order(99.9) == ["d", "i", "b"]
    assert line.order(100.0) == ["b", "d", "i"], "and by another; b came first"
    assert line.queue.oldest(100.0) == {BATCH: 100.0, DEFAULT: 95.0, INTERACTIVE: 41.0}


def test_only_the_first_of_a_lane_is_lifted_and_a_start_takes_it_back() -> None:
    line = Line(ageing_s=10.0)
    first = line.push("a0", tenant="a")
    second = line.push("a1", tenant="a")
    pass_by(line, 1.0)
    line.push("i", now=12.0, tenant="i", priority=INTERACTIVE)
    assert line.order(12.0) == ["a0", "i", "a1"]
    line.start(first, 12.0)
    assert line.order(100.0) == ["i", "a1"]
    pass_by(line, 100.0)
    assert (line.order(109.9), second.level) == (["i", "a1"], DEFAULT)
    assert (line.order(110.0), second.level) == (["i", "a1"], INTERACTIVE), "a0 was charged"


def test_who_comes_before_the_first_of_a_lane_takes_its_place() -> None:
    """A preempted request, or the next one when the first is cancelled."""
    line = Line(ageing_s=10.0)
    back = line.push("a0", tenant="a")
    line.start(back, 0.0)
    line.push("a1", tenant="a")
    line.push("a2", tenant="a")
    pass_by(line, 0.0)
    line.push("i", now=9.0, tenant="i", priority=INTERACTIVE)
    assert line.order(10.0) == ["a1", "i", "a2"]
    line.end(back)
    back.row = -1
    line.queue.requeue(back)
    assert line.order(10.0) == ["a0", "i", "a1", "a2"]
    line.queue.remove(back)
    assert line.order(10.0) == ["a1", "i", "a2"]


def test_who_returns_is_lifted_as_it_was() -> None:
    line = Line(ageing_s=10.0)
    back = line.push("a0", tenant="a")
    line.push("a1", tenant="a")
    pass_by(line, 0.0)
    line.push("i", now=9.0, tenant="i", priority=INTERACTIVE)
    assert line.order(10.0) == ["a0", "i", "a1"]
    line.start(back, 10.0)
    line.end(back)
    back.row = -1
    line.queue.requeue(back)
    assert (line.order(10.0), back.level) == (["i", "a0", "a1"], INTERACTIVE), "it was charged"


@pytest.mark.parametrize("passer", [BATCH, DEFAULT])
def test_equals_and_who_was_lifted_pass_nobody(passer: Priority) -> None:
    line = Line(ageing_s=10.0)
    lifted = line.push("b", tenant="b", priority=passer)
    pass_by(line, 0.0)
    line.order(10.0)
    assert lifted.level > passer
    line.push("a", now=10.0, tenant="a")
    line.start(lifted, 10.0)
    line.push("i", now=30.0, tenant="i", priority=INTERACTIVE)
    assert line.order(30.0) == ["i", "a"]


def test_tenants_take_turns() -> None:
    line = Line()
    for number in range(4):
        line.push(f"a{number}", tenant="a")
    for number in range(2):
        line.push(f"b{number}", tenant="b")
    assert line.drain() == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_generated_tokens_count() -> None:
    line = Line()
    first = line.push("a0", tenant="a")
    line.start(first)
    line.push("a1", tenant="a")
    line.push("b0", tenant="b", prompt=15)
    line.push("b1", tenant="b")
    assert line.order()[0] == "a1"
    line.queue.charge(first, 30)
    assert line.drain() == ["b0", "b1", "a1"]


def test_cached_tokens_do_not_count() -> None:
    line = Line()
    first = line.push("a0", tenant="a", prompt=100)
    first.cached = 99
    line.start(first)
    assert line.queue.tenants.served == {"other": 1}


def test_weights_divide_the_charge() -> None:
    line = Line(tenants={"heavy": TenantPolicy(weight=2.0)})
    for number in range(4):
        line.push(f"h{number}", tenant="heavy")
        line.push(f"l{number}", tenant="light")
    assert line.drain()[:6] == ["h0", "l0", "h1", "l1", "h2", "h3"]


def test_time_without_work_earns_no_credit() -> None:
    line = Line()
    for number in range(9):
        line.push(f"a{number}", tenant="a")
    for number in range(6):
        line.start(line.queue._waiting[f"a{number}"])
    for number in range(3):
        line.push(f"b{number}", tenant="b")
    assert line.drain() == ["a6", "b0", "a7", "b1", "a8", "b2"], "not all of b first"


def test_nor_when_nobody_waits() -> None:
    """a runs alone, and nothing of it waits, when b comes for the first time."""
    line = Line()
    first = line.push("a0", tenant="a")
    line.start(first)
    line.queue.charge(first, 1000)
    for number in range(3):
        line.push(f"b{number}", tenant="b")
    for number in range(3):
        line.push(f"a{number + 1}", tenant="a")
    assert line.drain() == ["b0", "a1", "b1", "a2", "b2", "a3"]


def test_a_limit_of_ones_own_earns_no_credit() -> None:
    line = Line(tenants={"one": TenantPolicy(max_rows=1)})
    for number in range(4):
        line.push(f"o{number}", tenant="one")
        line.push(f"a{number}", tenant="a")
    running = line.queue._waiting["o0"]
    assert line.drain() == ["o0", "a0", "a1", "a2", "a3"]
    for number in range(4, 6):
        line.push(f"a{number}", tenant="a")
    line.end(running)
    second = line.queue._waiting["o1"]
    line.start(second)
    line.end(second)
    assert line.order() == ["a4", "a5", "o2", "o3"], "o1 was its turn; then it is a's"


def test_a_full_tenant_does_not_block_others() -> None:
    config = config_of(tenants={"one": TenantPolicy(max_rows=1)})
    bench, watch = watched(config)
    for number in range(3):
        bench.submit(make_request(f"o{number}", tenant="one", max_tokens=5, priority=INTERACTIVE))
    bench.submit(make_request("other", priority=BATCH))
    bench.step()
    assert watch.starts == ["o0", "other"]
    bench.finish()
    assert watch.starts == ["o0", "other", "o1", "o2"]


def test_a_big_request_is_not_starved_by_small_ones() -> None:
    """The first that does not fit blocks those behind it, whoever they belong to."""
    bench, watch = watched(config_of(max_queue=100), pages=30)
    bench.submit(make_request("small", tenant="a", max_tokens=20))
    bench.step()
    bench.submit(make_request("big", tenant="b", prompt=40, max_tokens=55))
    for number in range(20):
        bench.submit(make_request(f"s{number}", tenant=f"t{number}", max_tokens=20))
        bench.step()
    bench.finish()
    assert watch.starts[:2] == ["small", "big"]


def test_who_returns_is_first_of_its_class_and_pays_once() -> None:
    line = Line(ageing_s=10.0, max_rows=1)
    first = line.push("first", priority=BATCH)
    for number in range(3):
        line.push(f"r{number}", now=1.0, priority=BATCH)
    line.start(first)
    assert line.queue.tenants.served["other"] == 10
    line.end(first)
    first.row = -1
    line.queue.requeue(first)
    assert line.order(15.0) == ["first", "r0", "r1", "r2"]
    assert line.order(50.0) == ["first", "r0", "r1", "r2"]
    line.start(first)
    assert line.queue.tenants.served["other"] == 10


def test_a_returned_request_may_exceed_the_bounds() -> None:
    line = Line(max_queue=1, max_queued_tokens=10)
    first = line.push("first")
    line.start(first)
    line.end(first)
    first.row = -1
    line.push("second")
    line.queue.requeue(first)
    assert len(line.queue) == 2
    assert line.order() == ["first", "second"]


@FEW
@given(seed=st.integers(0, 2**32))
def test_the_head_is_who_the_rule_says(seed: int) -> None:
    """Random use, returns included, against the rule in one line; every count after every move."""
    rng = random.Random(seed)
    line = Line(tenants=POLICIES, ageing_s=10.0)
    now = 0.0
    for number in range(150):
        now += rng.random()
        running, waiting = list(line.rows.values()), list(line.queue)
        move = rng.random()
        if move < 0.45:
            tenant = rng.choice(["a", "b", "c", "x", "y"])
            prompt = rng.randint(1, 30) if tenant != "c" else 1
            priority = rng.choice(list(Priority))
            line.push(f"r{number}", now=now, prompt=prompt, tenant=tenant, priority=priority)
        elif move < 0.65 and (head := next(line.queue.candidates(now), None)):
            line.start(head, now)
        elif move < 0.75 and running:
            line.queue.charge(rng.choice(running), rng.randint(1, 8))
        elif move < 0.85 and running:
            line.end(rng.choice(running))
        elif move < 0.95 and running:
            back = rng.choice(running)
            line.end(back)
            back.row = -1
            line.queue.requeue(back)
        elif waiting:
            line.queue.remove(rng.choice(waiting))
        head = next(line.queue.candidates(now), None)
        line.queue.integrity(line.rows)
        assert head is min(filter(line.may_start, line.queue), key=line.rule(now), default=None)


def test_who_is_passed_over_is_found_again() -> None:
    """Passing over costs a step no more than MOST_PASSED looks."""
    line = Line()
    for number in range(MOST_PASSED + 50):
        line.push(f"r{number}", tenant=f"t{number % 7}")
    names = line.order()
    assert len(names) == len(set(names)) == MOST_PASSED


def test_one_tenants_waiting_groups_do_not_end_the_step() -> None:
    """Passing over those of one tenant, under however many names, leaves looks for others."""
    line = Line(tenants=POLICIES)
    for number in range(2 * MOST_PASSED):
        line.push(f"x{number}", tenant=f"x{number % 3}")
    for number in range(2):
        line.push(f"a{number}", tenant="a")
    names = line.order()
    assert names[-2:] == ["a0", "a1"]
    assert len(names) == MOST_PASSED // 4 + 2


def test_idle_tenants_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MOST_IDLE", 3)
    line = Line()
    for number in range(10):
        sequence = line.push(f"r{number}", tenant=f"t{number}")
        line.start(sequence)
        line.end(sequence)
    assert set(line.queue.tenants.all()) == {"t7", "t8", "t9"}


def test_statistics_by_class_and_tenant() -> None:
    bench, _ = watched(config_of(), max_rows=1)
    for number in range(2):
        for name in ("a", "b", "x", "y"):
            bench.submit(make_request(f"{name}{number}", tenant=name, priority=Priority(number)))
    bench.now += 1.0
    statistics = bench.core.statistics(bench.now)
    assert statistics.queued_by_class == {BATCH: 4, DEFAULT: 4, INTERACTIVE: 0}
    assert statistics.oldest_wait_by_class == {BATCH: 1.0, DEFAULT: 1.0, INTERACTIVE: 0.0}
    assert statistics.oldest_wait_s == 1.0
    bench.finish()
    served = bench.core.statistics(bench.now).served
    assert served == {"a": 30, "b": 30, "c": 0, "other": 60}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TenantPolicy(weight=0.0), "weight"),
        (lambda: TenantPolicy(max_rows=0), "max_rows"),
        (lambda: SchedulerConfig(tenants={"other": TenantPolicy()}), "other"),
        (lambda: SchedulerConfig(ageing_s=0.0), "ageing_s"),
    ],
)
def test_policies_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
