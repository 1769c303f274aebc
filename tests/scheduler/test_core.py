"""The core, one promise at a time. Random use is in test_machine.py."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from engine.plan import EngineFailedError, RowResult, SamplingParams, StepResult
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.pages import IntegrityError
from scheduler.request import (
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
    QueueFullError,
)
from tests.scheduler.bench import TICK_S, Bench, make_request
from tests.scheduler.fake_engine import FakeEngine, fake_logprobs


def bench(config: SchedulerConfig | None = None, *, in_flight: int = 2, **engine: int) -> Bench:
    return Bench(
        engine=FakeEngine(**engine),  # type: ignore[arg-type]
        config=config,
        in_flight=in_flight,
    )


def reason(b: Bench, request_id: str = "r") -> str | None:
    finished = b.streams[request_id].finished
    return finished.reason if finished else None


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


def test_a_client_cut_off_at_its_deadline_ended_by_it() -> None:
    """gRPC cancels the handler when the deadline passes, maybe before a plan sees it."""
    for at, reason in ((0.97, FinishReason.DEADLINE), (0.5, FinishReason.CANCELLED)):
        b = bench()
        b.core.submit(make_request(deadline=1.0), 0.0)
        b.core.cancel("r", FinishReason.CANCELLED, at)
        ((_, event),) = b.core.take_events()
        assert isinstance(event, Finished)
        assert event.reason is reason
