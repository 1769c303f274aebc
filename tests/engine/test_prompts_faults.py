"""What goes wrong in a shared pass: one row's failure stays its own, planted faults are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import prefill as prefill_module
from engine.blocks import Block, block_of
from engine.cache import PagePool, RecurrentState, RecurrentTrail
from engine.models import delta
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import PrefillChunk
from engine.prefill import Prefill, PrefillRow
from engine.preflight import Preflight
from engine.runner import MLXEngine
from tests.engine.host import Host, bits, sampled
from tests.engine.small import engine_over, small_model
from tests.engine.test_preflight import ESTIMATOR
from tests.engine.together import (
    DEPTH,
    Found,
    Job,
    Trues,
    check,
    count_passes,
    jobs,
    prefill,
    run,
    text,
)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


@pytest.fixture(scope="module")
def true(model: Qwen35Model) -> Trues:
    return Trues(model)


@pytest.fixture(autouse=True)
def one_pass_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the padding: the more ragged the better."""
    monkeypatch.setattr(prefill_module, "SPARE_PLACES", 10**6)


# --- one row fails --------------------------------------------------------------------------------


def run_with_fault(model: Qwen35Model, patch: pytest.MonkeyPatch, unlucky: int) -> Found:
    """Row `unlucky` cannot be built, half-way through its pass, after the trunk and the MTP layer
    have written."""
    counted = Prefill._counted

    def broken(self: Prefill, row: PrefillRow, chunk: PrefillChunk) -> Any:
        if chunk.row == unlucky:
            raise ValueError("injected")
        return counted(self, row, chunk)

    patch.setattr(Prefill, "_counted", broken)
    host = Host(engine_over(model, boundaries=8, pages=200))
    (first, _) = jobs(4, 6)
    host.start(90, text(9, 90), sampled(30, 90))
    prefill(host, first, together=True)
    assert host.results[unlucky].fault == "building its step failed: ValueError: injected"
    assert host.results[unlucky].tokens == []
    rows = [job.row for job in first if job.row != unlucky]
    host.finish(90, *rows, depth=DEPTH)
    found: Found = {}
    for row in rows:
        result, own = host.results[row], bits(host, row)
        if not next(job for job in first if job.row == row).spec.speculative:
            own = replace(own, mtp=own.mtp[:, :0])
        found[row] = (own, result.logprobs, result.prompt_logprobs, result.fault)
    return found


@pytest.mark.parametrize("unlucky", [1, 4, 6])
def test_a_row_that_cannot_be_built_leaves_the_others_their_bits(
    model: Qwen35Model, true: Trues, monkeypatch: pytest.MonkeyPatch, unlucky: int
) -> None:
    right = true(4)
    found = run_with_fault(model, monkeypatch, unlucky)
    assert len(found) == 5
    check(found, {row: right[row] for row in found})


def test_rows_share_a_pass_as_far_as_there_is_room(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass asks for its padding too; where that does not fit, its rows ask one by one."""
    round_ = [Job(1, text(20, 1), sampled(2, 1)), Job(2, text(2, 2), sampled(2, 2))]
    need = [20 * (100 + 8 * 3) + 30, 2 * (100 + 8) + 10]  # see `test_preflight.COSTS`
    whole = 40 * (100 + 8 * 3) + 60
    for room, passes, faults in (
        (whole, [2], [False, False]),
        (whole - 1, [1, 1], [False, False]),
        (sum(need), [1, 1], [False, False]),
        (sum(need) - 1, [1], [False, True]),
    ):
        seen = count_passes(monkeypatch)
        watch = Preflight(estimator=ESTIMATOR, limit=room, in_use=lambda: 0, clear=lambda: None)
        host = Host(engine_over(model, preflight=watch))
        prefill(host, round_, together=True)
        assert seen == passes
        assert [host.results[row].fault is not None for row in (1, 2)] == faults


def test_broken_numbers_of_one_row_stay_its_own(model: Qwen35Model, true: Trues) -> None:
    """One row's boundary is NaN; it faults, and the rows in its pass keep their bits."""
    host = Host(engine_over(model, boundaries=8, pages=200))
    first, _ = jobs(4, 6)
    host.start(90, text(9, 90), sampled(3, 90), saves={9: 7})
    point = host.engine._boundaries[7]
    broken = tuple(RecurrentState(s.conv, s.memory * mx.nan) for s in point.states)
    host.engine._boundaries.add(7, replace(point, states=broken))
    bad = Job(91, [*text(9, 90), 4, 5], sampled(3, 91), restore=7)
    prefill(host, [*first[:3], bad, *first[3:]], together=True)
    assert host.results[91].fault is not None
    rows = [job.row for job in first]
    host.finish(*rows, depth=DEPTH)
    for job in first:
        if job.spec.speculative:
            assert bits(host, job.row).same(true(4)[job.row][0])


# --- mutations ------------------------------------------------------------------------------------


def _conv_tail_at_the_padded_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_module, "keep_all", lambda trail, block: delta.keep_all(trail))


def _pads_in_the_recurrence(patch: pytest.MonkeyPatch) -> None:
    def careless(sizes: Sequence[int], *, batch: int, width: int) -> Block:
        block = block_of(sizes, batch=batch, width=width)
        if block.ragged is None:
            return block
        alive = mx.ones_like(block.ragged.alive)
        return replace(block, ragged=replace(block.ragged, alive=alive))

    patch.setattr(prefill_module, "block_of", careless)


def _the_neighbours_state(patch: pytest.MonkeyPatch) -> None:
    own = prefill_module._own

    def leaking(state: RecurrentState, index: int) -> RecurrentState:
        other = own(state, max(0, index - 1))
        return RecurrentState(own(state, index).conv, other.memory)

    patch.setattr(prefill_module, "_own", leaking)


def _next(x: mx.array) -> mx.array:
    """Every row in the place of another."""
    return mx.concatenate([x[1:], x[:1]], axis=0)


def _the_neighbours_conv_tail(patch: pytest.MonkeyPatch) -> None:
    def rolled(trail: RecurrentTrail, block: Block) -> RecurrentState:
        kept = delta.keep_all(trail, block)
        return RecurrentState(_next(kept.conv), kept.memory)

    patch.setattr(prefill_module, "keep_all", rolled)


def _slots_by_anothers_table(patch: pytest.MonkeyPatch) -> None:
    write: Callable[..., None] = Prefill._write_slots

    def mixed_up(self: Prefill, *parts: Any) -> None:
        write(self, *parts[:-1], _next(parts[-1]))

    patch.setattr(Prefill, "_write_slots", mixed_up)


def _slots_under_the_neighbours_hidden(patch: pytest.MonkeyPatch) -> None:
    """A chunk's first token after the last token of the chunk that lies before it."""

    def flat(rows: Sequence[PrefillRow], hidden: mx.array, first: object) -> mx.array:
        return mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)

    patch.setattr(prefill_module, "_before", flat)


def _counts_in_another_order(patch: pytest.MonkeyPatch) -> None:
    counts = prefill_module._counts
    patch.setattr(prefill_module, "_counts", lambda rows, vocab: counts(rows[::-1], vocab))


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _conv_tail_at_the_padded_end,
    _pads_in_the_recurrence,
    _the_neighbours_state,
    _the_neighbours_conv_tail,
    _slots_by_anothers_table,
    _slots_under_the_neighbours_hidden,
    _counts_in_another_order,
]


def _check_both(model: Qwen35Model, right: list[Found]) -> None:
    for seed, found in zip((2, 3), right, strict=True):
        check(run(model, seed, together=True)[0], found)


@pytest.mark.parametrize("fault", MUTATIONS)
def test_planted_faults_are_seen(
    model: Qwen35Model,
    true: Trues,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    right = [true(seed) for seed in (2, 3)]
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        _check_both(model, right)


def test_writes_of_a_pass_that_are_not_taken_back_are_seen(
    model: Qwen35Model, true: Trues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the row that failed, on pages that a neighbour has by then."""
    host = Host(engine_over(model, boundaries=8, pages=200))
    assert isinstance(host.engine, MLXEngine)
    before = [np.array(pool.keys) for pool in host.engine._pools]
    for restored in (True, False):
        with monkeypatch.context() as patch:
            if not restored:
                patch.setattr(PagePool, "restore", lambda self, handles: None)
            row = 1 + 2 * restored
            unlucky = [Job(row + i, text(5, i), sampled(2, i)) for i in range(2)]
            patch.setattr(Prefill, "finish", _always_broken)
            prefill(host, unlucky, together=True)
        after = [np.array(pool.keys) for pool in host.engine._pools]
        assert all(map(np.array_equal, before, after)) == restored


def _always_broken(*_: object) -> None:
    raise ValueError("injected")
