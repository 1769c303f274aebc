"""Faults planted in what is kept and shared, each with what sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from engine.plan import KeepRow
from scheduler import prefix
from scheduler.delivery import Delivery
from scheduler.groups import Groups
from scheduler.memory import RowMemory
from scheduler.pages import PagePool
from scheduler.prefill import PrefillPlanner
from scheduler.prefix import Entry, PrefixCache, Yield
from scheduler.reaper import Reaper
from scheduler.sequence import Sequence
from scheduler.shares import Account
from tests.scheduler import test_prefix, test_sessions
from tests.scheduler.mutations import (
    Mutations,
    Patch,
    Planted,
    cases,
    check_seen_at_random,
    check_seen_by,
    fuzz_wide,
)

# --- prefixes -------------------------------------------------------------------------------------

MUTATIONS = Mutations()


@MUTATIONS.plant
def a_partly_filled_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    def start(self: RowMemory, sequence: Sequence, entry: Any) -> None:
        start_well(self, sequence, entry)

    start_well = RowMemory.start
    patch.setattr(RowMemory, "start", start)


@MUTATIONS.plant
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


@MUTATIONS.plant
def an_entry_drops_its_pages_twice(patch: pytest.MonkeyPatch) -> None:
    def drop(self: PagePool, pages: Any) -> None:
        drop_well(self, pages)
        again = pages[self._entries[pages] > 0]
        drop_well(self, again)

    drop_well = PagePool.drop
    patch.setattr(PagePool, "drop", drop)


@MUTATIONS.plant
def an_entry_frees_pages_that_rows_hold(patch: pytest.MonkeyPatch) -> None:
    def drop(self: PagePool, pages: Any) -> None:
        self._entries[pages] -= 1
        self._free += pages[self._entries[pages] == 0].tolist()

    patch.setattr(PagePool, "drop", drop)


@MUTATIONS.plant
def a_row_frees_pages_that_entries_hold(patch: pytest.MonkeyPatch) -> None:
    def free(self: PagePool, owner: int) -> None:
        held = [page for page in self._owned[owner] if self._entries[page]]
        free_well(self, owner)
        self._free += [page for page in held if not self._rows[page]]

    free_well = PagePool.free
    patch.setattr(PagePool, "free", free)


@MUTATIONS.plant
def tokens_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "_starts_with", lambda tokens, beginning: True)


@MUTATIONS.plant
def a_row_is_kept_while_a_step_names_it(patch: pytest.MonkeyPatch) -> None:
    def reap(self: Reaper, now: float) -> Any:
        keep, release = reap_well(self, now)
        for s in self._rows.values():
            if s.cause is not None and not s.spoiled:
                table = self._tables.table(s.slot)
                if entry := self._keeping.end(s, table, now):
                    keep += (KeepRow(row=s.row, boundary=entry.boundary, pages=table),)
        return keep, release

    reap_well = Reaper.reap
    patch.setattr(Reaper, "reap", reap)


@MUTATIONS.plant
def tokens_after_the_end_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Delivery, s: Sequence, row: Any, most: int, now: float) -> int:
        before = len(s.output) if s.cause is not None else None
        tokens = apply_well(self, s, row, most, now)
        if before is not None:
            del s.output[before:]
        return tokens

    apply_well = Delivery._apply
    patch.setattr(Delivery, "_apply", apply)


@MUTATIONS.plant
def a_guided_row_is_planned_while_a_step_names_it(patch: pytest.MonkeyPatch) -> None:
    can_decode = Sequence.__dict__["can_decode"].fget

    def eager(self: Sequence) -> bool:
        tickets, self.tickets = self.tickets, 0
        result = bool(can_decode(self))
        self.tickets = tickets
        return result

    patch.setattr(Sequence, "can_decode", property(eager))


@MUTATIONS.plant
def an_entry_in_use_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: PrefixCache, pages: int, **others: Any) -> bool:
        return room_well(self, pages, **{**others, "spare": None})

    room_well = PrefixCache.make_room
    patch.setattr(PrefixCache, "make_room", make_room)
    patch.setattr(PrefixCache, "use", lambda self, entry: None)


@MUTATIONS.plant
def history_that_a_row_needs_is_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match
    patch.setattr(
        PrefixCache,
        "match",
        lambda self, prompt, hashes, mtp: match(self, prompt, hashes, mtp=False),
    )


@MUTATIONS.plant
def the_engine_is_not_told_to_drop(patch: pytest.MonkeyPatch) -> None:
    def planned(self: PrefixCache) -> tuple[int, ...]:
        planned_well(self)
        return ()

    planned_well = PrefixCache.planned
    patch.setattr(PrefixCache, "planned", planned)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_checks_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_seen_at_random(MUTATIONS[name], fuzz_wide, monkeypatch)


# --- faults that need a test of their own to be seen ---------------------------------------------


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


PLANTED: Planted = [
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
    (samples_do_not_wait, partial(test_prefix.test_parallel_samples_prefill_once, 1)),
    (
        the_match_is_never_given_up,
        test_prefix.test_the_whole_pool_can_be_had_although_a_match_needs_one_page_more,
    ),
]


@pytest.mark.parametrize(("patch", "check"), cases(PLANTED))
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seen_by(check, patch, monkeypatch)
