"""What the core refuses and what it takes; deadlines and tenants are in test_admission.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from engine.plan import SamplingParams
from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.request import (
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
)
from tests.scheduler.bench import TICK_S, Bench, make_request
from tests.scheduler.cores import bench, reason

# --- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "request_", "says"),
    [
        ("prompt_ids", make_request(prompt=[]), "at least one"),
        ("prompt_ids", make_request(prompt=[1, 1000]), "vocab_size"),
        ("prompt_ids", make_request(prompt=[-1]), "vocab_size"),
        ("prompt_ids", make_request(prompt=[2**40]), "vocab_size"),
        ("prompt_ids", make_request(prompt=101), "100 prompt tokens"),
        ("max_tokens", make_request(max_tokens=0), ">= 1"),
        ("max_tokens", make_request(max_tokens=301), "300"),
        ("max_tokens", make_request(prompt=100, max_tokens=221), "320 (KV page pool)"),
        ("stop_ids", make_request(stop_ids=(1000,)), "vocab_size"),
        ("stop_ids", make_request(stop_ids=tuple(range(65))), "64"),
        ("depth_cap", make_request(depth_cap=-1), ">= 0"),
        ("deadline", make_request(deadline=math.nan), "number"),
        ("min_tokens", make_request(min_tokens=-1), "0 … 10 (max_tokens)"),
        ("min_tokens", make_request(min_tokens=11), "0 … 10 (max_tokens)"),
        ("logprobs", make_request(logprobs=21), "0 … 20"),
        ("logprobs", make_request(logprobs=-1), "0 … 20"),
        ("prompt_logprobs", make_request(prompt_logprobs=21), "0 … 20"),
        ("session_id", make_request(session_id="s", reuse_prefix=False), "reuse_prefix"),
    ],
)
def test_what_can_never_run_is_refused(field: str, request_: GenerationRequest, says: str) -> None:
    config = SchedulerConfig(max_prompt_tokens=100, max_completion_tokens=300)
    b = bench(config, context_length=400, pages=20)
    with pytest.raises(InvalidRequestError) as error:
        b.submit(request_)
    assert error.value.field == field
    assert says in error.value.message
    assert b.core.is_empty
    assert b.core.statistics(0).refused == {"invalid": 1}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"seed": 2**64},
        {"seed": -1},
        {"draft_temperature": -1.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"presence_penalty": -2.1},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": ((1000, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, math.inf),)},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(bad: dict[str, float]) -> None:
    sampling = SamplingParams(**bad)  # type: ignore[arg-type]
    request = dataclasses.replace(make_request(), sampling=sampling)
    with pytest.raises(InvalidRequestError) as error:
        bench().submit(request)
    assert error.value.field == f"sampling.{next(iter(bad))}"


def test_what_is_within_its_limits_is_taken_and_passed_on() -> None:
    sampling = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=tuple((token, -1.0) for token in range(300)),
        coupled=True,
    )
    request = make_request(
        prompt=40, stop_ids=tuple(range(60)), min_tokens=10, logprobs=20, prompt_logprobs=0
    )
    b = bench(SchedulerConfig(prefill_chunk=16))
    stream = b.submit(dataclasses.replace(request, sampling=sampling))
    b.finish()  # compares log probabilities and tokens
    (spec,) = [c.spec for plan in b.engine.plans for c in plan.prefill if c.spec]
    assert spec.sampling == sampling
    assert (spec.min_tokens, spec.logprobs, spec.prompt_logprobs) == (10, 20, 0)
    assert len(stream.tokens) == 10
    assert not set(stream.tokens) & set(range(60))


def test_prompt_log_probabilities_come_with_the_first_tokens() -> None:
    """Over chunks, in the order of the prompt, once; also for a prompt of one token."""
    b = bench(SchedulerConfig(prefill_chunk=16))
    for size in (1, 2, 16, 17, 50):
        b.submit(make_request(f"r{size}", prompt=size, max_tokens=4, prompt_logprobs=2))
    b.finish()


def test_context_length_is_exact() -> None:
    b = bench(context_length=64)
    b.submit(make_request("fits", prompt=60, max_tokens=4))
    with pytest.raises(InvalidRequestError, match="context length"):
        b.submit(make_request("not", prompt=60, max_tokens=5))
    assert b.core.limits.room(60) == 4
    b.finish()


def test_a_prompt_that_never_fits_the_queue_is_invalid() -> None:
    with pytest.raises(InvalidRequestError, match="20 prompt tokens"):
        bench(SchedulerConfig(max_queued_tokens=20)).submit(make_request(prompt=21))


def test_ids_are_unique_among_live_requests() -> None:
    b = bench()
    b.submit(make_request("a"))
    with pytest.raises(InvalidRequestError, match="live"):
        b.submit(make_request("a"))
    b.finish()
    b.submit(make_request("a"))  # the first has ended
    b.run()
    assert reason(b, "a") == "length"


def test_an_id_can_return_while_the_old_row_is_in_flight() -> None:
    b = bench()
    b.submit(make_request("a", max_tokens=50))
    b.plan()
    b.plan()
    b.cancel("a")
    b.submit(make_request("a", max_tokens=3))
    b.run()
    assert len(b.streams["a"].tokens) == 3


def test_the_queue_is_bounded_in_requests() -> None:
    b = bench(SchedulerConfig(max_queue=3))
    for number in range(3):
        b.submit(make_request(f"r{number}"))
    with pytest.raises(QueueFullError) as error:
        b.submit(make_request("late"))
    assert error.value.limit == "max_queue (3 requests)"
    assert error.value.retry_after_s == 1.0, "nothing measured yet"
    b.plan()
    b.submit(make_request("late"))
    b.finish()


def test_the_queue_is_bounded_in_tokens() -> None:
    b = bench(SchedulerConfig(max_queued_tokens=30))
    b.submit(make_request("a", prompt=20))
    b.submit(make_request("b", prompt=10))
    with pytest.raises(QueueFullError, match=r"max_queued_tokens \(30 prompt tokens\)") as error:
        b.submit(make_request("c", prompt=25))
    assert error.value.retry_after_s == 2.0, "two must leave"
    b.finish()


def samples(count: int, name: str = "s", **others: Any) -> list[GenerationRequest]:
    return [make_request(f"{name}/{n}", seed=n, group=name, **others) for n in range(count)]


def nothing_is_left(b: Bench, refused: str) -> None:
    statistics = b.core.statistics(b.now)
    assert (statistics.submitted, sum(statistics.finished.values())) == (1, 0)
    assert statistics.refused == {refused: 1}
    assert (b.core.live, b.core.take_events()) == (1, [])


def test_samples_are_let_in_together() -> None:
    """Or none of them is: no one of them has ever been submitted, or has ended."""
    b = bench(SchedulerConfig(max_queue=4))
    b.submit(make_request("a"))
    with pytest.raises(QueueFullError) as error:
        b.submit_together(samples(4))
    assert error.value.limit == "max_queue (4 requests)"
    nothing_is_left(b, "max_queue")
    b.submit_together(samples(3))
    b.finish()
    assert b.core.statistics(b.now).submitted == 4


def test_samples_are_bounded_in_tokens_together() -> None:
    b = bench(SchedulerConfig(max_queued_tokens=30))
    b.submit(make_request("a", prompt=1))
    with pytest.raises(QueueFullError, match="max_queued_tokens"):
        b.submit_together(samples(3, prompt=10))
    nothing_is_left(b, "max_queued_tokens")
    b.finish()


def test_samples_are_bounded_by_their_tenant_together() -> None:
    tenants = {"t": TenantPolicy(max_queued_tokens=30)}
    b = bench(SchedulerConfig(tenants=tenants))
    b.submit(make_request("a", prompt=1, tenant="t"))
    with pytest.raises(QueueFullError, match="of the tenant"):
        b.submit_together(samples(3, prompt=10, tenant="t"))
    nothing_is_left(b, "tenant_queued_tokens")
    with pytest.raises(InvalidRequestError, match=r"4 times 10 .* 30 \(max_queued_tokens of the t"):
        b.submit_together(samples(4, prompt=10, tenant="t"))
    b.finish()


def test_a_tenant_with_nothing_waiting_has_all_its_samples_let_in() -> None:
    """They are more than its share, and would be refused for ever."""
    tenants = {name: TenantPolicy() for name in "abc"}
    b = bench(SchedulerConfig(max_queue=16, tenants=tenants))
    b.submit_together(samples(16, tenant="a"))
    b.finish()
    b.submit_together(samples(3, name="b", tenant="b"))
    with pytest.raises(QueueFullError, match="below their share"):
        b.submit_together(samples(12, name="c", tenant="b"))
    b.finish()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_queue": 3}, "4 sequences; the limit is 3 (max_queue)"),
        ({"max_queued_tokens": 30}, "4 times 10 prompt tokens; the limit is 30"),
    ],
)
def test_more_samples_than_may_ever_wait_are_invalid(config: dict[str, int], says: str) -> None:
    b = bench(SchedulerConfig(**config))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as error:
        b.submit_together(samples(4, prompt=10))
    assert error.value.field == "n"
    assert says in error.value.message
    assert b.core.is_empty
    assert b.core.statistics(0).refused == {"invalid": 1}


def test_the_retry_delay_follows_throughput() -> None:
    """100 tokens a request at 50 tokens a second: a place every two seconds."""
    b = bench(SchedulerConfig(max_queue=1, depth=0))
    b.submit(make_request("a", max_tokens=100))
    while b.step():
        b.now += 0.02 - TICK_S
    b.submit(make_request("b"))
    with pytest.raises(QueueFullError) as error:
        b.submit(make_request("c"))
    assert error.value.retry_after_s == pytest.approx(2.0, rel=0.1)


def test_a_closed_core_refuses() -> None:
    b = bench()
    b.core.close("draining")
    b.core.close("another reason")
    with pytest.raises(NotRunningError, match="draining"):
        b.submit(make_request())
    assert b.core.statistics(0).refused == {"not_running": 1}


@pytest.mark.parametrize(
    "bad",
    [
        {"max_queue": 0},
        {"max_queued_tokens": 0},
        {"max_rows": 0},
        {"prefill_chunk": 0},
        {"stream_buffer": 0},
        {"max_prompt_tokens": 0},
        {"max_completion_tokens": -1},
        {"slow_reader_timeout_s": 0},
        {"close_timeout_s": math.nan},
        {"rate_window_s": -1},
        {"session_ttl_s": 0},
        {"max_sessions": 0},
        {"depth": 9},
        {"depth": "deep"},
        {"loop": "eager"},
    ],
)
def test_config_out_of_range(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SchedulerConfig(**bad)  # type: ignore[arg-type]
