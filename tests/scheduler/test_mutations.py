"""For each guarantee one planted fault, and proof that the checks see it.

A mutation replaces one function of the core. `fuzz` then runs random requests with all checks of
`Bench`, `FakeEngine` and `integrity()`; with a fault planted, one of them must raise.
"""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.cohorts import CohortPlanner, Cohorts
from scheduler.core import SchedulerCore
from scheduler.delivery import Delivery
from scheduler.door import Door
from scheduler.pages import PagePool, PageTables
from scheduler.prefill import PrefillPlanner
from scheduler.prefix import PrefixCache
from scheduler.reaper import Reaper
from scheduler.registry import Registry
from scheduler.request import Finished, FinishReason, Tokens
from scheduler.sequence import Sequence
from tests.scheduler.mutations import Mutations, check_seen_at_random, fuzz_tiny_pools, fuzz_wide

MUTATIONS = Mutations()


@MUTATIONS.plant
def a_page_is_not_freed(patch: pytest.MonkeyPatch) -> None:
    def free(self: PagePool, owner: int) -> None:
        self._owned[owner] = self._owned[owner][1:]
        free_well(self, owner)

    free_well = PagePool.free
    patch.setattr(PagePool, "free", free)


@MUTATIONS.plant
def a_page_is_handed_out_twice(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: PagePool, owner: int, count: int) -> list[int]:
        pages = allocate_well(self, owner, count)
        if pages and owner % 5 == 0:
            self._free.append(pages[-1])
        return pages

    allocate_well = PagePool.allocate
    patch.setattr(PagePool, "allocate", allocate)


@MUTATIONS.plant
def rows_start_without_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "can_make_room", lambda self, pages, **others: True)


@MUTATIONS.plant
def the_null_page_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    def init(self: PagePool, *, pages: int) -> None:
        init_well(self, pages=pages)
        self._free[0] = 0

    init_well = PagePool.__init__
    patch.setattr(PagePool, "__init__", init)


@MUTATIONS.plant
def tables_are_one_position_short(patch: pytest.MonkeyPatch) -> None:
    reach = Sequence.reach
    patch.setattr(Sequence, "reach", lambda self, depth: reach(self, depth) - 1)


@MUTATIONS.plant
def growth_in_flight_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def reach(self: Sequence, depth: int) -> int:
        return min(len(self.prompt) + self.emitted + depth + 1, self.longest)

    patch.setattr(Sequence, "reach", reach)


@MUTATIONS.plant
def growth_is_not_bounded_by_max_tokens(patch: pytest.MonkeyPatch) -> None:
    def reach(self: Sequence, depth: int) -> int:
        return len(self.prompt) + self.emitted + self.ceiling + depth + 1

    patch.setattr(Sequence, "reach", reach)


@MUTATIONS.plant
def a_cancelled_row_is_kept(patch: pytest.MonkeyPatch) -> None:
    def reap(self: Reaper, now: float) -> Any:
        kept = {r: s for r, s in self._rows.items() if s.cause is FinishReason.CANCELLED}
        for row in kept:
            del self._rows[row]
        reaped = reap_well(self, now)
        self._rows.update(kept)
        return reaped

    reap_well = Reaper.reap
    patch.setattr(Reaper, "reap", reap)


@MUTATIONS.plant
def a_cancelled_row_goes_on(patch: pytest.MonkeyPatch) -> None:
    def end(self: Registry, s: Sequence, reason: FinishReason, now: float, why: str) -> None:
        end_well(self, s, reason, now, why)
        if reason is FinishReason.CANCELLED and s.started:
            s.cause = None

    end_well = Registry.end
    patch.setattr(Registry, "end", end)


@MUTATIONS.plant
def a_finished_row_is_freed_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def reap(self: Reaper, now: float) -> Any:
        ended = [row for row, s in self._rows.items() if s.cause is not None]
        for row in ended:
            self._memory.free(self._rows.pop(row))
        return (), tuple(ended)

    patch.setattr(Reaper, "reap", reap)


@MUTATIONS.plant
def the_engine_is_not_told_to_release(patch: pytest.MonkeyPatch) -> None:
    reap_well = Reaper.reap
    patch.setattr(Reaper, "reap", lambda self, now: (reap_well(self, now)[0], ()))


@MUTATIONS.plant
def a_slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PageTables, slot: int) -> None:
        self._tables[slot] = 0
        self._lengths[slot] = 0

    patch.setattr(PageTables, "give_back", give_back)


@MUTATIONS.plant
def a_table_is_not_cleared(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PageTables, slot: int) -> None:
        self._lengths[slot] = 0
        self._free.append(slot)

    patch.setattr(PageTables, "give_back", give_back)


@MUTATIONS.plant
def row_ids_are_reused(patch: pytest.MonkeyPatch) -> None:
    def start(self: PrefillPlanner, *args: Any) -> None:
        self._next_row = min(set(range(1, 99)) - set(self._rows))
        start_well(self, *args)

    start_well = PrefillPlanner._start
    patch.setattr(PrefillPlanner, "_start", start)


@MUTATIONS.plant
def a_row_decodes_before_its_prompt_is_complete(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        cursor, self.cursor = self.cursor, len(self.prompt)
        result = bool(can_decode(self))
        self.cursor = cursor
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@MUTATIONS.plant
def chunks_overlap(patch: pytest.MonkeyPatch) -> None:
    def chunk(self: PrefillPlanner, sequence: Sequence, ticket: Any, end: int) -> None:
        chunk_well(self, sequence, ticket, end)
        if sequence.prefilling:
            sequence.cursor -= 1

    chunk_well = PrefillPlanner._chunk
    patch.setattr(PrefillPlanner, "_chunk", chunk)


@MUTATIONS.plant
def prefill_holds_up_decode(patch: pytest.MonkeyPatch) -> None:
    def plan(self: CohortPlanner, rows: Any, cohort: Any, *, alone: bool) -> Any:
        return plan_well(self, rows, cohort, alone=alone) if alone else None

    plan_well = CohortPlanner.plan
    patch.setattr(CohortPlanner, "plan", plan)


@MUTATIONS.plant
def results_do_not_settle_what_was_in_flight(patch: pytest.MonkeyPatch) -> None:
    def commit(self: SchedulerCore, result: Any, now: float) -> Any:
        before = [(s, s.ceiling) for s in self._rows.values()]
        events = commit_well(self, result, now)
        for sequence, ceiling in before:
            sequence.ceiling = ceiling
        return events

    commit_well = SchedulerCore.commit
    patch.setattr(SchedulerCore, "commit", commit)


@MUTATIONS.plant
def tokens_after_the_end_are_delivered(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.cause is not None and row is not None and row.tokens:
            late = Tokens(ids=row.tokens, drafted=0, accepted=0, at=0.0)
            self._outbox.append((s.request_id, late))
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@MUTATIONS.plant
def a_later_cause_replaces_the_first(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        if s.cause is not None and row is not None and row.finish is not None:
            finished = Finished(reason=FinishReason.STOP, usage=s.usage(now))
            self._outbox.append((s.request_id, finished))
        return apply_well(self, s, row, most, now)

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@MUTATIONS.plant
def a_full_stream_is_not_paused(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def deaf(self: Sequence) -> bool:
        self.paused_at = None
        return bool(can_decode(self))

    patch.setattr(Sequence, "can_decode", property(deaf))


@MUTATIONS.plant
def a_slow_reader_pauses_everybody(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Cohorts, served: Any) -> Any:
        paused = any(s.paused_at is not None for s in self.rows.values())
        return ([], []) if paused else ready_well(self, served)

    ready_well = Cohorts.ready
    patch.setattr(Cohorts, "ready", ready)


@MUTATIONS.plant
def deadlines_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerCore, "_expire", lambda self, now: None)


@MUTATIONS.plant
def the_queue_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "refusal", lambda self, requests, prompt_tokens, now: None)


@MUTATIONS.plant
def a_depth_cap_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def take(self: Registry, request: Any, prompt: Any, now: float) -> None:
        take_well(self, request, prompt, now)
        self._live[request.request_id].depth_cap = self._max_depth

    take_well = Registry._take
    patch.setattr(Registry, "_take", take)


@MUTATIONS.plant
def an_ended_request_stays_registered(patch: pytest.MonkeyPatch) -> None:
    def end(self: Registry, s: Sequence, reason: FinishReason, now: float, why: str) -> None:
        end_well(self, s, reason, now, why)
        self._live[s.request_id] = s

    end_well = Registry.end
    patch.setattr(Registry, "end", end)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seen_at_random(MUTATIONS[name], fuzz_wide, monkeypatch)


def test_without_a_mutation_nothing_is_seen() -> None:
    fuzz_wide()
    fuzz_tiny_pools()
