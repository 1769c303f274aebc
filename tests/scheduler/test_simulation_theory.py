"""The simulator against results we did not write: queueing theory, and sums done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler import CostTable, SchedulerConfig
from scheduler.simulation import (
    AcceptanceModel,
    Amount,
    Arrival,
    MachineCosts,
    Open,
    Scenario,
    Simulation,
    TableCosts,
    WidthCosts,
    simulate,
)
from scheduler.simulation.traces import P95
from tests.scheduler.simulated import make_kind, make_spec

SERVICE_S = 1.0


def one_server(service: Amount, load: float, requests: int, seed: int) -> Simulation:
    """One row; a request is one prefill chunk that yields one token, so its service is its prompt
    and nothing overlaps: a queue with one server."""
    machine = make_spec(
        max_rows=1, max_depth=0, boundaries=0, prefill_chunk=30_000, context_length=32_000
    )
    mean = service.median
    if service.p95 is not None:
        mean *= math.exp((math.log(service.p95 / service.median) / P95) ** 2 / 2)
    rate = load / (mean * 1e-3)
    scenario = Scenario(
        machine=machine,
        load=Open(kinds=(make_kind(service, 1),), rate=rate),
        scheduler=SchedulerConfig(max_queue=10_000, max_queued_tokens=10**8, prefix_cache=False),
        duration_s=requests / rate,
        seed=seed,
    )
    return Simulation(scenario)


@pytest.mark.parametrize(
    ("service", "load"),
    [
        (Amount(median=1000), 0.5),
        (Amount(median=1000), 0.8),
        (Amount(median=700, p95=2000), 0.6),
    ],
    ids=["M/D/1 at 0.5", "M/D/1 at 0.8", "M/G/1 lognormal at 0.6"],
)
def test_mean_wait_is_pollaczek_khinchines(service: Amount, load: float) -> None:
    """E[W] = λ E[S²] / (2 (1 - ρ)), Poisson arrivals, one server, first come first served
    (Kleinrock, "Queueing Systems" I, 5.6). 4 runs of 1,500 requests; within three standard errors
    of the runs' means, plus 1 % for whole tokens."""
    waits, rates, squares = [], [], []
    for seed in range(4):
        simulation = one_server(service, load, 1500, seed)
        simulation.run()
        works = simulation.clients.works
        waits.append(np.mean([(w.started_at or 0) - w.arrived_at for w in works]))
        rates.append(len(works) / simulation.scenario.duration_s)
        squares.append(np.mean([(w.prompt_tokens * 1e-3) ** 2 for w in works]))
    sigma = math.log((service.p95 or service.median) / service.median) / P95
    median = service.median * 1e-3
    rate = load / (median * math.exp(sigma**2 / 2))
    expected = rate * median**2 * math.exp(2 * sigma**2) / (2 * (1 - load))
    error = 3 * np.std(waits, ddof=1) / math.sqrt(len(waits)) + 0.01 * expected
    assert error < 0.4 * expected, "the runs say nothing"
    assert abs(np.mean(waits) - expected) < error


def test_littles_law() -> None:
    """L = λ W, over a run that begins and ends empty: exact but for when the samples are taken."""
    simulation = one_server(Amount(median=1000), 0.7, 1500, 5)
    report = simulation.run()
    works = simulation.clients.works
    total = sum((w.ended_at or 0) - w.arrived_at for w in works)
    present = (report.series.running + report.series.queued).mean()
    assert present == pytest.approx(total / simulation.scenario.duration_s, rel=0.1)


def all_at_once(rows: int, output: int) -> Open:
    arrival = Arrival(arrival_s=0.0, prompt_tokens=4, output_tokens=output)
    return Open(trace=(arrival,) * rows)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 2])
def test_gaps_are_the_cost_model(rows: int, depth: int) -> None:
    costs = WidthCosts([(1, 0.01), (4, 0.011), (24, 0.05)], draft_s=0.001, draft_row_s=0.0001)
    machine = make_spec(
        costs={"decode": costs, "gap_s": 0.002, "row_context_s": 0.0},
        acceptance=AcceptanceModel(rates=(0.0, 0.0)),
    )
    scenario = Scenario(
        machine=machine,
        load=all_at_once(rows, 40),
        scheduler=SchedulerConfig(depth=depth),
        duration_s=10.0,
    )
    report = simulate(scenario)
    expected = costs.seconds(rows, depth) + 0.002
    assert report.gap.p50 == pytest.approx(expected, rel=1e-9)
    assert report.gap.count == rows * 39
    assert report.depths[depth] == sum(report.depths)


@pytest.mark.parametrize("host_s", [0.0, 0.015, 0.05])
def test_host_time_is_hidden_behind_a_step_and_seen_beyond_it(host_s: float) -> None:
    """Two steps in flight, one host thread: a cycle takes the longer of the two."""
    machine = make_spec(
        costs={"host_s": host_s, "decode": WidthCosts([(1, 0.02)])}, max_depth=0, max_rows=1
    )
    report = simulate(Scenario(machine=machine, load=all_at_once(1, 60), duration_s=10.0))
    assert report.gap.p50 == pytest.approx(max(0.02, host_s), rel=1e-6)


def test_the_plain_loop_hides_nothing() -> None:
    machine = make_spec(costs={"host_s": 0.015, "decode": WidthCosts([(1, 0.02)])}, max_depth=0)
    scenario = Scenario(
        machine=machine,
        load=all_at_once(1, 60),
        scheduler=SchedulerConfig(loop="plain"),
        duration_s=10.0,
    )
    assert simulate(scenario).gap.p50 == pytest.approx(0.035, rel=1e-6)


def test_tokens_per_cycle_are_what_chances_say() -> None:
    """E = 1 + Σ Π r, Bernoulli chains; 8 rows × 2000 tokens."""
    machine = make_spec(acceptance=AcceptanceModel(rates=(0.8, 0.5)))
    scenario = Scenario(
        machine=machine,
        load=all_at_once(8, 2000),
        scheduler=SchedulerConfig(depth=2),
        duration_s=100.0,
    )
    report = simulate(scenario)
    assert report.tokens_per_cycle == pytest.approx(1 + 0.8 + 0.4, rel=0.02)
    assert report.acceptance == pytest.approx([0.8, 0.4], abs=0.02)


def test_variation_spreads_requests_and_not_steps() -> None:
    model = AcceptanceModel(rates=(0.7,), variation=1.0)
    assert model.of(0.0) == pytest.approx((0.7,))
    assert model.of(1.0)[0] / (1 - model.of(1.0)[0]) == pytest.approx(0.7 / 0.3 * math.e)
    assert AcceptanceModel(rates=(1.0, 0.0), variation=2.0).of(-3.0) == (1.0, 0.0)


def test_noise_keeps_the_mean() -> None:
    machine = make_spec(costs={"noise": 0.3}, max_depth=0)
    exact = make_spec(max_depth=0)
    noisy, clean = (
        simulate(Scenario(machine=m, load=all_at_once(8, 1000), duration_s=100.0)).gap
        for m in (machine, exact)
    )
    assert noisy.mean == pytest.approx(clean.mean, rel=0.04)
    assert clean.p99 < 1.05 * clean.p50
    assert noisy.p99 > 1.5 * noisy.p50


def test_a_table_gives_its_own_points_and_sane_ones_between() -> None:
    seconds = {(b, k): 0.01 + 0.001 * b * (k + 1) + 0.004 * k for b in (1, 2, 8) for k in (0, 1, 3)}
    seconds[2, 1] *= 1.5
    costs = TableCosts(CostTable(seconds=seconds))
    for (rows, depth), expected in seconds.items():
        assert costs.seconds(rows, depth) == pytest.approx(expected)
    assert seconds[2, 0] < costs.seconds(4, 0) < seconds[8, 0]
    assert seconds[8, 1] < costs.seconds(8, 2) < seconds[8, 3]
    assert costs.seconds(32, 3) > 2 * seconds[8, 3]


def test_forward_passes_beyond_the_last_width_grow_in_proportion() -> None:
    costs = WidthCosts([(1, 0.01), (8, 0.03), (9, 0.05), (32, 0.05)])
    assert costs.seconds(4, 1) == pytest.approx(0.03)
    assert costs.seconds(10, 2) == pytest.approx(0.05)
    assert costs.seconds(64, 0) == pytest.approx(0.1)


def test_a_chunk_costs_its_parts() -> None:
    costs = MachineCosts(decode=WidthCosts([(1, 0.01)]), token_s=1e-3, chunk_s=0.5, context_s=1e-6)
    assert costs.chunk(100, 1000) == pytest.approx(0.5 + 0.1 + 1e-6 * 100 * 1050)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_s": -1.0}, "token_s must be finite and >= 0"),
        ({"noise": math.inf}, "noise must be finite"),
    ],
)
def test_costs_out_of_range(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MachineCosts(**{"decode": WidthCosts([(1, 0.1)]), "token_s": 0.1} | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("widths", [[], [(0, 0.1)], [(2, 0.1), (1, 0.1)], [(1, 0.0)]])
def test_widths_out_of_range(widths: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="widths"):
        WidthCosts(widths)
