"""Faults planted in preemption, each with what sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scheduler import preemption
from scheduler.delivery import Delivery
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.preemption import Preemption
from scheduler.prefix import PrefixCache
from scheduler.queue import WaitingQueue
from scheduler.reaper import Reaper
from scheduler.sequence import Preempted, Sequence
from tests.scheduler import test_preemption
from tests.scheduler.mutations import (
    Mutations,
    Patch,
    Planted,
    cases,
    check_seen_at_random,
    check_seen_by,
    fuzz_tiny_pools,
)

# --- preemption -----------------------------------------------------------------------------------


MUTATIONS = Mutations()


@MUTATIONS.plant
def a_preempted_row_is_freed_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def reap(self: Reaper, now: float) -> Any:
        leaving = [s for s in self._rows.values() if s.leaving is not None]
        held = [(s, s.tickets) for s in leaving]
        for sequence in leaving:
            sequence.tickets = 0
        reaped = reap_well(self, now)
        for sequence, tickets in held:
            sequence.tickets = tickets
        return reaped

    reap_well = Reaper.reap
    patch.setattr(Reaper, "reap", reap)


@MUTATIONS.plant
def a_row_that_leaves_is_planned_on(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        leaving, self.leaving = self.leaving, None
        result = bool(can_decode(self))
        self.leaving = leaving
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@MUTATIONS.plant
def what_it_had_emitted_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def suspend(self: Sequence, now: float) -> None:
        suspend_well(self, now)
        self.prompt = self.asked

    suspend_well = Sequence.suspend
    patch.setattr(Sequence, "suspend", suspend)


@MUTATIONS.plant
def a_resumed_row_may_emit_all_of_it_again(patch: pytest.MonkeyPatch) -> None:
    spec_well = Sequence.spec
    patch.setattr(
        Sequence,
        "spec",
        lambda self: replace(spec_well(self), max_tokens=self.request.max_tokens),
    )


@MUTATIONS.plant
def tokens_in_flight_when_it_left_are_lost(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.leaving is not None and s.cause is None:
            s.output += row.tokens
            return 0
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@MUTATIONS.plant
def a_row_without_a_page_is_planned(patch: pytest.MonkeyPatch) -> None:
    def serve(self: Preemption, ready: Any, reap: Any) -> Any:
        serve_well(self, ready, reap)
        return set(ready)

    serve_well = Preemption.serve
    patch.setattr(Preemption, "serve", serve)


@MUTATIONS.plant
def nobody_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Preemption, "_make_leave", lambda self, ready: None)


@MUTATIONS.plant
def drafts_take_pages_that_are_owed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMemory, "can_grow", lambda self, rows, depth: True)


@MUTATIONS.plant
def the_same_row_is_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """A preempted request stays under its old row id."""

    def suspend(self: Sequence, now: float) -> None:
        row = self.row
        suspend_well(self, now)
        self.row = row

    suspend_well = Sequence.suspend
    patch.setattr(Sequence, "suspend", suspend)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_see_in_tiny_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seen_at_random(MUTATIONS[name], fuzz_tiny_pools, monkeypatch)


# --- faults that need a test of their own to be seen ---------------------------------------------


def the_most_senior_row_leaves_first(patch: pytest.MonkeyPatch) -> None:
    staying = Preemption._staying
    patch.setattr(Preemption, "_staying", lambda self: staying(self)[::-1])


def the_class_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preemption, "seniority", lambda s: (0, s.paused_at is not None, s.order))


def who_reads_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preemption, "seniority", lambda s: (-s.priority, False, s.order))


def a_resumed_row_is_the_youngest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preemption, "seniority", lambda s: (-s.priority, s.paused_at is not None, s.row))


def the_output_counts_as_prompt(patch: pytest.MonkeyPatch) -> None:
    spec = Sequence.spec
    patch.setattr(Sequence, "spec", lambda self: replace(spec(self), output_start=None))


def the_minimum_starts_anew(patch: pytest.MonkeyPatch) -> None:
    spec = Sequence.spec
    patch.setattr(
        Sequence, "spec", lambda self: replace(spec(self), min_tokens=self.request.min_tokens)
    )


def it_comes_back_behind_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "requeue", WaitingQueue.push)


def it_comes_back_unread(patch: pytest.MonkeyPatch) -> None:
    suspend = Sequence.suspend

    def forget(self: Sequence, now: float) -> None:
        suspend(self, now)
        self.paused_at = None

    patch.setattr(Sequence, "suspend", forget)


def no_margin_is_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMemory, "margin", lambda self, alone: 0)


def rows_are_preempted_before_prefixes_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "evictable", lambda self, most, **others: 0)


def nothing_of_it_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeping, "leave", lambda self, sequence, table: None)


def a_turn_is_over_when_it_is_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeping, "leave", lambda self, s, table: Keeping.end(self, s, table, 0.0))


def what_it_left_is_not_its_sessions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeping, "end_waiting", lambda self, sequence, now: None)


def it_started_when_it_resumed(patch: pytest.MonkeyPatch) -> None:
    suspend = Sequence.suspend

    def forget(self: Sequence, now: float) -> None:
        suspend(self, now)
        self.cached_at_first = None

    patch.setattr(Sequence, "suspend", forget)


def it_is_displaced_for_ever(patch: pytest.MonkeyPatch) -> None:
    suspend = Sequence.suspend

    def forget(self: Sequence, now: float) -> None:
        suspend(self, now)
        self.displaced = 0

    patch.setattr(Sequence, "suspend", forget)


def rows_are_displaced_in_vain(patch: pytest.MonkeyPatch) -> None:
    def displace(self: Preemption, waiting: Sequence, ticket: Any) -> bool:
        for sequence in self._staying():
            if sequence.priority < waiting.priority:
                sequence.leaving = Preempted.PRIORITY
        return True

    patch.setattr(Preemption, "displace", displace)


def nobody_is_displaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Preemption, "displace", lambda self, waiting, ticket: False)


def a_displaced_row_waits_for_the_next_plan(patch: pytest.MonkeyPatch) -> None:
    displace = Preemption.displace

    def later(self: Preemption, waiting: Sequence, ticket: Any) -> bool:
        displace(self, waiting, ticket)
        return False

    patch.setattr(Preemption, "displace", later)


PLANTED: Planted = [
    (
        the_most_senior_row_leaves_first,
        test_preemption.test_of_several_juniors_the_most_junior_leaves,
    ),
    (
        the_class_does_not_count,
        partial(test_preemption.test_the_lowest_class_goes_first_then_the_youngest, 2),
    ),
    (who_reads_does_not_count, test_preemption.test_of_a_class_a_row_that_nobody_reads_goes_first),
    (a_resumed_row_is_the_youngest, test_preemption.test_a_resumed_row_is_as_old_as_it_was),
    (
        the_output_counts_as_prompt,
        partial(test_preemption.test_what_a_resumed_row_is_told, kept=True),
    ),
    (the_minimum_starts_anew, partial(test_preemption.test_what_a_resumed_row_is_told, kept=False)),
    (nothing_of_it_is_kept, partial(test_preemption.test_what_a_resumed_row_is_told, kept=True)),
    (it_comes_back_behind_others, test_preemption.test_preempted_requests_come_back_in_their_order),
    (it_comes_back_unread, test_preemption.test_a_row_that_nobody_reads_does_not_come_back),
    (no_margin_is_left, test_preemption.test_rows_start_only_beside_a_margin),
    (rows_are_preempted_before_prefixes_go, test_preemption.test_kept_prefixes_go_before_any_row),
    (
        a_turn_is_over_when_it_is_preempted,
        test_preemption.test_a_session_keeps_what_its_preempted_turn_left,
    ),
    (
        what_it_left_is_not_its_sessions,
        test_preemption.test_a_session_keeps_what_its_preempted_turn_left,
    ),
    (it_started_when_it_resumed, test_preemption.test_what_is_counted_goes_on),
    (
        it_is_displaced_for_ever,
        partial(test_preemption.test_a_request_is_displaced_so_often_and_no_more, 1),
    ),
    (rows_are_displaced_in_vain, test_preemption.test_nobody_is_displaced_in_vain),
    (nobody_is_displaced, partial(test_preemption.test_a_higher_class_takes_a_row, 2)),
    (
        a_displaced_row_waits_for_the_next_plan,
        test_preemption.test_a_row_that_nobody_reads_is_displaced_when_nothing_else_happens,
    ),
]


@pytest.mark.parametrize(("patch", "check"), cases(PLANTED))
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seen_by(check, patch, monkeypatch)
