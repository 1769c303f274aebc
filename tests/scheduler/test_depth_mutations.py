"""Faults planted in the choice of depth, each with the test that sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from scheduler import acceptance, costs, depth
from tests.scheduler import test_depth
from tests.scheduler.mutations import Patch, Planted, cases, check_seen_by

# --- faults that need a test of their own to be seen ------------------------------------------


def time_of_first_calls_counts(patch: pytest.MonkeyPatch) -> None:
    def observe(self: Any, depth: int, seconds: float, *, first_noise: float = 0.0) -> bool:
        seen = self.samples[depth]
        before = math.exp(self.mean[depth]) if seen else seconds
        self.mean = self.mean.copy()
        self.mean[depth] = math.log(0.8 * before + 0.2 * seconds)
        self.samples[depth] += 1
        self.known[depth] = self.measured[depth] = True
        return True

    patch.setattr(costs.StepCosts, "observe", observe)
    patch.setattr(costs.Costs, "_drop_firsts", lambda self: None)


def depth_0_is_no_candidate(patch: pytest.MonkeyPatch) -> None:
    choose = depth.AutoDepth.choose

    def at_least_1(self: depth.AutoDepth, caps: list[int], *, prefilling: bool) -> int:
        return max(1, choose(self, caps, prefilling=prefilling))

    patch.setattr(depth.AutoDepth, "choose", at_least_1)


def acceptance_never_fades(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acceptance, "FADE", 1.0)
    patch.setattr(acceptance, "MOST_TRIALS", math.inf)


def costs_are_never_measured_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(depth.AutoDepth, "_probe", lambda *_: None)


def speculation_off_is_sticky(patch: pytest.MonkeyPatch) -> None:
    best = depth.AutoDepth._best

    def stuck(self: Any, rates: list[float], known: Any, use: Any) -> int:
        return 0 if use.depth == 0 else best(self, rates, known, use)

    patch.setattr(depth.AutoDepth, "_best", stuck)
    patch.setattr(depth.AutoDepth, "_probe", lambda *_: None)


PLANTED: Planted = [
    (time_of_first_calls_counts, test_depth.test_the_first_call_of_a_shape_is_not_measured),
    (depth_0_is_no_candidate, partial(test_depth.test_speculation_that_loses_is_off, 1)),
    (acceptance_never_fades, partial(test_depth.test_follows_acceptance_down_and_up_again, 16)),
    (costs_are_never_measured_again, test_depth.test_follows_a_change_of_cost),
    (speculation_off_is_sticky, partial(test_depth.test_follows_acceptance_down_and_up_again, 1)),
]


@pytest.mark.parametrize(("patch", "check"), cases(PLANTED))
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seen_by(check, patch, monkeypatch)
