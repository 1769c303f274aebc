"""For each guarantee of the simulator one planted fault, and proof that its test sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

import pytest

from engine.plan import PrefillChunk, RowResult, StepPlan
from scheduler.pages import IntegrityError
from scheduler.request import Finished
from scheduler.simulation import (
    Amount,
    MachineCosts,
    StalledError,
    TableCosts,
    engine,
    routing,
    traces,
)
from scheduler.simulation.clients import ChatUsers
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.fleet import Fleet
from scheduler.simulation.machine import Machine
from scheduler.simulation.report import Recorder
from scheduler.simulation.work import Work
from tests.scheduler import (
    test_simulation_fleet,
    test_simulation_routing,
    test_simulation_theory,
    test_simulation_traces,
)
from tests.scheduler.simulated import make_scenario

Patch = Callable[[pytest.MonkeyPatch], None]


def prompts_cost_a_tenth_less(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MachineCosts, "chunk", lambda self, tokens, start: 0.9 * self.token_s * tokens)


def cycles_cost_a_tenth_more(patch: pytest.MonkeyPatch) -> None:
    well = MachineCosts.cycle
    patch.setattr(MachineCosts, "cycle", lambda self, *a: 1.1 * well(self, *a))


def the_device_runs_two_steps_at_once(patch: pytest.MonkeyPatch) -> None:
    def run(self: Machine, plan: StepPlan, now: float) -> None:
        self._free_at = now
        run_well(self, plan, now)

    run_well = Machine._run
    patch.setattr(Machine, "_run", run)


def the_host_does_two_things_at_once(patch: pytest.MonkeyPatch) -> None:
    def run(self: Machine, plan: StepPlan, now: float) -> None:
        self._host_at = now
        run_well(self, plan, now)

    run_well = Machine._run
    patch.setattr(Machine, "_run", run)


def drafts_stand_on_their_own(patch: pytest.MonkeyPatch) -> None:
    """Each draft by its own chance, whether or not the ones before stood."""

    def emit(self: SimulatedEngine, name: int, row: engine._Row, drafted: int, _: int) -> RowResult:
        stood = sum(self._random.random() < chance for chance in row.chances[:drafted])
        return emit_well(self, name, row, drafted, stood)

    emit_well = SimulatedEngine._emit
    patch.setattr(SimulatedEngine, "_emit", emit)


def a_row_that_comes_back_begins_its_text_anew(patch: pytest.MonkeyPatch) -> None:
    def prefill(self: SimulatedEngine, chunk: PrefillChunk) -> RowResult | None:
        result = prefill_well(self, chunk)
        row = self._rows[chunk.row]
        if chunk.last and row.spec.output_start is not None:
            before = row.position - row.spec.output_start
            row.until_stop += before
        return result

    prefill_well = SimulatedEngine._prefill
    patch.setattr(SimulatedEngine, "_prefill", prefill)


def released_rows_stay_on_the_device(patch: pytest.MonkeyPatch) -> None:
    def run(self: SimulatedEngine, plan: StepPlan) -> object:
        held = {row: self._rows[row] for row in plan.release if row in self._rows and row % 7 == 0}
        result = run_well(self, plan)
        self._rows |= held
        return result

    run_well = SimulatedEngine.run
    patch.setattr(SimulatedEngine, "run", run)


def an_answer_is_not_part_of_the_conversation(patch: pytest.MonkeyPatch) -> None:
    def ended(self: ChatUsers, user: object, work: Work) -> None:
        work.tokens = [token + 1 for token in work.tokens]
        ended_well(self, user, work)  # type: ignore[arg-type]

    ended_well = ChatUsers._ended
    patch.setattr(ChatUsers, "_ended", ended)


def refusals_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "_give_up", lambda self, work, outcome: None)


def a_machine_that_is_down_is_offered_requests(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Machine) -> None:
        fail_well(self)
        self.up = True

    fail_well = Machine.fail
    patch.setattr(Machine, "fail", fail)


def a_client_sees_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Work, end: Finished, now: float) -> None:
        finish_well(self, end, now)
        self.completion_tokens += 1

    finish_well = Work.finish
    patch.setattr(Work, "finish", finish)


def lengths_differ_from_run_to_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Amount, "sample", lambda self, rng: self.median * random.uniform(0.5, 2))


def readers_are_all_fast(patch: pytest.MonkeyPatch) -> None:
    def read(self: Machine, request_id: str, work: Work, tokens: int) -> None:
        self.core.acknowledge(request_id, tokens, self._timeline.now)

    patch.setattr(Machine, "_read", read)


def the_ring_has_one_point_each(patch: pytest.MonkeyPatch) -> None:
    init = routing.SessionHash.__init__
    patch.setattr(routing.SessionHash, "__init__", partial_points(init))


def partial_points(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, machines, points=1: init(self, machines, points=points)


def sessions_are_hashed_by_number_of_machines(patch: pytest.MonkeyPatch) -> None:
    def choose(self: object, work: Work, machines: Mapping[int, object]) -> int:
        return sorted(machines)[routing._point(work.session or "") % len(machines)]

    patch.setattr(routing.SessionHash, "choose", choose)


def load_does_not_matter_to_prefixes(patch: pytest.MonkeyPatch) -> None:
    init = routing.PrefixAware.__init__

    def endless(self: routing.PrefixAware, machines: int, **options: float) -> None:
        init(self, machines, **options | {"absolute": 10**9})  # type: ignore[arg-type]

    patch.setattr(routing.PrefixAware, "__init__", endless)


def bursts_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        test_simulation_traces, "bursts", lambda rng, busy_rate, **_: traces.poisson(rng, busy_rate)
    )


def the_sun_does_not_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        test_simulation_traces, "diurnal", lambda rng, rate, **_: traces.poisson(rng, rate)
    )


def lengths_are_their_median(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Amount, "sample", lambda self, rng: self.median)


def tables_are_planes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableCosts, "seconds", TableCosts._guess)


def first_tokens_count_as_gaps(patch: pytest.MonkeyPatch) -> None:
    def burst(self: Recorder, work: Work, event: object, gap: float | None) -> None:
        burst_well(self, work, event, gap or 0.0)  # type: ignore[arg-type]

    burst_well = Recorder.burst
    patch.setattr(Recorder, "burst", burst)


fleet, theory = test_simulation_fleet, test_simulation_theory
routes, arrivals = test_simulation_routing, test_simulation_traces
wait = partial(theory.test_mean_wait_is_pollaczek_khinchines, Amount(median=1000), 0.8)
gaps = partial(theory.test_gaps_are_the_cost_model, 3, 2)

PLANTED: list[tuple[Patch, Callable[[], object]]] = [
    (prompts_cost_a_tenth_less, wait),
    (cycles_cost_a_tenth_more, gaps),
    (the_device_runs_two_steps_at_once, gaps),
    (
        the_host_does_two_things_at_once,
        partial(theory.test_host_time_is_hidden_behind_a_step_and_seen_beyond_it, 0.05),
    ),
    (drafts_stand_on_their_own, theory.test_tokens_per_cycle_are_what_chances_say),
    (
        a_row_that_comes_back_begins_its_text_anew,
        partial(fleet.test_a_row_that_was_preempted_goes_on_to_its_own_end, 7),
    ),
    (released_rows_stay_on_the_device, partial(fleet.test_everything_ends_once, "round-robin")),
    (
        an_answer_is_not_part_of_the_conversation,
        fleet.test_next_turns_start_from_what_was_kept,
    ),
    (refusals_are_forgotten, fleet.test_refusals_are_offered_again_and_then_counted),
    (
        a_machine_that_is_down_is_offered_requests,
        fleet.test_a_machine_that_fails_takes_its_requests_along_and_comes_back,
    ),
    (a_client_sees_a_token_too_many, partial(fleet.test_everything_ends_once, "round-robin")),
    (
        lengths_differ_from_run_to_run,
        partial(fleet.test_a_seed_repeats_a_run, make_scenario(duration_s=20.0)),
    ),
    (readers_are_all_fast, fleet.test_slow_readers_pause_and_are_not_lost),
    (the_ring_has_one_point_each, routes.test_sessions_stay_and_spread),
    (
        sessions_are_hashed_by_number_of_machines,
        partial(routes.test_only_sessions_of_a_machine_that_leaves_move, 3),
    ),
    (load_does_not_matter_to_prefixes, routes.test_an_overloaded_machine_is_left),
    (bursts_never_end, arrivals.test_bursts),
    (the_sun_does_not_set, arrivals.test_diurnal),
    (lengths_are_their_median, arrivals.test_amounts),
    (tables_are_planes, theory.test_a_table_gives_its_own_points_and_sane_ones_between),
    (first_tokens_count_as_gaps, gaps),
]


@pytest.mark.parametrize(("patch", "check"), PLANTED, ids=[patch.__name__ for patch, _ in PLANTED])
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, StalledError)):
        check()
