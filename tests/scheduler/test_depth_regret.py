"""What `AutoDepth` loses against knowing everything, in simulation with synthetic costs.

The *oracle* knows the true costs and chances and always runs the depth with the highest expected
rate: with constant costs, the best fixed depth. Step times are noisy (lognormal, 15 %), acceptance
is drawn, results come back one cycle late, everything is seeded. Counted are expected tokens and
true costs of the depths chosen: luck of the draw is in the decisions only, not in the score.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from engine.plan import MAX_DEPTH, Finish, RowResult
from scheduler import acceptance as acceptance_module
from scheduler import costs as costs_module
from scheduler import depth as depth_module
from scheduler.costs import CostTable
from scheduler.depth import AutoDepth, DepthPolicy

Cost = Callable[[int, int], float]
"""(rows, depth) → seconds."""
SEEDS = range(4)


def cpu(rows: int, depth: int) -> float:
    """The bundled model on two cores, about: 40 ms at depth 0, 64 ms at depth 3."""
    return 0.0348 + 0.0048 * rows * (depth + 1) + 0.0034 * depth


def steep(rows: int, depth: int) -> float:
    """Verify costs as much per position as a whole step."""
    return 0.020 * (1 + depth)


def sloped(rows: int, depth: int) -> float:
    return 0.020 + 0.008 * depth


def flat(rows: int, depth: int) -> float:
    return 0.020 + 0.0002 * depth


H200_US = (91, 125, 175, 238, 276, 339, 345, 80, 88)
"""Microseconds of one quantised matmul on an H200, by verify width - 1 (width 7 as width 6)."""


def h200(rows: int, depth: int) -> float:
    return H200_US[depth] * 1e-6


def wide(rows: int, depth: int) -> float:
    """Costs double where rows × width crosses 32: at 8 rows between depths 3 and 4."""
    return 0.020 * (1 + 0.1 * depth + (rows * (depth + 1) > 32))


def expected(chance: float, depth: int) -> float:
    return sum(chance**j for j in range(depth + 1))


@dataclass
class Score:
    tokens: float = 0.0
    seconds: float = 0.0
    oracle_seconds: float = 0.0
    """What the oracle would have taken for the same tokens."""

    @property
    def share(self) -> float:
        """Of the oracle's tokens per second."""
        return self.oracle_seconds / self.seconds


class World:
    """A machine with rows that have chances of their own."""

    def __init__(
        self, policy: DepthPolicy, cost: Cost, chances: Sequence[float], *, seed: int, lag: int = 1
    ) -> None:
        self.policy = policy
        self.cost = cost
        self.chances = dict(enumerate(chances))
        """Row → chance that a draft stands."""
        self.caps = [MAX_DEPTH] * len(chances)
        self.rng = random.Random(seed)
        self.lag = lag
        self.late: deque[tuple[list[RowResult], int, float]] = deque()
        self.outliers: dict[int, float] = {}
        """Cycle → factor its time is measured too long by."""
        self.cycle = 0
        self.ending: set[int] = set()
        """Rows that finish in their next cycle."""

    def tokens(self, depth: int) -> float:
        pairs = zip(self.chances.values(), self.caps, strict=True)
        return sum(expected(chance, min(cap, depth)) for chance, cap in pairs)

    def rate(self, depth: int) -> float:
        return self.tokens(depth) / self.cost(len(self.chances), depth)

    def oracle(self) -> int:
        return max(range(max(self.caps) + 1), key=self.rate)

    def run(self, cycles: int) -> Score:
        score = Score()
        for _ in range(cycles):
            depth = self.policy.choose(list(self.caps), prefilling=False)
            assert 0 <= depth <= max(self.caps)
            tokens, seconds = self.tokens(depth), self.cost(len(self.chances), depth)
            score.tokens += tokens
            score.seconds += seconds
            score.oracle_seconds += tokens / self.rate(self.oracle())
            measured = seconds * self.rng.lognormvariate(0, 0.15)
            measured *= self.outliers.get(self.cycle, 1.0)
            self.late.append((self._results(depth), depth, measured))
            if len(self.late) > self.lag:
                rows, then, device_s = self.late.popleft()
                self.policy.observe(rows, depth=then, rows=len(rows), device_s=device_s)
            self.cycle += 1
        return score

    def _results(self, depth: int) -> list[RowResult]:
        results = []
        for (row, chance), cap in zip(self.chances.items(), self.caps, strict=True):
            drafted, accepted = min(cap, depth), 0
            while accepted < drafted and self.rng.random() < chance:
                accepted += 1
            tokens = tuple(range(accepted + 1))
            finish = Finish.LENGTH if row in self.ending else None
            results.append(
                RowResult(row=row, tokens=tokens, drafted=drafted, accepted=accepted, finish=finish)
            )
        return results


def table_of(cost: Cost, rows: Sequence[int] = (1, 2, 4, 8, 16)) -> CostTable:
    return CostTable(seconds={(b, k): cost(b, k) for b in rows for k in range(MAX_DEPTH + 1)})


Scenario = tuple[Cost, int, float]
"""Costs, rows, chance that a draft stands."""


@dataclass(frozen=True)
class Floors:
    """Least share of the oracle's rate, mean over seeds."""

    cold: float
    """First 40 cycles with nothing known."""
    later: float
    """The 300 that follow the first 140."""
    tabled: float
    """First 400 cycles with a table (acceptance is still to be learnt)."""


SCENARIOS: dict[str, tuple[Scenario, Floors]] = {
    "cpu": ((cpu, 1, 0.75), Floors(0.92, 0.96, 0.97)),
    "cpu, 4 rows": ((cpu, 4, 0.75), Floors(0.93, 0.96, 0.97)),
    "sloped": ((sloped, 1, 0.9), Floors(0.92, 0.96, 0.97)),
    "loses a little": ((steep, 1, 0.8), Floors(0.88, 0.97, 0.98)),
    "loses": ((steep, 1, 0.1), Floors(0.88, 0.97, 0.98)),
    "hardly accepts": ((sloped, 1, 0.2), Floors(0.87, 0.96, 0.96)),
    "step at 8 rows": ((wide, 8, 0.8), Floors(0.83, 0.94, 0.98)),
}


def world(scenario: Scenario, seed: int, table: CostTable | None = None) -> World:
    cost, rows, chance = scenario
    return World(AutoDepth(MAX_DEPTH, table), cost, [chance] * rows, seed=seed)


def mean_share(worlds: list[World], cycles: int) -> float:
    return sum(world.run(cycles).share for world in worlds) / len(worlds)


@pytest.mark.parametrize("name", SCENARIOS)
def test_little_is_lost_from_cold(name: str) -> None:
    scenario, floors = SCENARIOS[name]
    worlds = [world(scenario, seed) for seed in SEEDS]
    assert mean_share(worlds, 40) > floors.cold
    mean_share(worlds, 100)
    assert mean_share(worlds, 300) > floors.later


@pytest.mark.parametrize("name", SCENARIOS)
def test_less_is_lost_with_a_table(name: str) -> None:
    scenario, floors = SCENARIOS[name]
    worlds = [world(scenario, seed, table_of(scenario[0])) for seed in SEEDS]
    assert mean_share(worlds, 400) > floors.tabled


def test_a_table_makes_the_first_cycle_good() -> None:
    """No tour: at the acceptance assumed without evidence it is the table's best, or near."""
    for scenario in ((cpu, 1, 0.7), (h200, 1, 0.7), (steep, 1, 0.7)):
        first = world(scenario, 0, table_of(scenario[0]))
        assert first.run(1).share > 0.9


WINDOW, LATER_WINDOW = 0.92, 0.94


def check_losing_windows() -> None:
    """Against depth 0, where speculation loses: any 100 cycles, once the first 20 are over."""
    for scenario in ((steep, 1, 0.1), (steep, 1, 0.8), (sloped, 1, 0.2), (sloped, 16, 0.0)):
        for seed in SEEDS:
            losing = world(scenario, seed)
            assert losing.oracle() == 0
            losing.run(20)
            scores = [losing.run(10) for _ in range(45)]
            for start in range(len(scores) - 9):
                window = scores[start : start + 10]
                oracle = sum(score.oracle_seconds for score in window)
                share = oracle / sum(score.seconds for score in window)
                floor = WINDOW if start < 10 else LATER_WINDOW
                assert share > floor, (scenario, seed, start, share)


def test_speculation_that_loses_costs_little_in_any_window() -> None:
    check_losing_windows()


@pytest.mark.parametrize("chance", [0.6, 0.8])
def test_a_cheap_wide_verify_is_discovered(chance: float) -> None:
    """Every width from 2 to 7 costs more than the one before, and 8 less than 1."""
    for seed in SEEDS:
        found = world((h200, 1, chance), seed)
        found.run(900)
        assert found.run(100).share > 0.95


def check_drift() -> None:
    """Acceptance falls from 0.9 to 0.2 over 100 cycles, stays there, and comes back."""
    for seed in SEEDS:
        drifting = world((sloped, 1, 0.9), seed)
        drifting.run(150)
        for step in range(100):
            drifting.chances[0] = 0.9 - 0.007 * step
            drifting.run(1)
        drifting.chances[0] = 0.2
        drifting.run(100)
        assert drifting.run(300).share > 0.93
        drifting.chances[0] = 0.9
        drifting.run(300)
        assert drifting.run(200).share > 0.9


def test_acceptance_may_drift_away_and_back() -> None:
    check_drift()


@pytest.mark.parametrize("cycle", [0, 1, 2])
def test_one_outlier_at_the_start_is_no_fate(cycle: int) -> None:
    """A step that took fifty times too long, as a first call does that compiles."""
    check_outlier(cycle)


def check_outlier(cycle: int) -> None:
    for scenario in ((cpu, 1, 0.75), (steep, 1, 0.5)):
        for seed in SEEDS:
            hit = world(scenario, seed)
            hit.outliers[cycle] = 50.0
            hit.run(60)
            assert hit.run(200).share > 0.85, (scenario, seed)


def test_batch_sizes_may_change_suddenly() -> None:
    """1, 4, 16, 2 rows in turns of 30 cycles: what is known of one size serves the others."""
    shares = []
    for seed in SEEDS:
        policy = AutoDepth(MAX_DEPTH)
        worlds = {rows: World(policy, cpu, [0.75] * rows, seed=seed) for rows in (1, 4, 16, 2)}
        for turn in range(3):
            for there in worlds.values():
                there.late.clear()
                shares.append((turn, there.run(30).share))
    for turn, floor in ((0, 0.9), (2, 0.94)):
        found = [share for at, share in shares if at == turn]
        assert sum(found) / len(found) > floor


def test_rows_that_hardly_accept_do_not_decide_for_the_rest() -> None:
    """Three rows at 0.1 leave a row at 0.95: its own rate counts from the next cycle on."""
    check_own_rates()


def check_own_rates() -> None:
    for seed in SEEDS:
        mixed = World(
            AutoDepth(MAX_DEPTH, table_of(cpu)), cpu, [0.1, 0.95, 0.1, 0.1], seed=seed, lag=0
        )
        mixed.run(60)
        mixed.ending = {0, 2, 3}
        mixed.run(1)
        mixed.chances = {1: mixed.chances[1]}
        mixed.caps = mixed.caps[:1]
        assert mixed.run(5).share > 0.8


def test_caps_bound_every_choice_probes_included() -> None:
    check_caps()


def check_caps() -> None:
    capped = world((flat, 3, 0.9), 0)
    capped.caps = [2, 0, 1]
    assert capped.run(300).share > 0.9  # and World.run holds the depth to the largest cap
    capped.caps = [0, 0, 0]
    assert capped.run(10).share == 1.0


# --- mutations --------------------------------------------------------------------------------


def probes_are_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(depth_module.Credit, "spend", lambda self, amount: None)
    patch.setattr(depth_module, "OPTIMISM", 20.0)


def nothing_fades(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acceptance_module, "FADE", 1.0)
    patch.setattr(acceptance_module, "MOST_TRIALS", math.inf)


def the_first_sample_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(costs_module, "SCALE_NOISE", 0.01)
    patch.setattr(costs_module, "FIRST_NOISE", 0.01)
    patch.setattr(costs_module, "CLIP", math.inf)
    patch.setattr(costs_module, "DRIFT", costs_module.Spread(0.001, 0.001, 0.001))
    patch.setattr(costs_module, "SURPRISE", math.inf)


def caps_are_ignored(patch: pytest.MonkeyPatch) -> None:
    choose = AutoDepth._choose

    def uncapped(self: AutoDepth, caps: list[int], deepest: int, use: object, **how: bool) -> int:
        return choose(self, [MAX_DEPTH] * len(caps), MAX_DEPTH, use, **how)  # type: ignore[arg-type]

    patch.setattr(AutoDepth, "_choose", uncapped)


def rows_have_no_rates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acceptance_module, "ROW_WEIGHT", 1e9)


MUTATIONS = [
    (probes_are_free, check_losing_windows),
    (nothing_fades, check_drift),
    (the_first_sample_is_believed, lambda: check_outlier(1)),
    (caps_are_ignored, check_caps),
    (rows_have_no_rates, check_own_rates),
]


@pytest.mark.parametrize(("patch", "check"), MUTATIONS, ids=[p.__name__ for p, _ in MUTATIONS])
def test_the_checks_see(
    patch: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        check()
