"""Whole runs: they repeat, they add up, nothing is left behind, and policies do what they say."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.plan import (
    DecodeBatch,
    Finish,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    page_array,
)
from scheduler import SchedulerConfig
from scheduler.simulation import (
    Amount,
    Arrival,
    Chat,
    Failure,
    Objective,
    Open,
    Scenario,
    Simulation,
    find_machines,
    simulate,
)
from scheduler.simulation.engine import STOP, SimulatedEngine, first_token, work_seed
from scheduler.simulation.report import Summary, jain
from scheduler.simulation.work import Content
from tests.scheduler.simulated import make_kind, make_scenario, make_spec

CHAT = Chat(
    users=24,
    think_s=Amount(median=8, p95=20),
    system_tokens=100,
    message_tokens=Amount(median=20, p95=60),
    output_tokens=Amount(median=30, p95=80),
    turns=Amount(median=6, p95=12),
    ramp_s=10,
)


def chat_scenario(**others: object) -> Scenario:
    values = {"load": CHAT, "machines": 3, "routing": "session-hash", "duration_s": 60.0}
    return make_scenario(**values | others)


# --- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [make_scenario(duration_s=20.0), chat_scenario(duration_s=30.0)],
    ids=["open", "chat"],
)
def test_a_seed_repeats_a_run(scenario: Scenario) -> None:
    one, two = simulate(scenario).to_json(), simulate(scenario).to_json()
    assert one == two
    assert one != simulate(replace(scenario, seed=1)).to_json()


# --- conservation --------------------------------------------------------------------------------


def check_sums(simulation: Simulation) -> None:
    report = simulation.report()
    works = simulation.clients.works
    assert sum(report.outcomes.values()) == report.requests
    assert report.requests == len([w for w in works if w.arrived_at < report.window_s])
    finished = sum(m.requests for m in report.per_machine)
    refused = sum(str(w.outcome).startswith(("refused", "invalid")) for w in works)
    assert finished == len(works) - refused
    assert sum(m.generated_tokens for m in report.per_machine) == sum(
        w.completion_tokens for w in works
    )
    for work in works:
        if work.complete:
            assert work.completion_tokens == min(work.output_tokens, work.max_tokens)


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "session-hash", "prefix-aware"])
def test_everything_ends_once(routing: str) -> None:
    simulation = Simulation(chat_scenario(routing=routing))
    report = simulation.run()
    check_sums(simulation)
    assert report.complete == report.requests > 100


def test_refusals_are_offered_again_and_then_counted() -> None:
    scenario = make_scenario(
        machines=2,
        load=Open(kinds=(make_kind(100, 60),), rate=40.0),
        scheduler=SchedulerConfig(max_queue=4),
        duration_s=20.0,
    )
    simulation = Simulation(scenario)
    report = simulation.run()
    check_sums(simulation)
    assert report.refused_share > 0.1
    assert report.outcomes["refused: max_queue"] + report.complete == report.requests
    offers = Counter(w.attempts for w in simulation.clients.works if not w.complete)
    assert set(offers) == {scenario.attempts}
    assert any(w.complete and w.attempts > 1 for w in simulation.clients.works)


def test_what_can_never_run_is_not_offered_again() -> None:
    trace = (Arrival(arrival_s=0.0, prompt_tokens=50_000, output_tokens=5),)
    simulation = Simulation(make_scenario(load=Open(trace=trace), machines=2))
    report = simulation.run()
    assert simulation.clients.works[0].attempts == 1
    [outcome] = report.outcomes
    assert outcome.startswith("invalid: prompt_ids")


def test_deadlines_end_requests() -> None:
    load = Open(kinds=(make_kind(60, 200, deadline_s=1.5),), rate=6.0)
    simulation = Simulation(make_scenario(load=load))
    report = simulation.run()
    check_sums(simulation)
    assert report.requests - report.complete > 20
    late = [w for w in simulation.clients.works if w.outcome == "deadline"]
    assert all((w.ended_at or 0) - w.arrived_at < 1.5 + 0.2 for w in late)


def test_slow_readers_pause_and_are_not_lost() -> None:
    scenario = make_scenario(
        load=Open(kinds=(make_kind(20, 400),), rate=0.5),
        scheduler=SchedulerConfig(stream_buffer=32),
        reads_per_s=15.0,
    )
    simulation = Simulation(scenario)
    report = simulation.run()
    check_sums(simulation)
    assert report.complete == report.requests
    assert report.end_to_end.p50 > (400 - 64) / 15.0
    fast = simulate(replace(scenario, reads_per_s=None))
    assert fast.end_to_end.p50 < report.end_to_end.p50 / 2


def test_a_machine_that_fails_takes_its_requests_along_and_comes_back() -> None:
    scenario = make_scenario(
        machines=2,
        load=Open(kinds=(make_kind(60, 40),), rate=6.0),
        routing="round-robin",
        failures=(Failure(machine=1, at_s=12.0, back_s=24.0),),
        duration_s=36.0,
    )
    simulation = Simulation(scenario)
    report = simulation.run()
    lost = [w for w in simulation.clients.works if w.outcome == "engine_failed"]
    assert lost
    assert {(w.machine, w.ended_at) for w in lost} == {(1, 12.0)}
    there = [w.submitted_at for w in simulation.clients.works if w.machine == 1]
    assert not [at for at in there if 12.0 < at < 24.0]
    assert [at for at in there if at > 24.0]
    assert report.complete + len(lost) == report.requests


def test_with_every_machine_down_requests_are_refused() -> None:
    failure = Failure(machine=0, at_s=5.0)
    report = simulate(make_scenario(failures=(failure,)))
    assert report.outcomes["refused: no_machine"] > 50


def test_five_thousand_requests_leave_nothing_behind() -> None:
    scenario = make_scenario(
        load=Open(
            kinds=(make_kind(30, 4), make_kind(200, 3, share=0.2), make_kind(20, 30, share=0.1)),
            process="bursts",
            rate=120.0,
            quiet_rate=20.0,
            busy_s=5,
            quiet_s=10,
            shared_tokens=16,
        ),
        machine=make_spec(max_rows=16, max_depth=0, costs={"token_s": 1e-4}),
        duration_s=100.0,
    )
    simulation = Simulation(scenario)
    [machine] = simulation.fleet.machines
    for second in range(100):
        simulation.timeline.run(until=float(second))
        machine.core.integrity()
    report = simulation.run()
    check_sums(simulation)
    assert report.requests > 4000
    assert machine.idle_checks > 10
    assert machine.statistics().rows_held == 0


# --- prefixes and fairness -----------------------------------------------------------------------


def test_next_turns_start_from_what_was_kept() -> None:
    alone = simulate(chat_scenario(machines=1, machine=make_spec(boundaries=64)))
    without = simulate(
        chat_scenario(machines=1, scheduler=SchedulerConfig(prefix_cache=False, max_queue=32))
    )
    assert alone.cached_share > 0.6
    assert without.cached_share == 0
    assert alone.ttft.mean < without.ttft.mean


def test_sessions_are_found_where_they_were_kept_and_not_elsewhere() -> None:
    shares = {
        routing: simulate(
            chat_scenario(routing=routing, machines=8, machine=make_spec(boundaries=64))
        ).cached_share
        for routing in ("round-robin", "session-hash", "prefix-aware")
    }
    assert shares["session-hash"] > 1.3 * shares["round-robin"]
    assert shares["prefix-aware"] > 1.3 * shares["round-robin"]


def test_a_trace_with_sessions_goes_on_from_its_conversation() -> None:
    trace = tuple(
        Arrival(
            arrival_s=10.0 * turn, prompt_tokens=200 * (turn + 1), output_tokens=40, session="s"
        )
        for turn in range(4)
    )
    scenario = make_scenario(load=Open(trace=trace), duration_s=60.0)
    simulation = Simulation(scenario, keep_texts=True)
    simulation.run()
    first, second, *_ = simulation.clients.works
    assert second.prompt[:240] == first.prompt + tuple(first.tokens)
    assert second.cached >= 239
    assert sum(w.cached for w in simulation.clients.works) > 1000


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([4.0, 2.0]) == pytest.approx(36 / 40)
    assert jain([]) == 1.0


def test_summaries() -> None:
    values = np.array([4.0, 1.0, 2.0, 3.0])
    found = Summary.of(values)
    assert (found.count, found.mean, found.p50, found.highest) == (4, 2.5, 2.0, 4.0)
    weighted = Summary.of(values, np.array([1.0, 97.0, 1.0, 1.0]))
    assert (weighted.count, weighted.p50, weighted.p95, weighted.p99) == (100, 1.0, 1.0, 3.0)
    assert Summary.of(np.array([])).count == 0


# --- how many machines ---------------------------------------------------------------------------


def test_the_fewest_machines_are_found() -> None:
    scenario = make_scenario(
        load=Open(kinds=(make_kind(200, 8),), rate=18.0),
        scheduler=SchedulerConfig(depth=0),
        duration_s=15.0,
    )
    objective = Objective(ttft_p95_s=1.0, gap_p99_s=None, refused_share=0.0)
    needed = find_machines(scenario, objective, most=16)
    assert needed.machines is not None
    assert needed.machines > 1
    assert not objective.breaches(needed.report)
    assert needed.fewer is not None
    assert needed.fewer.machines == needed.machines - 1
    assert "ttft_p95_s" in objective.breaches(needed.fewer)
    again = find_machines(scenario, objective, most=16, first=7)
    assert again.machines == needed.machines


def test_when_no_number_is_enough() -> None:
    scenario = make_scenario(duration_s=10.0)
    needed = find_machines(scenario, Objective(ttft_p95_s=1e-6), most=3)
    assert needed.machines is None
    assert set(needed.tried) == {1, 2, 3}


# --- the device ----------------------------------------------------------------------------------


def chunk(row: int, tokens: range, spec: RowSpec) -> PrefillChunk:
    return PrefillChunk(
        row=row,
        tokens=page_array(tokens),
        start=0,
        pages=page_array([1]),
        last=True,
        spec=spec,
    )


def spec_of(seed: int, max_tokens: int, output_start: int | None = None) -> RowSpec:
    return RowSpec(
        sampling=SamplingParams(seed=seed),
        max_tokens=max_tokens,
        stop_ids=(STOP,),
        output_start=output_start,
    )


def drain(engine: SimulatedEngine, row: int, tokens: list[int]) -> Finish:
    for step in range(100):
        batch = DecodeBatch(rows=(row,), pages=page_array([1])[None], depth=2, limits=(2,))
        [result] = engine.run(StepPlan(step=step, decode=batch)).rows
        tokens += result.tokens
        assert result.accepted <= result.drafted <= 2
        if result.finish is not None:
            assert engine.run(StepPlan(step=0, decode=batch)).rows[0].tokens == ()
            return result.finish
    raise AssertionError("it never ended")


@pytest.mark.parametrize("cut", [1, 2, 7, 10])
def test_a_row_that_was_preempted_goes_on_to_its_own_end(cut: int) -> None:
    """Its second row's prompt ends with what it had emitted: the text is the same."""
    seed = work_seed(5, 12)
    engine = SimulatedEngine(make_spec(), seed=1)
    [result] = engine.run(StepPlan(step=0, prefill=(chunk(1, range(30), spec_of(seed, 50)),))).rows
    whole = list(result.tokens)
    assert drain(engine, 1, whole) is Finish.STOP
    assert whole == [*range(first_token(seed), first_token(seed) + 11), STOP]
    again = whole[:cut]
    spec = spec_of(seed, 50 - cut, output_start=30)
    plan = StepPlan(step=0, prefill=(chunk(2, range(30 + cut), spec),), release=(1,))
    [result] = engine.run(plan).rows
    again += result.tokens
    drain(engine, 2, again)
    assert again == whole
    assert engine.rows == 1


def test_max_tokens_end_a_row_that_has_more_to_say() -> None:
    engine = SimulatedEngine(make_spec(), seed=1)
    [result] = engine.run(
        StepPlan(step=0, prefill=(chunk(1, range(30), spec_of(work_seed(1, 99), 6)),))
    ).rows
    tokens = list(result.tokens)
    assert drain(engine, 1, tokens) is Finish.LENGTH
    assert len(tokens) == 6


@pytest.mark.parametrize("tokens", [0, 1 << 24])
def test_a_length_that_does_not_fit(tokens: int) -> None:
    with pytest.raises(ValueError, match="output_tokens"):
        work_seed(1, tokens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"machines": 0}, "machines must be >= 1"),
        ({"routing": "nearest"}, "routing must be one of"),
        ({"warmup_s": 60.0}, "warmup_s must be in 0"),
        ({"attempts": 0}, "attempts must be >= 1"),
        ({"reads_per_s": 0.0}, "reads_per_s must be > 0"),
        ({"seed": -1}, "seed must be >= 0"),
    ],
)
def test_scenarios_out_of_range(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scenario(**wrong)


def test_a_failure_of_nobody() -> None:
    with pytest.raises(ValueError, match="machine 7"):
        Simulation(make_scenario(failures=(Failure(machine=7, at_s=1.0),)))


def test_content_of_prompts_does_not_repeat() -> None:
    content = Content(random.Random(0))
    one, two = content.fresh(100), content.fresh(100)
    assert not set(one) & set(two)
    assert content.shared("a", 10) == content.shared("a", 10) != content.shared("b", 10)
