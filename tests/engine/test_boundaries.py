"""Reuse changes nothing: rows that start from a boundary get the bits of rows that start at 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from engine import cycle as cycle_module
from engine.boundary import Boundary, BoundaryStore
from engine.cache import PagePool, RecurrentState
from engine.cycle import DecodeCycle
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import PrefillChunk, RowResult, RowSpec
from engine.prefill import Passed, Prefill, PrefillRow
from engine.runner import MLXEngine
from engine.step import Step
from tests.engine.host import Bits, Host, bits, sampled
from tests.engine.small import OracleCycle, engine_over, greedy, small_model

TOKENS = 9
LIMIT = 12


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def text(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 96, length)]


def alone(model: Qwen35Model, prompt: list[int], spec: RowSpec, depth: int) -> Bits:
    """The row by itself, from its first token, in an engine that has seen nothing else."""
    host = Host(engine_over(model, boundaries=1))
    host.start(1, prompt, spec)
    host.finish(1, depth=depth)
    return bits(host, 1)


def new_host(model: Qwen35Model) -> Host:
    return Host(engine_over(model, boundaries=LIMIT, pages=60))


def check_saved_prefix(model: Qwen35Model, split: int, depth: int, seed: int = 0) -> None:
    """An owner saves at `split` while it is prefilled and decodes on; two borrowers start there,
    one beside it, one beside the other borrower; a third when the owner is gone and its pages are
    another's."""
    head, tails = text(split, seed), [text(n, seed + n) for n in (5, 1, 11, 3)]
    specs = [sampled(TOKENS, seed + i) for i in range(4)]
    host = new_host(model)
    host.start(1, head + tails[0], specs[0], saves={split: 1}, chunk=7)
    host.decode(1, depth=depth)
    host.start(2, head + tails[1], specs[1], restore=1)
    host.decode(1, 2, depth=depth)
    host.start(3, head + tails[2], specs[2], restore=1, chunk=4)
    for _ in range(TOKENS):
        host.decode(3, 1, 2, depth=depth)
    found = {row: bits(host, row) for row in (1, 2, 3)}
    for row in (1, 2, 3):
        host.release(row)
    host.start(5, text(30, 99), sampled(TOKENS, 99))  # takes over the freed pages
    host.start(4, head + tails[3], specs[3], restore=1)
    host.drop(1)
    host.finish(4, 5, depth=depth)
    found[4] = bits(host, 4)
    for row in (1, 2, 3, 4):
        true = alone(model, head + tails[row - 1], specs[row - 1], depth)
        assert found[row].same(true), f"row {row}"


@pytest.mark.parametrize(("split", "depth"), [(8, 0), (16, 1), (13, 2), (1, 3), (23, 4), (7, 0)])
def test_a_prefix_saved_in_prefill_is_reused_bit_for_bit(
    model: Qwen35Model, split: int, depth: int
) -> None:
    check_saved_prefix(model, split, depth, seed=split)


def check_turns(model: Qwen35Model, depth: int, wasted: int = 0, seed: int = 0) -> None:
    """Three turns, each from the end of the one before, beside a neighbour that keeps decoding;
    before a turn's end is kept, its row sits through `wasted` cycles after its last token."""
    host = new_host(model)
    neighbour = sampled(60, 1234)
    host.start(100, text(6, 55), neighbour)
    prompt, restore = text(10 + seed, seed), None
    for turn in range(3):
        row, spec = turn + 1, sampled(TOKENS + turn, seed + turn)
        host.start(row, prompt, spec, restore=restore)
        while not host.results[row].ended:
            host.decode(row, 100, depth=depth)
        for _ in range(wasted):
            host.decode(100, row, depth=depth, even_finished=True)
        found = bits(host, row)
        host.keep(row, turn + 1)
        assert found.same(alone(model, prompt, spec, depth)), f"turn {turn}"
        if restore is not None:
            host.drop(restore)
        prompt, restore = host.tokens[row] + text(turn + 1, 70 + turn), turn + 1
    host.finish(100, depth=depth)
    assert bits(host, 100).same(alone(model, text(6, 55), neighbour, depth))


@pytest.mark.parametrize("depth", range(5))
def test_the_end_of_a_turn_is_reused_bit_for_bit(model: Qwen35Model, depth: int) -> None:
    check_turns(model, depth, seed=depth)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_turn_kept_after_wasted_cycles_is_the_same(model: Qwen35Model, depth: int) -> None:
    check_turns(model, depth, wasted=2, seed=depth)


def check_pipelined_end(model: Qwen35Model, depth: int) -> None:
    """The row ends in a step behind which another one with it is queued already."""
    prompt, spec = text(9, 21), sampled(6, 21)
    host = new_host(model)
    host.start(1, prompt, spec)
    host.start(2, text(5, 22), sampled(40, 22))
    host.submit_decode(1, 2, depth=depth)
    while not host.results[1].ended:
        host.submit_decode(2, 1, depth=depth)
        host.collect()
    assert len(host.engine._flight) == 1
    host.collect()
    host.keep(1, 1)
    again, other = [*host.tokens[1], 3], sampled(5, 23)
    host.start(3, again, other, restore=1)
    host.finish(3, depth=depth)
    assert bits(host, 3).same(alone(model, again, other, depth))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_turn_that_ends_with_a_step_behind_it_is_the_same(model: Qwen35Model, depth: int) -> None:
    check_pipelined_end(model, depth)


@pytest.mark.parametrize("depth", [0, 3])
def test_an_end_taken_too_late_is_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    _end_taken_too_late(monkeypatch)
    with pytest.raises(AssertionError):
        check_pipelined_end(model, depth)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_row_kept_in_the_middle_goes_on_as_if_nothing_happened(
    model: Qwen35Model, depth: int
) -> None:
    """Owner and borrower continue from one point into their own parts of one page."""
    prompt, spec = text(11, 3), sampled(14, 3)
    host = new_host(model)
    host.start(1, prompt, spec)
    host.start(9, text(4, 8), sampled(14, 8))
    while len(host.results[1].tokens) < 5:
        host.decode(1, 9, depth=depth)
    host.keep(1, 1, release=False)
    point = host.points[1].tokens
    host.start(2, [*point, 5, 6], sampled(8, 4), restore=1)
    host.finish(9, 1, 2, depth=depth)
    assert bits(host, 1).same(alone(model, prompt, spec, depth))
    assert bits(host, 2).same(alone(model, [*point, 5, 6], sampled(8, 4), depth))
    host.start(3, [*point, 7], sampled(8, 5), restore=1)
    host.finish(3, depth=depth)
    assert bits(host, 3).same(alone(model, [*point, 7], sampled(8, 5), depth))


@pytest.mark.parametrize("depth", [1, 4])
def test_accepted_drafts_change_nothing_after_a_restore(model: Qwen35Model, depth: int) -> None:
    """With drafts that are mostly right, bursts are long and ends fall inside them."""
    prompt, host = text(12, 1), new_host(model)
    whole = Host(engine_over(model))
    whole.start(1, prompt, greedy(40))
    whole.finish(1, depth=0)
    OracleCycle.install(host.engine, {0: whole.tokens[1]}, spoil=0.25, seed=depth)
    restore = None
    for turn in range(1, 5):
        given = whole.tokens[1][: 12 + 7 * (turn - 1)]
        host.start(turn, given, greedy(7), restore=restore)
        host.finish(turn, depth=depth)
        assert host.tokens[turn] == whole.tokens[1][: len(given) + 7]
        logits = np.concatenate([t.logits for t in host.engine.traces if t.row == turn])
        true = np.concatenate([t.logits for t in whole.engine.traces])
        assert np.array_equal(logits, true[7 * (turn - 1) :][:7])
        host.keep(turn, turn)
        restore = turn
    assert sum(sum(r.accepted) for r in host.results.values()) > 6


# --- mutations -----------------------------------------------------------------------------------


def _states_shared_and_mutated(patch: pytest.MonkeyPatch) -> None:
    """Another row's state comes back: the restored row writes into the boundary's own arrays."""
    chunks = Prefill.chunks

    def writing(
        self: Prefill, rows: Sequence[PrefillRow], pieces: Sequence[PrefillChunk]
    ) -> Passed:
        passed = chunks(self, rows, pieces)
        for row, after in zip(rows, passed.rows, strict=True):
            for old, new in zip(row.states, after.states, strict=True):
                old.memory[...] = new.memory
                old.conv[...] = new.conv
        return passed

    patch.setattr(Prefill, "chunks", writing)


def _no_page_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "copy", lambda self, source, target: [])


def _restored_with(change: Callable[[Boundary], Boundary], patch: pytest.MonkeyPatch) -> None:
    get = BoundaryStore.__getitem__
    patch.setattr(BoundaryStore, "__getitem__", lambda self, key: change(get(self, key)))


def _no_conv_tail(patch: pytest.MonkeyPatch) -> None:
    def change(b: Boundary) -> Boundary:
        states = tuple(RecurrentState(mx.zeros_like(s.conv), s.memory) for s in b.states)
        return Boundary(position=b.position, states=states, carry=b.carry, mtp=b.mtp)

    _restored_with(change, patch)


def _no_memory(patch: pytest.MonkeyPatch) -> None:
    def change(b: Boundary) -> Boundary:
        states = tuple(RecurrentState(s.conv, mx.zeros_like(s.memory)) for s in b.states)
        return Boundary(position=b.position, states=states, carry=b.carry, mtp=b.mtp)

    _restored_with(change, patch)


def _no_carry(patch: pytest.MonkeyPatch) -> None:
    def change(b: Boundary) -> Boundary:
        carry = mx.zeros_like(b.carry)
        return Boundary(position=b.position, states=b.states, carry=carry, mtp=b.mtp)

    _restored_with(change, patch)


@pytest.mark.parametrize(
    "fault", [_states_shared_and_mutated, _no_page_copy, _no_conv_tail, _no_memory, _no_carry]
)
def test_planted_faults_of_a_restore_are_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_saved_prefix(model, 13, 2)


def _slots_at_their_own_position(patch: pytest.MonkeyPatch) -> None:
    """Slot p at page position p: a borrower writes below its boundary, into a shared page."""
    from engine import prefill as prefill_module
    from engine.cache import Window, window

    def unshifted(start: mx.array, width: int, table: mx.array, page_size: int) -> Window:
        return window(start, width, table, page_size)

    patch.setattr(prefill_module, "slot_window", unshifted)
    patch.setattr(cycle_module, "slot_window", unshifted)


def test_a_write_into_a_shared_page_is_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borrower's first slot would overwrite the owner's, which belongs to other tokens."""
    pages: dict[bool, bool] = {}
    for broken in (False, True):
        with monkeypatch.context() as patch:
            if broken:
                _slots_at_their_own_position(patch)
            host = new_host(model)
            prompt = text(16, 2)
            host.start(1, [*prompt, 1, 2, 3], greedy(4), saves={16: 1})
            shared = mx.array(host.points[1].pages)
            before = [np.array(p.keys[shared]) for p in host.engine._pools]
            host.start(2, [*prompt, 90], greedy(4), restore=1)
            host.finish(2, 1, depth=2)
            after = [np.array(p.keys[shared]) for p in host.engine._pools]
            pages[broken] = all(map(np.array_equal, before, after))
    assert pages == {False: True, True: False}


def _pending_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeCycle, "settled", lambda self, rows, table: rows)


def ends_not_remembered(patch: pytest.MonkeyPatch) -> None:
    """A row is kept as the last cycle left it, whether it emitted something or not."""
    remember = MLXEngine._remember

    def forgetting(self: MLXEngine, step: Step, rows: tuple[RowResult, ...]) -> None:
        remember(self, step, rows)
        self._books.ends.clear()

    patch.setattr(MLXEngine, "_remember", forgetting)


def _end_taken_too_late(patch: pytest.MonkeyPatch) -> None:
    """After the cycle that was under way when the row ended."""
    patch.setattr(MLXEngine, "_end_of", lambda self, row: self._books.free.one(row).take([0]))


@pytest.mark.parametrize(
    ("fault", "depth", "wasted"),
    [
        (ends_not_remembered, 0, 1),
        (ends_not_remembered, 2, 1),
        (_pending_left_out, 0, 0),
        (_pending_left_out, 3, 0),
    ],
)
def test_planted_faults_of_a_keep_are_seen(
    model: Qwen35Model,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    depth: int,
    wasted: int,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_turns(model, depth, wasted=wasted)
