"""The depth controller in simulation: made-up step times, made-up acceptance, results that come
back as late as in the pipelined loop."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from engine.plan import RowResult
from scheduler.acceptance import Acceptance
from scheduler.depth import (
    FIRST_DEPTH,
    AutoDepth,
    DepthPolicy,
    FixedDepth,
    depth_policy,
)

Cost = Callable[[int], float]
"""depth -> seconds."""


def flat(depth: int) -> float:
    return 0.020 + 0.0002 * depth


def steep(depth: int) -> float:
    return 0.020 * (1 + depth)


def very_steep(depth: int) -> float:
    """A reference BLAS under many rows: every verified position costs more than a whole step."""
    return 0.020 * (1 + 3 * depth)


def sloped(depth: int) -> float:
    return 0.020 + 0.008 * depth


def stepped(depth: int) -> float:
    """Small-M matmul steps on one device: widths 2 … 7 climb, width 8 is cheap again."""
    return [0.091, 0.125, 0.175, 0.238, 0.276, 0.339, 0.345, 0.080, 0.088][depth]


class Simulation:
    def __init__(
        self, policy: DepthPolicy, *, rows: int = 1, lag: int = 1, seed: int = 0, cap: int = 8
    ) -> None:
        self.policy = policy
        self.rows = rows
        self.caps = [cap] * rows
        self.rng = random.Random(seed)
        self.late: deque[tuple[list[RowResult], int, float]] = deque()
        self.lag = lag

    def run(
        self, cycles: int, *, cost: Cost, acceptance: float, noise: float = 0.05
    ) -> Counter[int]:
        """How often each depth was chosen."""
        chosen: Counter[int] = Counter()
        for _ in range(cycles):
            depth = self.policy.choose(self.caps, prefilling=False)
            chosen[depth] += 1
            results = [self._row(row, depth, acceptance) for row in range(self.rows)]
            seconds = cost(depth) * self.rng.uniform(1 - noise, 1 + noise)
            self.late.append((results, depth, seconds))
            if len(self.late) > self.lag:
                rows, then, device_s = self.late.popleft()
                self.policy.observe(rows, depth=then, rows=self.rows, device_s=device_s)
        return chosen

    def _row(self, row: int, depth: int, acceptance: float) -> RowResult:
        drafted = min(depth, self.caps[row])
        accepted = 0
        while accepted < drafted and self.rng.random() < acceptance:
            accepted += 1
        return RowResult(
            row=row, tokens=tuple(range(accepted + 1)), drafted=drafted, accepted=accepted
        )


def share(chosen: Counter[int], *depths: int) -> float:
    return sum(chosen[depth] for depth in depths) / sum(chosen.values())


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("lag", [0, 1])
def test_cheap_verify_goes_deep(rows: int, lag: int) -> None:
    simulation = Simulation(AutoDepth(8), rows=rows, lag=lag)
    simulation.run(300, cost=flat, acceptance=0.9)
    assert share(simulation.run(500, cost=flat, acceptance=0.9), 6, 7, 8) > 0.9


@pytest.mark.parametrize("rows", [1, 16])
def test_speculation_that_loses_is_off(rows: int) -> None:
    simulation = Simulation(AutoDepth(8), rows=rows)
    simulation.run(300, cost=steep, acceptance=0.8)
    assert share(simulation.run(1000, cost=steep, acceptance=0.8), 0) > 0.95


@pytest.mark.parametrize("rows", [1, 16])
def test_follows_acceptance_down_and_up_again(rows: int) -> None:
    simulation = Simulation(AutoDepth(6), rows=rows)
    simulation.run(300, cost=sloped, acceptance=0.9)
    assert share(simulation.run(300, cost=sloped, acceptance=0.9), 3, 4, 5, 6) > 0.9
    simulation.run(200, cost=sloped, acceptance=0.2)
    assert share(simulation.run(1000, cost=sloped, acceptance=0.2), 0) > 0.85
    simulation.run(1000, cost=sloped, acceptance=0.9)
    assert share(simulation.run(300, cost=sloped, acceptance=0.9), 3, 4, 5, 6) > 0.9


def test_costs_may_step_up_and_down() -> None:
    simulation = Simulation(AutoDepth(8))
    simulation.run(300, cost=stepped, acceptance=0.8)
    assert share(simulation.run(500, cost=stepped, acceptance=0.8), 7) > 0.9


def test_follows_a_change_of_cost() -> None:
    simulation = Simulation(AutoDepth(4), rows=4)
    simulation.run(300, cost=flat, acceptance=0.9)
    simulation.run(500, cost=steep, acceptance=0.9)
    assert share(simulation.run(500, cost=steep, acceptance=0.9), 0) > 0.9
    simulation.run(3000, cost=flat, acceptance=0.9)
    assert share(simulation.run(500, cost=flat, acceptance=0.9), 3, 4) > 0.9


def test_the_first_call_of_a_shape_is_not_measured() -> None:
    """Every first call takes a thousand times longer: compilation."""
    seen: set[int] = set()

    def compiling(depth: int) -> float:
        first = depth not in seen
        seen.add(depth)
        return 20.0 if first else flat(depth)

    policy = AutoDepth(4)
    simulation = Simulation(policy)
    chosen = simulation.run(300, cost=compiling, acceptance=0.9)
    assert set(policy.step_times()) >= {(1, 0), (1, 1), (1, 4)}
    assert max(policy.step_times().values()) < 0.03
    assert share(chosen, 4) > 0.8


def test_an_outlier_is_clipped() -> None:
    policy = AutoDepth(2)
    simulation = Simulation(policy)
    simulation.run(200, cost=flat, acceptance=0.9)
    simulation.run(1, cost=lambda depth: 50.0, acceptance=0.9)
    assert share(simulation.run(100, cost=flat, acceptance=0.9), 2) > 0.8
    assert max(policy.step_times().values()) < 0.04


def test_probes_are_cheap() -> None:
    """What probing costs against always running the best depth."""
    simulation = Simulation(AutoDepth(8))
    simulation.run(300, cost=steep, acceptance=0.1)
    chosen = simulation.run(5000, cost=steep, acceptance=0.1)
    seconds = sum(count * steep(depth) for depth, count in chosen.items())
    assert seconds < 1.10 * sum(chosen.values()) * steep(0)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("cost", [steep, very_steep, sloped, stepped])
def test_auto_is_never_much_worse_than_the_best_depth(cost: Cost, rows: int) -> None:
    """From the first cycle on, tour and probes included, it stays near always running the best."""
    simulation = Simulation(AutoDepth(8), rows=rows)
    tokens = [sum(0.75**j for j in range(depth + 1)) for depth in range(9)]
    best = max(tokens[depth] / cost(depth) for depth in range(9))
    cheap_start = simulation.run(400, cost=cost, acceptance=0.75)
    later = simulation.run(1500, cost=cost, acceptance=0.75)
    for chosen, least in ((cheap_start, 0.4 if cost is stepped else 0.85), (later, 0.93)):
        emitted = sum(count * tokens[depth] for depth, count in chosen.items())
        seconds = sum(count * cost(depth) for depth, count in chosen.items())
        assert emitted / seconds > least * best


def test_a_tour_without_hope_is_short() -> None:
    """No draft ever stands: deep steps are looked at a few times only."""
    simulation = Simulation(AutoDepth(8), rows=16)
    chosen = simulation.run(200, cost=sloped, acceptance=0.0)
    assert share(chosen, 0) > 0.9
    assert share(chosen, 3, 4, 5, 6, 7, 8) < 0.05


def test_caps_bound_the_choice() -> None:
    assert AutoDepth(8).choose([0, 0], prefilling=False) == 0
    assert FixedDepth(5).choose([0, 3], prefilling=False) == 3
    simulation = Simulation(AutoDepth(8), rows=3, cap=2)
    assert max(simulation.run(300, cost=flat, acceptance=0.9)) == 2
    assert AutoDepth(0).choose([0], prefilling=False) == 0


def test_rows_that_do_not_draft_count_against_depth() -> None:
    """Seven of eight rows are capped at 0: drafting for one is not worth the wider verify."""
    simulation = Simulation(AutoDepth(4), rows=8)
    simulation.caps = [0] * 7 + [4]
    simulation.run(300, cost=sloped, acceptance=0.9)
    assert share(simulation.run(300, cost=sloped, acceptance=0.9), 0) > 0.85


def test_steps_that_also_prefill_neither_tour_nor_probe() -> None:
    policy = AutoDepth(4)
    assert {policy.choose([4], prefilling=True) for _ in range(100)} == {FIRST_DEPTH}


def test_a_batch_that_never_keeps_its_size_is_learnt() -> None:
    """Rows join and leave every cycle, and each new shape compiles for a second."""
    policy = AutoDepth(6)
    simulation = Simulation(policy, lag=1)
    seen: set[tuple[int, int]] = set()

    def compiling(depth: int) -> float:
        first = (simulation.rows, depth) not in seen
        seen.add((simulation.rows, depth))
        return 1.0 if first else sloped(depth)

    chosen: Counter[int] = Counter()
    for _ in range(1500):
        simulation.rows = simulation.rng.randint(33, 64)
        simulation.caps = [6] * simulation.rows
        chosen += simulation.run(1, cost=compiling, acceptance=0.9)
    assert {size for size, _ in policy.step_times()} == {64}
    assert share(chosen, 3, 4, 5, 6) > 0.8


def test_without_step_times_the_tour_ends() -> None:
    policy = AutoDepth(4)
    for _ in range(100):
        depth = policy.choose([4], prefilling=False)
        policy.observe([], depth=depth, rows=1, device_s=0.0)
    chosen = Counter(policy.choose([4], prefilling=False) for _ in range(100))
    assert chosen.most_common(1)[0][0] == FIRST_DEPTH


def test_acceptance_is_conditional_on_being_reached() -> None:
    acceptance = Acceptance(3)
    for accepted in [0, 1, 1, 3] * 100:
        acceptance.observe([RowResult(row=1, drafted=3, accepted=accepted)])
    expected = acceptance.expected_tokens([3], 3)
    gains = [b - a for a, b in itertools.pairwise(expected)]
    assert gains[0] == pytest.approx(3 / 4, abs=0.03)
    assert gains[1] / gains[0] == pytest.approx(1 / 3, abs=0.04)
    assert gains[2] / gains[1] == pytest.approx(1.0, abs=0.08)  # never quite: a prior
    assert expected[0] == 1
    assert expected[3] == pytest.approx(1 + 3 / 4 + 1 / 4 + 1 / 4, abs=0.05)


def test_policy_by_config() -> None:
    assert isinstance(depth_policy("auto", 4), AutoDepth)
    fixed = depth_policy(8, 3)
    assert fixed.choose([8], prefilling=False) == 3
    assert fixed.step_times() == {}
