"""The door: deadlines that cannot be met, limits of tenants, and delays from what was measured."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.request import (
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    Priority,
    QueueFullError,
    Refusal,
)
from scheduler.throughput import Estimate
from tests.scheduler.bench import TICK_S, Bench, make_request, small_engine

ROWS, PROMPT, OUTPUT = 2, 8, 20


def loaded(**options: Any) -> Bench:
    """A core that has answered requests of one kind under load, and is idle again."""
    config = SchedulerConfig(depth=0, prefill_chunk=16, **{"max_queue": 100, **options})
    bench = Bench(engine=small_engine(max_rows=ROWS, boundaries=0), config=config)
    fill(bench, 24, "warm")
    bench.run()
    return bench


def fill(bench: Bench, count: int, name: str = "w", **others: Any) -> None:
    for number in range(count):
        ask(bench, f"{name}{number}", **others)


def ask(bench: Bench, name: str = "r", *, left: float | None = None, **others: Any) -> Any:
    """Submits a request with `left` seconds to its deadline."""
    deadline = None if left is None else bench.now + left
    options = {"prompt": PROMPT, "max_tokens": OUTPUT, **others}
    return bench.submit(make_request(name, deadline=deadline, **options))


def refusal(bench: Bench, **others: Any) -> QueueFullError:
    with pytest.raises(QueueFullError) as caught:
        ask(bench, "refused", **others)
    return caught.value


def starts_in(bench: Bench, **others: Any) -> float:
    options = {"prompt": PROMPT, "max_tokens": OUTPUT, **others}
    return bench.core._door.starts_in(make_request("asks", **options), bench.now).likely


def test_without_evidence_nobody_is_refused() -> None:
    config = SchedulerConfig(depth=0, prefill_chunk=16, max_queue=100)
    bench = Bench(engine=small_engine(max_rows=ROWS), config=config)
    fill(bench, 30)
    ask(bench, left=TICK_S)
    for _ in range(20):
        bench.step()
    ask(bench, "other", left=TICK_S)
    bench.finish()


def test_who_can_start_at_once_is_let_in() -> None:
    """However slow the machine was found to be under load."""
    bench = loaded()
    assert ask(bench, left=TICK_S / 2)
    bench.step()
    assert bench.core._live["r"].started
    assert ask(bench, "second", left=TICK_S / 2), "there is another row"
    bench.step()
    assert bench.core._live["second"].started
    bench.finish()


def test_a_row_that_has_ended_is_as_good_as_free() -> None:
    config = SchedulerConfig(depth=0, prefill_chunk=16, max_queue=100)
    bench = Bench(engine=small_engine(max_rows=1), config=config, in_flight=1)
    fill(bench, 12, "warm")
    bench.run()
    first = ask(bench, "first", max_tokens=3)
    while first.finished is None:
        bench.step()
    assert bench.core._rows, "not given back yet"
    ask(bench, left=TICK_S / 2)
    bench.step()
    assert bench.core._live["r"].started
    bench.finish()


def test_who_would_start_too_late_is_refused() -> None:
    """Two rows of 20 tokens each, 20 requests ahead: some 200 steps, and a deadline after 50."""
    bench = loaded()
    fill(bench, 20)
    bench.step()
    error = refusal(bench, left=50 * TICK_S)
    assert error.reason is Refusal.DEADLINE
    assert error.limit.startswith("deadline (0.5 s are left; it would start in about ")
    assert ask(bench, left=400 * TICK_S)
    bench.finish()


def test_nothing_of_a_refused_request_remains() -> None:
    bench = loaded(tenants={"t": TenantPolicy(weight=2.0)})
    fill(bench, 20)
    bench.step()
    before = bench.core.statistics(bench.now)
    refusal(bench, left=2 * TICK_S, tenant="t", group="g", session_id="s")
    bench.core.integrity()
    after = bench.core.statistics(bench.now)
    assert after.refused == {"deadline": 1}
    assert (after.submitted, after.queued_requests) == (before.submitted, before.queued_requests)
    assert (after.queued_tokens, after.sessions) == (before.queued_tokens, 0)
    assert "refused" not in bench.core._live
    assert not bench.core._groups._groups
    assert bench.core._queue.tenants.find("t") is None
    bench.finish()


def test_the_last_sample_meets_the_deadline_too() -> None:
    """Two rows of 20 tokens each: the eighth of as many samples starts after some 80 steps."""
    bench = loaded()
    fill(bench, 2, max_tokens=2)
    bench.step()

    def samples(count: int, name: str) -> list[GenerationRequest]:
        deadline = bench.now + 40 * TICK_S
        options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": OUTPUT, "deadline": deadline}
        return [make_request(f"{name}/{n}", group=name, **options) for n in range(count)]

    with pytest.raises(QueueFullError) as caught:
        bench.submit_together(samples(8, "eight"))
    assert caught.value.reason is Refusal.DEADLINE
    bench.submit_together(samples(2, "two"))
    bench.finish()


def test_after_the_delay_there_is_time() -> None:
    """The delay is how much too late it would have been."""
    bench = loaded()
    fill(bench, 20)
    bench.step()
    left = 80 * TICK_S
    error = refusal(bench, left=left)
    assert error.retry_after_s == pytest.approx(starts_in(bench) - left)
    due = bench.now + error.retry_after_s + OUTPUT * TICK_S  # rows end together, that far apart
    while bench.now < due:
        bench.step()
    ask(bench, left=left)
    bench.finish()
    end = bench.streams["r"].finished
    assert end is not None
    assert end.usage.started_at is not None, "the deadline was not met after all"


LIMITED = {"t": TenantPolicy(max_rows=1), "free": TenantPolicy()}


def test_a_tenants_own_rows_are_waited_for() -> None:
    """One row, 20 tokens each: five ahead take some 100 steps, though the machine is idle."""
    bench = loaded(tenants=LIMITED)
    fill(bench, 12, "before", tenant="t")
    bench.run()
    fill(bench, 6, tenant="t")
    bench.step()
    assert refusal(bench, left=50 * TICK_S, tenant="t").reason is Refusal.DEADLINE
    assert ask(bench, left=200 * TICK_S, tenant="t")
    assert ask(bench, "other", left=TICK_S, tenant="free")
    bench.finish()


def test_a_full_tenants_delay_is_that_of_its_rows() -> None:
    policies = {"t": TenantPolicy(max_rows=1, max_queued_tokens=4 * PROMPT)}
    bench = loaded(tenants=policies)
    for _ in range(10):
        ask(bench, f"b{len(bench.streams)}", tenant="t")
        bench.run()
    ask(bench, "runs", tenant="t")
    bench.step()
    fill(bench, 4, tenant="t")
    error = refusal(bench, tenant="t", prompt=2 * PROMPT)
    assert error.reason is Refusal.TENANT_QUEUED_TOKENS
    due = bench.now + error.retry_after_s + 3 * TICK_S
    while bench.now < due:
        bench.step()
    assert ask(bench, "again", tenant="t", prompt=2 * PROMPT), "two of its own have started"
    bench.finish()


@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32))
def test_who_is_refused_for_a_limit_of_rows_would_have_missed(seed: int) -> None:
    """Random outputs, one to three rows, with others on the machine or not: at most one in ten
    would have started earlier than the least estimate, before which calls are refused; with a third
    more than the likely one, at least three in four start in time."""
    early = late = asked = 0
    for most in (1, 2, 3):
        for busy in (False, True):
            waits = waits_of_a_limited_tenant(seed, most, busy)
            assert len(waits) >= 10
            assert any(estimate.least > 10 * TICK_S for _, estimate in waits)
            asked += len(waits)
            early += sum(waited < estimate.least for waited, estimate in waits)
            late += sum(waited > estimate.likely * 4 / 3 + 4 * TICK_S for waited, estimate in waits)
    assert early <= asked / 10
    assert late <= asked / 4


def waits_of_a_limited_tenant(seed: int, most: int, busy: bool) -> list[tuple[float, Estimate]]:
    """Seconds that each request waited, and was expected to when it came; the first 200 steps
    are for measuring."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        depth=0,
        prefill_chunk=32,
        max_queue=100,
        max_queued_tokens=10**5,
        tenants={"t": TenantPolicy(max_rows=most)},
    )
    bench = Bench(engine=small_engine(max_rows=6, boundaries=0, pages=200), config=config)
    bench.core.integrity = lambda *, idle=False: None  # type: ignore[method-assign]
    asked: dict[str, tuple[float, Estimate]] = {}
    for number in range(500):
        tenant = bench.core._queue.tenants.find("t")
        if (tenant is None or tenant.queued < 8) and rng.random() < 0.3:
            request = make_request(
                f"t{number}", prompt=PROMPT, max_tokens=rng.randint(1, 40), tenant="t"
            )
            if number > 200:
                estimate = bench.core._door.starts_in(request, bench.now)
                asked[request.request_id] = (bench.now, estimate)
            bench.submit(request)
        if busy and rng.random() < 0.15:
            ask(bench, f"o{number}", max_tokens=rng.randint(1, 30))
        bench.step()
    bench.run()
    waits = []
    for name, (now, estimate) in asked.items():
        end = bench.streams[name].finished
        assert end is not None
        assert end.usage.started_at is not None
        waits.append((end.usage.started_at - now, estimate))
    return waits


@pytest.mark.parametrize("prompt", [4, 16, 56])
@pytest.mark.parametrize("ahead", [4, 10, 20])
def test_the_estimate_is_true(prompt: int, ahead: int) -> None:
    """Within a factor of 1.5, for loads that the prompts bound and such that the rows do."""
    bench = Bench(
        engine=small_engine(max_rows=ROWS, boundaries=0),
        config=SchedulerConfig(depth=0, prefill_chunk=16, max_queue=100, max_queued_tokens=10**5),
    )
    kind: dict[str, Any] = {"prompt": prompt, "max_tokens": 12}
    fill(bench, 24, "warm", **kind)
    bench.run()
    fill(bench, ahead, **kind)
    bench.step()
    expected = starts_in(bench, **kind)
    now = bench.now
    stream = ask(bench, **kind)
    bench.finish()
    took = stream.finished.usage.started_at - now
    assert took / 1.5 < expected < took * 1.5


def test_lower_classes_are_not_ahead() -> None:
    bench = loaded(max_rows=2)
    fill(bench, 20, priority=Priority.BATCH)
    bench.step()
    assert refusal(bench, left=50 * TICK_S, priority=Priority.BATCH).reason is Refusal.DEADLINE
    assert ask(bench, left=50 * TICK_S, priority=Priority.INTERACTIVE)
    bench.finish()


def test_other_tenants_are_ahead_as_far_as_their_share_goes() -> None:
    bench = loaded()
    fill(bench, 30, tenant="busy")
    bench.step()
    assert refusal(bench, left=50 * TICK_S, tenant="busy").reason is Refusal.DEADLINE
    assert ask(bench, left=50 * TICK_S, tenant="new")
    bench.finish()


def test_samples_of_one_prompt_are_one_prompt_ahead() -> None:
    """Followers start from what their leader saves."""
    bench = loaded()
    fill(bench, 1, "cold", prompt=56)
    first = starts_in(bench)
    bench.run()
    fill(bench, 8, "sample", prompt=56, group="g")
    requests, tokens = bench.core._queue.ahead("", Priority.DEFAULT, generated=0.0)
    assert (requests, tokens) == (8, 56 + 7)
    assert starts_in(bench) > first
    bench.finish()


def test_a_first_step_that_compiles_is_not_the_rule() -> None:
    config = SchedulerConfig(depth=0, prefill_chunk=16, max_queue=100, max_queued_tokens=10**5)
    bench = Bench(engine=small_engine(max_rows=6, boundaries=0), config=config)
    fill(bench, 6, prompt=56)
    bench.step()
    bench.now += 30.0
    bench.run()
    fill(bench, 4, "again", prompt=56)
    assert 0 < starts_in(bench) < 1.0
    bench.finish()


def test_idle_time_is_no_slowness() -> None:
    bench = loaded()
    fill(bench, 10)
    bench.step()
    busy = starts_in(bench)
    bench.run()
    bench.now += 3600.0
    fill(bench, 10, "again")
    bench.step()
    assert starts_in(bench) == pytest.approx(busy, rel=0.1)
    bench.finish()


def test_a_deadline_that_has_passed_ends_the_request_not_the_call() -> None:
    bench = loaded()
    fill(bench, 20)
    bench.step()
    stream = ask(bench, left=-TICK_S)
    bench.step()
    assert stream.finished.reason is FinishReason.DEADLINE
    bench.finish()


def test_a_tenant_has_its_own_bound() -> None:
    bench = loaded(max_rows=1, tenants={"small": TenantPolicy(max_queued_tokens=20)})
    fill(bench, 4, "other")
    fill(bench, 2, "s", tenant="small")
    error = refusal(bench, tenant="small")
    assert error.reason is Refusal.TENANT_QUEUED_TOKENS
    assert error.limit == "max_queued_tokens of the tenant (20 prompt tokens)"
    assert error.retry_after_s > 0
    assert ask(bench, "r", tenant="another")
    with pytest.raises(InvalidRequestError, match=r"prompt_ids: 21 tokens; the limit is 20"):
        ask(bench, "never", prompt=21, tenant="small")
    assert bench.core.statistics(0).refused == {"tenant_queued_tokens": 1, "invalid": 1}
    bench.finish()
    assert ask(bench, "later", tenant="small", prompt=20)
    bench.finish()


@pytest.mark.parametrize("bound", [{"max_queue": 16}, {"max_queued_tokens": 16 * PROMPT}])
def test_a_flood_does_not_shut_the_door_on_others(bound: dict[str, Any]) -> None:
    """Of 16 places a tenant has a right to four; the last two are for who has fewer waiting."""
    tenants = {name: TenantPolicy() for name in "abc"}
    bench = Bench(engine=small_engine(), config=SchedulerConfig(tenants=tenants, **bound))
    fill(bench, 14, tenant="b")
    error = refusal(bench, tenant="b")
    assert error.limit.endswith("for tenants below their share)")
    assert error.retry_after_s > 0
    fill(bench, 1, "a", tenant="a")
    fill(bench, 1, "x", tenant="x")
    assert refusal(bench, tenant="a").reason in (Refusal.MAX_QUEUE, Refusal.MAX_QUEUED_TOKENS)
    assert "share" not in refusal(bench, tenant="a").limit
    seen = bench.core.statistics(0).refused_by_tenant
    assert {tenant: count for (tenant, _), count in seen.items()} == {"b": 1, "a": 2}
    bench.finish()


def test_without_policies_the_whole_queue_is_anybodys() -> None:
    bench = Bench(engine=small_engine(), config=SchedulerConfig(max_queue=16))
    fill(bench, 16, tenant="b")
    assert refusal(bench, tenant="a").limit == "max_queue (16 requests)"
    bench.finish()


def test_a_default_tenant_policy_is_for_each() -> None:
    config = SchedulerConfig(default_tenant=TenantPolicy(max_queued_tokens=10))
    bench = Bench(engine=small_engine(), config=config)
    ask(bench, "a", tenant="a")
    ask(bench, "b", tenant="b")
    assert refusal(bench, tenant="a").reason is Refusal.TENANT_QUEUED_TOKENS
    bench.finish()
