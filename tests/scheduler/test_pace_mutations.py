"""Faults planted in the pace of prompts, each with the test that sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scheduler import pace, prefill
from scheduler.pace import Budget, Pace
from scheduler.prefill import PrefillPlanner
from tests.scheduler import test_pace, test_pace_prompts
from tests.scheduler.mutations import Patch, Planted, cases, check_seen_by


def the_budget_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Budget, "_affords", lambda self, tokens, start: True)


def the_share_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pace, "credit", property(lambda self: 0.0))


def the_share_is_a_gift(patch: pytest.MonkeyPatch) -> None:
    """What chunks took is not subtracted."""
    patch.setattr(Pace, "_gain", lambda self, load, step_s, prefill_s: self._share * step_s)


def prompts_are_not_cut_where_they_are_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillPlanner, "_end", lambda self, s: self._cut(s, s.cursor))


def pieces_are_of_any_length(patch: pytest.MonkeyPatch) -> None:
    def piece(self: Budget, start: int, end: int, *, whole: bool) -> int:
        size = piece_well(self, start, end, whole=whole)
        return size - 1 if size > 1 and self.costs is not None else size

    piece_well = Budget.piece
    patch.setattr(Budget, "piece", piece)


def first_steps_are_learned(patch: pytest.MonkeyPatch) -> None:
    def planned(self: Pace, budget: Any, shapes: Any, *, mixed: bool) -> Any:
        load = planned_well(self, budget, shapes, mixed=mixed)
        return load and replace(load, new=False)

    planned_well = Pace.planned
    patch.setattr(Pace, "planned", planned)


def cycles_are_never_measured_beside_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pace, "REFRESH", math.inf)


def the_oldest_prompt_is_owed_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillPlanner, "_note_passing", lambda self, ticket: None)


def prompts_go_one_after_the_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill, "OPEN", 1)


def the_longest_goes_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill, "_order", lambda s: s.cursor - len(s.prompt))


def classes_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill, "_order", lambda s: len(s.prompt) - s.cursor)


PLANTED: Planted = [
    (the_budget_is_ignored, test_pace.check_gap),
    (the_share_is_ignored, test_pace.check_share),
    (the_share_is_a_gift, test_pace.check_share),
    (
        prompts_are_not_cut_where_they_are_saved,
        partial(test_pace_prompts.check_cuts, [150, 90, 150], 64, 0.12, 0.2, 3, 0),
    ),
    (
        pieces_are_of_any_length,
        partial(test_pace_prompts.check_cuts, [150, 90, 150], 64, 0.12, 0.2, 3, 0),
    ),
    (first_steps_are_learned, test_pace.check_first_steps),
    (
        cycles_are_never_measured_beside_prompts,
        test_pace.test_cycles_are_measured_now_and_then,
    ),
    (the_oldest_prompt_is_owed_nothing, test_pace_prompts.check_book),
    (prompts_go_one_after_the_other, test_pace_prompts.check_short_prompts),
    (the_longest_goes_first, test_pace_prompts.test_the_shorter_book_goes_first),
    (classes_are_ignored, test_pace_prompts.test_a_higher_class_goes_first),
]


@pytest.mark.parametrize(("patch", "check"), cases(PLANTED))
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seen_by(check, patch, monkeypatch)
