"""For each guarantee one planted fault, and proof that the checks see it.

A mutation replaces one function of the core. `fuzz` then runs random requests with all checks of
`Bench`, `FakeEngine` and `integrity()`; with a fault planted, one of them must raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from engine.plan import EngineFailedError, KeepRow
from scheduler import (
    RequestHandle,
    Scheduler,
    acceptance,
    costs,
    depth,
    pace,
    preemption,
    prefill,
    prefix,
)
from scheduler.cohorts import CohortPlanner
from scheduler.core import SchedulerCore
from scheduler.delivery import Delivery
from scheduler.door import Door
from scheduler.groups import Groups
from scheduler.keeping import Keeping
from scheduler.memory import RowMemory
from scheduler.pace import Budget, Pace
from scheduler.pages import IntegrityError, PagePool, PageTables
from scheduler.preemption import Preemption
from scheduler.prefill import PrefillPlanner
from scheduler.prefix import Entry, PrefixCache, Yield
from scheduler.queue import WaitingQueue
from scheduler.request import Finished, FinishReason, Tokens
from scheduler.sequence import Preempted, Sequence
from scheduler.shares import Account
from scheduler.thread import OwnerThread
from tests.scheduler import (
    test_depth,
    test_loop,
    test_pace,
    test_preemption,
    test_prefix,
    test_sessions,
)
from tests.scheduler.bench import TINY, fuzz
from tests.scheduler.fake_engine import PlanError

Patch = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Patch] = {}


def mutation(function: Patch) -> Patch:
    MUTATIONS[function.__name__] = function
    return function


@mutation
def a_page_is_not_freed(patch: pytest.MonkeyPatch) -> None:
    def free(self: PagePool, owner: int) -> None:
        self._owned[owner] = self._owned[owner][1:]
        free_well(self, owner)

    free_well = PagePool.free
    patch.setattr(PagePool, "free", free)


@mutation
def a_page_is_handed_out_twice(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: PagePool, owner: int, count: int) -> list[int]:
        pages = allocate_well(self, owner, count)
        if pages and owner % 5 == 0:
            self._free.append(pages[-1])
        return pages

    allocate_well = PagePool.allocate
    patch.setattr(PagePool, "allocate", allocate)


@mutation
def rows_start_without_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "can_make_room", lambda self, pages, **others: True)


@mutation
def the_null_page_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    def init(self: PagePool, *, pages: int) -> None:
        init_well(self, pages=pages)
        self._free[0] = 0

    init_well = PagePool.__init__
    patch.setattr(PagePool, "__init__", init)


@mutation
def tables_are_one_position_short(patch: pytest.MonkeyPatch) -> None:
    reach = Sequence.reach
    patch.setattr(Sequence, "reach", lambda self, depth: reach(self, depth) - 1)


@mutation
def growth_in_flight_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def reach(self: Sequence, depth: int) -> int:
        return min(len(self.prompt) + self.emitted + depth + 1, self.longest)

    patch.setattr(Sequence, "reach", reach)


@mutation
def growth_is_not_bounded_by_max_tokens(patch: pytest.MonkeyPatch) -> None:
    def reach(self: Sequence, depth: int) -> int:
        return len(self.prompt) + self.emitted + self.ceiling + depth + 1

    patch.setattr(Sequence, "reach", reach)


@mutation
def a_cancelled_row_is_kept(patch: pytest.MonkeyPatch) -> None:
    def reap(self: SchedulerCore, now: float) -> Any:
        kept = {r: s for r, s in self._rows.items() if s.cause is FinishReason.CANCELLED}
        for row in kept:
            del self._rows[row]
        reaped = reap_well(self, now)
        self._rows.update(kept)
        return reaped

    reap_well = SchedulerCore._reap
    patch.setattr(SchedulerCore, "_reap", reap)


@mutation
def a_cancelled_row_goes_on(patch: pytest.MonkeyPatch) -> None:
    def end(self: SchedulerCore, s: Sequence, reason: FinishReason, now: float, why: str) -> None:
        end_well(self, s, reason, now, why)
        if reason is FinishReason.CANCELLED and s.started:
            s.cause = None

    end_well = SchedulerCore._end
    patch.setattr(SchedulerCore, "_end", end)


@mutation
def a_finished_row_is_freed_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def reap(self: SchedulerCore, now: float) -> Any:
        ended = [row for row, s in self._rows.items() if s.cause is not None]
        for row in ended:
            self._memory.free(self._rows.pop(row))
        return (), tuple(ended)

    patch.setattr(SchedulerCore, "_reap", reap)


@mutation
def the_engine_is_not_told_to_release(patch: pytest.MonkeyPatch) -> None:
    reap_well = SchedulerCore._reap
    patch.setattr(SchedulerCore, "_reap", lambda self, now: (reap_well(self, now)[0], ()))


@mutation
def a_slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PageTables, slot: int) -> None:
        self._tables[slot] = 0
        self._lengths[slot] = 0

    patch.setattr(PageTables, "give_back", give_back)


@mutation
def a_table_is_not_cleared(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PageTables, slot: int) -> None:
        self._lengths[slot] = 0
        self._free.append(slot)

    patch.setattr(PageTables, "give_back", give_back)


@mutation
def row_ids_are_reused(patch: pytest.MonkeyPatch) -> None:
    def start(self: PrefillPlanner, *args: Any) -> None:
        self._next_row = min(set(range(1, 99)) - set(self._rows))
        start_well(self, *args)

    start_well = PrefillPlanner._start
    patch.setattr(PrefillPlanner, "_start", start)


@mutation
def a_row_decodes_before_its_prompt_is_complete(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        cursor, self.cursor = self.cursor, len(self.prompt)
        result = bool(can_decode(self))
        self.cursor = cursor
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@mutation
def chunks_overlap(patch: pytest.MonkeyPatch) -> None:
    def chunk(self: PrefillPlanner, sequence: Sequence, ticket: Any, end: int) -> None:
        chunk_well(self, sequence, ticket, end)
        if sequence.prefilling:
            sequence.cursor -= 1

    chunk_well = PrefillPlanner._chunk
    patch.setattr(PrefillPlanner, "_chunk", chunk)


@mutation
def prefill_holds_up_decode(patch: pytest.MonkeyPatch) -> None:
    def plan(self: CohortPlanner, rows: Any, cohort: Any, *, alone: bool) -> Any:
        return plan_well(self, rows, cohort, alone=alone) if alone else None

    plan_well = CohortPlanner.plan
    patch.setattr(CohortPlanner, "plan", plan)


@mutation
def results_do_not_settle_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    def commit(self: SchedulerCore, result: Any, now: float) -> Any:
        before = [(s, s.ceiling) for s in self._rows.values()]
        events = commit_well(self, result, now)
        for sequence, ceiling in before:
            sequence.ceiling = ceiling
        return events

    commit_well = SchedulerCore.commit
    patch.setattr(SchedulerCore, "commit", commit)


@mutation
def tokens_after_the_end_are_delivered(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.cause is not None and row is not None and row.tokens:
            late = Tokens(ids=row.tokens, drafted=0, accepted=0, at=0.0)
            self._outbox.append((s.request_id, late))
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@mutation
def a_later_cause_replaces_the_first(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.cause is not None and row is not None and row.finish is not None:
            finished = Finished(reason=FinishReason.STOP, usage=s.usage(now))
            self._outbox.append((s.request_id, finished))
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@mutation
def a_full_stream_is_not_paused(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def deaf(self: Sequence) -> bool:
        self.paused_at = None
        return bool(can_decode(self))

    patch.setattr(Sequence, "can_decode", property(deaf))


@mutation
def a_slow_reader_pauses_everybody(patch: pytest.MonkeyPatch) -> None:
    def cohorts(self: SchedulerCore, served: Any) -> Any:
        paused = any(s.paused_at is not None for s in self._live.values())
        return ([], []) if paused else cohorts_well(self, served)

    cohorts_well = SchedulerCore._cohorts
    patch.setattr(SchedulerCore, "_cohorts", cohorts)


@mutation
def deadlines_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerCore, "_expire", lambda self, now: None)


@mutation
def the_queue_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "refusal", lambda self, request, prompt_tokens, now: None)


@mutation
def a_depth_cap_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def submit(self: SchedulerCore, request: Any, now: float) -> None:
        submit_well(self, request, now)
        self._live[request.request_id].depth_cap = self._max_depth

    submit_well = SchedulerCore.submit
    patch.setattr(SchedulerCore, "submit", submit)


@mutation
def an_ended_request_stays_registered(patch: pytest.MonkeyPatch) -> None:
    def end(self: SchedulerCore, s: Sequence, reason: FinishReason, now: float, why: str) -> None:
        end_well(self, s, reason, now, why)
        self._live[s.request_id] = s

    end_well = SchedulerCore._end
    patch.setattr(SchedulerCore, "_end", end)


# --- prefixes -------------------------------------------------------------------------------------


@mutation
def a_partly_filled_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    def start(self: RowMemory, sequence: Sequence, entry: Any) -> None:
        start_well(self, sequence, entry)

    start_well = RowMemory.start
    patch.setattr(RowMemory, "start", start)


@mutation
def a_borrower_gets_the_partly_filled_page_itself(patch: pytest.MonkeyPatch) -> None:
    def start(self: RowMemory, sequence: Sequence, entry: Any) -> Any:
        if entry is None:
            return start_well(self, sequence, entry)
        pages = entry.pages.tolist()
        self._pool.open(sequence.row, pages)
        sequence.slot = self._tables.take_slot()
        self._tables.extend(sequence.slot, pages)
        self.grow(sequence, len(sequence.prompt))
        return None

    start_well = RowMemory.start
    patch.setattr(RowMemory, "start", start)


@mutation
def an_entry_drops_its_pages_twice(patch: pytest.MonkeyPatch) -> None:
    def drop(self: PagePool, pages: Any) -> None:
        drop_well(self, pages)
        again = pages[self._entries[pages] > 0]
        drop_well(self, again)

    drop_well = PagePool.drop
    patch.setattr(PagePool, "drop", drop)


@mutation
def an_entry_frees_pages_that_rows_hold(patch: pytest.MonkeyPatch) -> None:
    def drop(self: PagePool, pages: Any) -> None:
        self._entries[pages] -= 1
        self._free += pages[self._entries[pages] == 0].tolist()

    patch.setattr(PagePool, "drop", drop)


@mutation
def a_row_frees_pages_that_entries_hold(patch: pytest.MonkeyPatch) -> None:
    def free(self: PagePool, owner: int) -> None:
        held = [page for page in self._owned[owner] if self._entries[page]]
        free_well(self, owner)
        self._free += [page for page in held if not self._rows[page]]

    free_well = PagePool.free
    patch.setattr(PagePool, "free", free)


@mutation
def tokens_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "_starts_with", lambda tokens, beginning: True)


@mutation
def a_row_is_kept_while_a_step_names_it(patch: pytest.MonkeyPatch) -> None:
    def reap(self: SchedulerCore, now: float) -> Any:
        keep, release = reap_well(self, now)
        for s in self._rows.values():
            if s.cause is not None and not s.spoiled:
                table = self._tables.table(s.slot)
                if entry := self.keeping.end(s, table, now):
                    keep += (KeepRow(row=s.row, boundary=entry.boundary, pages=table),)
        return keep, release

    reap_well = SchedulerCore._reap
    patch.setattr(SchedulerCore, "_reap", reap)


@mutation
def tokens_after_the_end_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        before = len(s.output) if s.cause is not None else None
        tokens = apply_well(self, s, row, most, now)
        if before is not None:
            del s.output[before:]
        return tokens

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@mutation
def a_guided_row_is_planned_while_a_step_names_it(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        tickets, self.tickets = self.tickets, 0
        result = bool(can_decode(self))
        self.tickets = tickets
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@mutation
def an_entry_in_use_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: PrefixCache, pages: int, **others: Any) -> bool:
        return room_well(self, pages, **{**others, "spare": None})

    room_well = PrefixCache.make_room
    patch.setattr(PrefixCache, "make_room", make_room)
    patch.setattr(PrefixCache, "use", lambda self, entry: None)


@mutation
def history_that_a_row_needs_is_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match
    patch.setattr(
        PrefixCache,
        "match",
        lambda self, prompt, hashes, mtp: match(self, prompt, hashes, mtp=False),
    )


@mutation
def the_engine_is_not_told_to_drop(patch: pytest.MonkeyPatch) -> None:
    def planned(self: PrefixCache) -> tuple[int, ...]:
        planned_well(self)
        return ()

    planned_well = PrefixCache.planned
    patch.setattr(PrefixCache, "planned", planned)


# --- preemption -----------------------------------------------------------------------------------

TINY_MUTATIONS: dict[str, Patch] = {}


def in_tiny_pools(function: Patch) -> Patch:
    TINY_MUTATIONS[function.__name__] = function
    return function


@in_tiny_pools
def a_preempted_row_is_freed_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def reap(self: SchedulerCore, now: float) -> Any:
        leaving = [s for s in self._rows.values() if s.leaving is not None]
        held = [(s, s.tickets) for s in leaving]
        for sequence in leaving:
            sequence.tickets = 0
        reaped = reap_well(self, now)
        for sequence, tickets in held:
            sequence.tickets = tickets
        return reaped

    reap_well = SchedulerCore._reap
    patch.setattr(SchedulerCore, "_reap", reap)


@in_tiny_pools
def a_row_that_leaves_is_planned_on(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        leaving, self.leaving = self.leaving, None
        result = bool(can_decode(self))
        self.leaving = leaving
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@in_tiny_pools
def what_it_had_emitted_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def suspend(self: Sequence, now: float) -> None:
        suspend_well(self, now)
        self.prompt = self.asked

    suspend_well = Sequence.suspend
    patch.setattr(Sequence, "suspend", suspend)


@in_tiny_pools
def a_resumed_row_may_emit_all_of_it_again(patch: pytest.MonkeyPatch) -> None:
    spec_well = Sequence.spec
    patch.setattr(
        Sequence,
        "spec",
        lambda self: replace(spec_well(self), max_tokens=self.request.max_tokens),
    )


@in_tiny_pools
def tokens_in_flight_when_it_left_are_lost(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.leaving is not None and s.cause is None:
            s.output += row.tokens
            return 0
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@in_tiny_pools
def a_row_without_a_page_is_planned(patch: pytest.MonkeyPatch) -> None:
    def serve(self: Preemption, ready: Any, reap: Any) -> Any:
        serve_well(self, ready, reap)
        return set(ready)

    serve_well = Preemption.serve
    patch.setattr(Preemption, "serve", serve)


@in_tiny_pools
def nobody_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Preemption, "_make_leave", lambda self, ready: None)


@in_tiny_pools
def drafts_take_pages_that_are_owed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMemory, "can_grow", lambda self, rows, depth: True)


@in_tiny_pools
def the_same_row_is_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """A preempted request stays under its old row id."""

    def suspend(self: Sequence, now: float) -> None:
        row = self.row
        suspend_well(self, now)
        self.row = row

    suspend_well = Sequence.suspend
    patch.setattr(Sequence, "suspend", suspend)


CHECKS = (IntegrityError, PlanError, EngineFailedError, AssertionError)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(CHECKS):
        fuzz(seed=11, requests=300, in_flight=2)


def fuzz_tiny_pools() -> None:
    for seed in (11, 12):
        fuzz(
            seed=seed,
            requests=200,
            in_flight=2,
            config=TINY,
            priorities=True,
            pages=24,
            boundaries=6,
        )


@pytest.mark.parametrize("name", TINY_MUTATIONS)
def test_the_checks_see_in_tiny_pools(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    TINY_MUTATIONS[name](monkeypatch)
    with pytest.raises(CHECKS):
        fuzz_tiny_pools()


def test_without_a_mutation_nothing_is_seen() -> None:
    fuzz(seed=11, requests=300, in_flight=2)
    fuzz_tiny_pools()


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


def the_loop_polls(patch: pytest.MonkeyPatch) -> None:
    async def sleep(self: Scheduler) -> None:
        await anyio.sleep(0.01)

    patch.setattr(Scheduler, "_sleep", sleep)


def a_reader_that_leaves_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestHandle, "cancel", lambda self: False)


def the_engine_moves_between_threads(patch: pytest.MonkeyPatch) -> None:
    async def call(self: Any, function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args)

    patch.setattr(OwnerThread, "call", call)


def a_dead_engine_is_only_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_fail", lambda self, error: self.failed.set())


def drain_cuts_off(patch: pytest.MonkeyPatch) -> None:
    async def drain(self: Scheduler, timeout: float) -> None:
        self._core.close("the server is draining")
        self._shut_down()

    patch.setattr(Scheduler, "drain", drain)


def run_async(test: Callable[..., Any], *args: Any) -> Callable[[], object]:
    return partial(anyio.run, test, *args)


def a_restored_prompt_is_cut_from_where_it_starts(patch: pytest.MonkeyPatch) -> None:
    def cut(self: PrefillPlanner, sequence: Sequence, start: int) -> int:
        return min(start + self._size, len(sequence.prompt))

    patch.setattr(PrefillPlanner, "_cut", cut)


def a_branch_point_is_rounded_up(patch: pytest.MonkeyPatch) -> None:
    common = PrefixCache.common
    patch.setattr(PrefixCache, "common", lambda self, *args: common(self, *args) + 15)


def a_boundary_is_used_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    def add(self: PrefixCache, **entry: Any) -> Any:
        return add_well(self, **{**entry, "ready": True})

    def saves(self: PrefillPlanner, sequence: Sequence, *args: Any) -> int | None:
        boundary = save_well(self, sequence, *args)
        self._let_go(sequence)
        return boundary

    add_well, save_well = PrefixCache.add, PrefillPlanner._save
    patch.setattr(PrefixCache, "add", add)
    patch.setattr(PrefillPlanner, "_save", saves)


def what_a_broken_row_left_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "distrust", lambda self, row, origin: None)


def a_session_pins_nothing(patch: pytest.MonkeyPatch) -> None:
    def places(entry: Entry) -> list[tuple[Account, Yield]]:
        return [(account, Yield.LOOSE) for account in entry.holders]

    patch.setattr(Entry, "standing", property(lambda self: Yield.LOOSE))
    patch.setattr("scheduler.shelves._places", places)


def pins_never_yield(patch: pytest.MonkeyPatch) -> None:
    make_room = PrefixCache.can_make_room

    def stubborn(self: PrefixCache, pages: int, **others: Any) -> bool:
        return make_room(self, pages, **{**others, "most": Yield.LOOSE})

    patch.setattr(PrefixCache, "can_make_room", stubborn)


def samples_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "waits", lambda self, sequence: False)


def the_match_is_never_given_up(patch: pytest.MonkeyPatch) -> None:
    make_room = PrefixCache.make_room

    def faithful(self: PrefixCache, pages: int, **others: Any) -> bool:
        return bool(others.get("spare") or not len(self)) and make_room(self, pages, **others)

    patch.setattr(PrefixCache, "make_room", faithful)


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


the = test_preemption


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


PLANTED: list[tuple[Patch, Callable[[], object]]] = [
    (the_most_senior_row_leaves_first, the.test_of_several_juniors_the_most_junior_leaves),
    (the_class_does_not_count, partial(the.test_the_lowest_class_goes_first_then_the_youngest, 2)),
    (who_reads_does_not_count, the.test_of_a_class_a_row_that_nobody_reads_goes_first),
    (a_resumed_row_is_the_youngest, the.test_a_resumed_row_is_as_old_as_it_was),
    (the_output_counts_as_prompt, partial(the.test_what_a_resumed_row_is_told, kept=True)),
    (the_minimum_starts_anew, partial(the.test_what_a_resumed_row_is_told, kept=False)),
    (nothing_of_it_is_kept, partial(the.test_what_a_resumed_row_is_told, kept=True)),
    (it_comes_back_behind_others, the.test_preempted_requests_come_back_in_their_order),
    (it_comes_back_unread, the.test_a_row_that_nobody_reads_does_not_come_back),
    (no_margin_is_left, the.test_rows_start_only_beside_a_margin),
    (rows_are_preempted_before_prefixes_go, the.test_kept_prefixes_go_before_any_row),
    (a_turn_is_over_when_it_is_preempted, the.test_a_session_keeps_what_its_preempted_turn_left),
    (what_it_left_is_not_its_sessions, the.test_a_session_keeps_what_its_preempted_turn_left),
    (it_started_when_it_resumed, the.test_what_is_counted_goes_on),
    (it_is_displaced_for_ever, partial(the.test_a_request_is_displaced_so_often_and_no_more, 1)),
    (rows_are_displaced_in_vain, the.test_nobody_is_displaced_in_vain),
    (nobody_is_displaced, partial(the.test_a_higher_class_takes_a_row, 2)),
    (
        a_displaced_row_waits_for_the_next_plan,
        the.test_a_row_that_nobody_reads_is_displaced_when_nothing_else_happens,
    ),
    (time_of_first_calls_counts, test_depth.test_the_first_call_of_a_shape_is_not_measured),
    (depth_0_is_no_candidate, partial(test_depth.test_speculation_that_loses_is_off, 1)),
    (acceptance_never_fades, partial(test_depth.test_follows_acceptance_down_and_up_again, 16)),
    (costs_are_never_measured_again, test_depth.test_follows_a_change_of_cost),
    (speculation_off_is_sticky, partial(test_depth.test_follows_acceptance_down_and_up_again, 1)),
    (the_loop_polls, run_async(test_loop.check_idle, "plain")),
    (
        a_reader_that_leaves_is_not_noticed,
        run_async(test_loop.test_a_reader_that_is_cancelled_cancels_its_request),
    ),
    (the_engine_moves_between_threads, run_async(test_loop.test_the_engine_lives_on_one_thread)),
    (
        a_dead_engine_is_only_noted,
        run_async(test_loop.test_a_dead_engine_ends_every_stream, "plain"),
    ),
    (drain_cuts_off, run_async(test_loop.test_drain_finishes_what_runs, "plain")),
    (
        a_restored_prompt_is_cut_from_where_it_starts,
        partial(test_prefix.test_the_next_turn_prefills_only_what_is_new, 1),
    ),
    (a_branch_point_is_rounded_up, test_prefix.test_the_branch_point_is_kept_the_second_time),
    (
        a_boundary_is_used_before_it_is_there,
        test_prefix.test_a_boundary_that_failed_is_used_by_nobody,
    ),
    (what_a_broken_row_left_is_used, test_prefix.test_a_fault_leaves_nothing),
    (a_session_pins_nothing, test_sessions.test_a_pin_outlives_ordinary_eviction),
    (
        pins_never_yield,
        test_sessions.test_pins_yield_to_a_request_that_could_not_start_otherwise,
    ),
    (the_budget_is_ignored, test_pace.check_gap),
    (the_share_is_ignored, test_pace.check_share),
    (the_share_is_a_gift, test_pace.check_share),
    (
        prompts_are_not_cut_where_they_are_saved,
        partial(test_pace.check_cuts, [150, 90, 150], 64, 0.12, 0.2, 3, 0),
    ),
    (
        pieces_are_of_any_length,
        partial(test_pace.check_cuts, [150, 90, 150], 64, 0.12, 0.2, 3, 0),
    ),
    (first_steps_are_learned, test_pace.check_first_steps),
    (
        cycles_are_never_measured_beside_prompts,
        test_pace.test_cycles_are_measured_now_and_then,
    ),
    (the_oldest_prompt_is_owed_nothing, test_pace.check_book),
    (prompts_go_one_after_the_other, test_pace.check_short_prompts),
    (the_longest_goes_first, test_pace.test_the_shorter_book_goes_first),
    (classes_are_ignored, test_pace.test_a_higher_class_goes_first),
    (samples_do_not_wait, partial(test_prefix.test_parallel_samples_prefill_once, 1)),
    (
        the_match_is_never_given_up,
        test_prefix.test_the_whole_pool_can_be_had_although_a_match_needs_one_page_more,
    ),
]


@pytest.mark.parametrize(("patch", "check"), PLANTED, ids=[patch.__name__ for patch, _ in PLANTED])
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, IntegrityError)):
        check()
