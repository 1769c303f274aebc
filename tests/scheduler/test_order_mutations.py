"""Faults planted in the order and at the door, each with the test that sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from scheduler.ageing import Ageing, Lane
from scheduler.door import Door
from scheduler.groups import Groups
from scheduler.pages import IntegrityError
from scheduler.prefill import PrefillPlanner
from scheduler.queue import WaitingQueue
from scheduler.registry import Registry
from scheduler.request import (
    FinishReason,
    GenerationRequest,
    Priority,
    QueueFullError,
    Refusal,
)
from scheduler.sequence import Sequence
from scheduler.tenants import Tenant, Tenants, Turns
from scheduler.throughput import Estimate, Throughput, Waits
from tests.scheduler import test_admission, test_core_door, test_order, test_turns
from tests.scheduler.bench import TICK_S

Patch = Callable[[pytest.MonkeyPatch], None]


# --- order ----------------------------------------------------------------------------------------


def credit_is_banked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "floor", lambda self: 0.0)


def weights_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def charge(self: Turns, tenant: Tenant, tokens: int) -> None:
        charge_well(self, tenant, round(tokens * tenant.policy.weight))

    charge_well = Turns.charge
    patch.setattr(Turns, "charge", charge)


def nothing_ages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "_age", lambda self, now: None)


def equals_pass(patch: pytest.MonkeyPatch) -> None:
    """Whoever starts lets the others age."""
    passed_well = Ageing.passed
    patch.setattr(Ageing, "passed", lambda self, _, now: passed_well(self, max(Priority), now))


def who_was_lifted_passes(patch: pytest.MonkeyPatch) -> None:
    def start(self: WaitingQueue, sequence: Sequence, now: float) -> None:
        start_well(self, sequence, now)
        self._ageing.passed(sequence.level, now)

    start_well = WaitingQueue.start
    patch.setattr(WaitingQueue, "start", start)


def who_was_served_stays_lifted(patch: pytest.MonkeyPatch) -> None:
    """A backlog that was passed once is lifted whole."""

    def take(self: WaitingQueue, sequence: Sequence, *, served: bool = False) -> Tenant:
        return take_well(self, sequence)

    take_well = WaitingQueue._take
    patch.setattr(WaitingQueue, "_take", take)


def who_returns_is_not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ageing, "back", lambda self, lane, level: None)


def the_lift_goes_with_whom_it_found_first(patch: pytest.MonkeyPatch) -> None:
    def settle(self: WaitingQueue, tenant: Tenant, lane: Lane) -> None:
        first = lane.first
        if first is not None and all(s.level is lane.priority for _, s in lane.waiting[1:]):
            settle_well(self, tenant, lane)

    settle_well = WaitingQueue._settle
    patch.setattr(WaitingQueue, "_settle", settle)
    patch.setattr(WaitingQueue, "_move", _moves_up)


def _moves_up(self: WaitingQueue, tenant: Tenant, sequence: Sequence, level: Priority) -> None:
    if level > sequence.level:
        self._leave(tenant, sequence)
        sequence.level = level
        self._join(tenant, sequence)


def rows_of_a_tenant_are_not_limited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenant, "full", property(lambda self: False))


def rows_are_freed_and_still_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "row_freed", lambda self, sequence, now: None)


def classes_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "priority_of", lambda self, tenant, asked: Priority.DEFAULT)


def a_class_cannot_be_capped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "priority_of", lambda self, tenant, asked: asked)


def generated_tokens_are_free(patch: pytest.MonkeyPatch) -> None:
    def charge(self: WaitingQueue, sequence: Sequence, tokens: int) -> None:
        if sequence.output == []:
            charge_well(self, sequence, tokens)

    charge_well = WaitingQueue.charge
    patch.setattr(WaitingQueue, "charge", charge)


def a_prompt_is_charged_again(patch: pytest.MonkeyPatch) -> None:
    def start(self: WaitingQueue, sequence: Sequence, now: float) -> None:
        sequence.charged = False
        start_well(self, sequence, now)

    start_well = WaitingQueue.start
    patch.setattr(WaitingQueue, "start", start)


def who_returns_goes_last(patch: pytest.MonkeyPatch) -> None:
    def requeue(self: WaitingQueue, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        requeue_well(self, sequence)

    requeue_well = WaitingQueue.requeue
    patch.setattr(WaitingQueue, "requeue", requeue)


def who_does_not_fit_is_passed(patch: pytest.MonkeyPatch) -> None:
    """The next one in the queue is tried, although this one waits for room."""

    def waits(self: Groups, sequence: Sequence) -> bool:
        return waits_well(self, sequence) or len(sequence.prompt) >= 40

    waits_well = Groups.waits
    patch.setattr(Groups, "waits", waits)


def no_bound_on_passing_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.queue.MOST_PASSED", 10**9)


def any_name_has_its_own_statistics(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenants, "label", lambda self, name: name)


def idle_tenants_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenants, "rest", lambda self, tenant: None)


# --- the door -------------------------------------------------------------------------------------


def the_deadline_check_is_inverted(patch: pytest.MonkeyPatch) -> None:
    def check(self: Door, before: Any, request: Any, *others: Any) -> QueueFullError | None:
        if request.deadline is None or check_well(self, before, request, *others) is not None:
            return None
        return QueueFullError(Refusal.DEADLINE, "inverted", 1.0)

    check_well = Door._deadline
    patch.setattr(Door, "_deadline", check)


def deadlines_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "_deadline", lambda self, *asked: None)


def deadlines_are_refused_without_evidence(patch: pytest.MonkeyPatch) -> None:
    def seconds(self: Throughput, *, tokens: float, starts: float, begun: int) -> Estimate:
        return Estimate(starts, starts)

    patch.setattr(Throughput, "seconds", seconds)


def one_more_row_is_always_needed(patch: pytest.MonkeyPatch) -> None:
    def seconds(self: Throughput, *, tokens: float, starts: float, begun: int) -> Estimate:
        return seconds_well(self, tokens=tokens, starts=starts + 1, begun=begun)

    seconds_well = Throughput.seconds
    patch.setattr(Throughput, "seconds", seconds)


def idle_time_counts(patch: pytest.MonkeyPatch) -> None:
    def plan(self: Throughput, *, tokens: int, starts: int, waits: Waits, now: float) -> None:
        kept = self._room_s
        plan_well(self, tokens=tokens, starts=starts, waits=waits, now=now)
        self._room_s = max(self._room_s, kept)
        self._waits = Waits.ROOM if waits is Waits.NOBODY else waits

    plan_well = Throughput.plan
    patch.setattr(Throughput, "plan", plan)


def the_mean_step_is_the_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.throughput.median", lambda values: sum(values) / len(values))


def every_class_is_ahead(patch: pytest.MonkeyPatch) -> None:
    def ahead(
        self: WaitingQueue, tenant: str, asked: Priority, *, generated: float
    ) -> tuple[float, float]:
        return ahead_well(self, tenant, Priority.BATCH, generated=generated)

    ahead_well = WaitingQueue.ahead
    patch.setattr(WaitingQueue, "ahead", ahead)


def every_tenant_is_ahead(patch: pytest.MonkeyPatch) -> None:
    def ahead(self: WaitingQueue, *args: Any, **others: Any) -> tuple[float, float]:
        return len(self), self.tokens

    patch.setattr(WaitingQueue, "ahead", ahead)


def samples_count_in_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "follows", lambda self, sequence: False)


def a_tenant_may_queue_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "_tenant", lambda self, name, prompt_tokens, now: None)


def a_prompt_beyond_its_tenants_bound_is_refused_for_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "fits", lambda self, request, prompt_tokens, count: None)


def samples_are_let_in_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Each is asked for by itself; those before a refused one end as cancelled."""

    def submit(self: Registry, requests: Any, now: float) -> None:
        taken = []
        try:
            for request in requests:
                submit_well(self, (request,), now)
                taken.append(request)
        except QueueFullError:
            for request in taken:
                self.cancel(request.request_id, FinishReason.CANCELLED, now, "")
            self._outbox.clear()
            raise

    submit_well = Registry.submit
    patch.setattr(Registry, "submit", submit)


def samples_count_as_one_request(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: Door, requests: Any, *others: Any) -> QueueFullError | None:
        return refuse_well(self, requests[:1], *others)

    refuse_well = Door.refusal
    patch.setattr(Door, "refusal", refuse)


def a_flood_may_fill_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "_kept", lambda self, name, waiting, most, more: 0)


def every_tenant_leaves_an_eighth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "_kept", lambda self, name, waiting, most, more: most // 8)


def all_names_are_one_at_being_passed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenants, "label", lambda self, name: "other")


def own_rows_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "own_ahead", lambda self, tenant, asked: 0)


def rows_are_held_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Those that have run for a while are taken for new ones, and for longer than they are."""

    def own(times: Any, held: Any, *, most: int, ahead: int) -> Estimate:
        rounds = ahead // most + 1
        return Estimate(rounds * max(times, default=0), rounds * max(times, default=0))

    patch.setattr("scheduler.door.own_turn", own)


def the_wait_for_others_is_added(patch: pytest.MonkeyPatch) -> None:
    """To the wait for own rows, although the two pass together."""

    def starts_in(
        self: Door, request: GenerationRequest, now: float, *, before: int = 0, work: int = 0
    ) -> Estimate:
        ahead = before + self._queue.own_ahead(request.tenant, request.priority)
        own = self._own_turn(request.tenant, ahead, now)
        others = self._turn(request, before, work)
        return Estimate(own.likely + others.likely, own.likely + others.likely)

    patch.setattr(Door, "starts_in", starts_in)


def a_full_tenants_delay_is_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "_own_turn", lambda self, name, ahead, now: Estimate(0.0, 0.0))


def waiting_for_room_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    def fill(self: PrefillPlanner, *args: Any) -> Waits:
        waits = fill_well(self, *args)
        return Waits.NOBODY if waits is Waits.ROOM else waits

    fill_well = PrefillPlanner._fill
    patch.setattr(PrefillPlanner, "_fill", fill)


def whom(test: Callable[..., Any], *args: Any) -> Callable[[], object]:
    """A hypothesis test with these arguments."""
    return partial(test.hypothesis.inner_test, *args)  # type: ignore[attr-defined]


starved = whom(test_order.test_starvation_is_bounded, 1, Priority.BATCH, 0)
backlog = whom(
    test_order.test_a_backlog_does_not_age_past_another_tenants_share, 1, 0.0, 10.3 * TICK_S
)
mixed = whom(
    test_order.test_a_backlog_does_not_age_past_another_tenants_share, 1, 0.2, 60.3 * TICK_S
)
shares = whom(test_order.test_shares_follow_weights, 1, [1.0, 3.0], True)
trace = whom(test_order.test_nobody_passes_who_may_not, 4, 20.3 * TICK_S, 0.7)
limited = whom(test_admission.test_who_is_refused_for_a_limit_of_rows_would_have_missed, 1)
flooded = partial(test_admission.test_a_flood_does_not_shut_the_door_on_others, {"max_queue": 16})

PLANTED: list[tuple[Patch, Callable[[], object]]] = [
    (credit_is_banked, test_turns.test_time_without_work_earns_no_credit),
    (credit_is_banked, test_turns.test_nor_when_nobody_waits),
    (credit_is_banked, test_turns.test_a_limit_of_ones_own_earns_no_credit),
    (weights_are_ignored, test_turns.test_weights_divide_the_charge),
    (weights_are_ignored, test_order.test_long_run_shares_are_the_weights),
    (weights_are_ignored, shares),
    (nothing_ages, test_turns.test_being_passed_lifts_class_by_class),
    (nothing_ages, starved),
    (nothing_ages, trace),
    (equals_pass, partial(test_turns.test_equals_and_who_was_lifted_pass_nobody, Priority.DEFAULT)),
    (equals_pass, backlog),
    (
        who_was_lifted_passes,
        partial(test_turns.test_equals_and_who_was_lifted_pass_nobody, Priority.DEFAULT),
    ),
    (
        who_was_served_stays_lifted,
        test_turns.test_only_the_first_of_a_lane_is_lifted_and_a_start_takes_it_back,
    ),
    (who_was_served_stays_lifted, mixed),
    (who_returns_is_not_lifted, test_turns.test_who_returns_is_lifted_as_it_was),
    (
        the_lift_goes_with_whom_it_found_first,
        test_turns.test_who_comes_before_the_first_of_a_lane_takes_its_place,
    ),
    (rows_of_a_tenant_are_not_limited, test_turns.test_a_full_tenant_does_not_block_others),
    (rows_of_a_tenant_are_not_limited, trace),
    (rows_are_freed_and_still_count, test_turns.test_a_full_tenant_does_not_block_others),
    (classes_are_ignored, test_turns.test_classes_then_arrival),
    (classes_are_ignored, trace),
    (a_class_cannot_be_capped, test_turns.test_a_tenant_may_not_exceed_its_class),
    (a_class_cannot_be_capped, trace),
    (generated_tokens_are_free, test_turns.test_statistics_by_class_and_tenant),
    (a_prompt_is_charged_again, test_turns.test_who_returns_is_first_of_its_class_and_pays_once),
    (who_returns_goes_last, test_turns.test_who_returns_is_first_of_its_class_and_pays_once),
    (who_does_not_fit_is_passed, test_turns.test_a_big_request_is_not_starved_by_small_ones),
    (no_bound_on_passing_over, test_turns.test_who_is_passed_over_is_found_again),
    (any_name_has_its_own_statistics, test_turns.test_statistics_by_class_and_tenant),
    (idle_tenants_stay, partial(test_order.test_random_use_with_tenants, 1)),
    (the_deadline_check_is_inverted, test_admission.test_who_can_start_at_once_is_let_in),
    (the_deadline_check_is_inverted, test_admission.test_who_would_start_too_late_is_refused),
    (deadlines_are_not_looked_at, test_admission.test_who_would_start_too_late_is_refused),
    (
        deadlines_are_refused_without_evidence,
        test_admission.test_without_evidence_nobody_is_refused,
    ),
    (one_more_row_is_always_needed, test_admission.test_who_can_start_at_once_is_let_in),
    (idle_time_counts, test_admission.test_idle_time_is_no_slowness),
    (the_mean_step_is_the_rule, test_admission.test_a_first_step_that_compiles_is_not_the_rule),
    (every_class_is_ahead, test_admission.test_lower_classes_are_not_ahead),
    (
        every_tenant_is_ahead,
        test_admission.test_other_tenants_are_ahead_as_far_as_their_share_goes,
    ),
    (samples_count_in_full, test_admission.test_samples_of_one_prompt_are_one_prompt_ahead),
    (a_tenant_may_queue_everything, test_admission.test_a_tenant_has_its_own_bound),
    (
        a_prompt_beyond_its_tenants_bound_is_refused_for_now,
        test_admission.test_a_tenant_has_its_own_bound,
    ),
    (samples_are_let_in_one_by_one, test_core_door.test_samples_are_let_in_together),
    (samples_count_as_one_request, test_core_door.test_samples_are_let_in_together),
    (samples_count_as_one_request, test_core_door.test_samples_are_bounded_in_tokens_together),
    (samples_count_as_one_request, test_admission.test_the_last_sample_meets_the_deadline_too),
    (a_flood_may_fill_the_queue, flooded),
    (every_tenant_leaves_an_eighth, flooded),
    (
        every_tenant_leaves_an_eighth,
        test_admission.test_without_policies_the_whole_queue_is_anybodys,
    ),
    (
        all_names_are_one_at_being_passed_over,
        test_turns.test_one_tenants_waiting_groups_do_not_end_the_step,
    ),
    (own_rows_are_not_waited_for, test_admission.test_a_tenants_own_rows_are_waited_for),
    (own_rows_are_not_waited_for, limited),
    (rows_are_held_for_ever, limited),
    (the_wait_for_others_is_added, limited),
    (
        a_full_tenants_delay_is_everybodys,
        test_admission.test_a_full_tenants_delay_is_that_of_its_rows,
    ),
    (waiting_for_room_is_not_noticed, test_admission.test_who_would_start_too_late_is_refused),
]


@pytest.mark.parametrize(
    ("patch", "check"),
    PLANTED,
    ids=[f"{patch.__name__}-{number}" for number, (patch, _) in enumerate(PLANTED)],
)
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, QueueFullError, pytest.fail.Exception)):
        check()
