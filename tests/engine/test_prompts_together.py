"""Chunks of one step share a pass; every row gets the bits it gets by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import blocks
from engine import prefill as prefill_module
from engine.blocks import Block, block_of, share_passes
from engine.cache import PagePool, RecurrentState, RecurrentTrail
from engine.models import delta
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import Logprobs, PrefillChunk, RowSpec, SamplingParams
from engine.prefill import Prefill, PrefillRow
from engine.preflight import Preflight
from engine.prompts import PromptBuilder
from engine.runner import MLXEngine
from tests.engine import slow
from tests.engine.host import Bits, Host, bits, sampled
from tests.engine.small import engine_over, small_model
from tests.engine.test_preflight import ESTIMATOR
from tests.engine.test_widths import Always

TOKENS = 7
DEPTH = 2
VOCAB = 96
LONGEST = 21


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def text(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, VOCAB, length)]


# --- how rows lie ---------------------------------------------------------------------------------


def test_a_ragged_block_is_filled_with_its_rows_own_tokens() -> None:
    block = block_of([2, 3, 1], batch=4, width=4)
    x = mx.arange(6)[:, None] + 10
    spread = block.spread(x)[..., 0].tolist()
    assert spread == [[10, 11, 11, 11], [12, 13, 14, 14], [15, 15, 15, 15], [15, 15, 15, 15]]
    assert mx.array_equal(block.flatten(block.spread(x), 6), x)
    assert block.flatten(block.spread(x), 8)[6:].tolist() == [[0], [0]]
    assert block.ragged is not None
    assert block.ragged.count.tolist() == [2, 3, 1, 0]
    assert block_of([3, 3], batch=2, width=3) == Block(2, 3)


@pytest.mark.parametrize("seed", range(40))
def test_passes_hold_every_chunk_once_and_keep_to_the_padding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 200, rng.integers(1, 12))]
    pages = [int(n) for n in rng.integers(1, 90, len(sizes))]
    passes = share_passes(sizes, pages, spare=0, spare_scores=0)
    assert sorted(place for places in passes for place in places) == list(range(len(sizes)))
    for places in passes:
        width, high = max(sizes[p] for p in places), max(pages[p] for p in places)
        assert all(width <= blocks.PADDING * sizes[p] for p in places)
        assert len(places) * width * high <= blocks.PADDING * sum(
            sizes[p] * pages[p] for p in places
        )
    together = share_passes(sizes, pages, spare=10**9, spare_scores=10**9)
    assert together == [list(range(len(sizes)))]


def test_equal_chunks_share_one_pass_and_a_long_one_has_its_own() -> None:
    assert share_passes([16] * 8, [2] * 8, spare=0, spare_scores=0) == [list(range(8))]
    mixed = share_passes([8, 200, 8, 1, 7], [2, 30, 2, 2, 2], spare=0, spare_scores=0)
    assert mixed == [[1], [0, 2, 4], [3]]
    assert share_passes([8, 200, 8, 1, 7], [2, 30, 2, 2, 2], spare=32, spare_scores=64) == [
        [1],
        [0, 2, 3, 4],
    ]


# --- every row its own bits -----------------------------------------------------------------------


@dataclass
class Job:
    """A row to prefill."""

    row: int
    prompt: list[int]
    spec: RowSpec
    saves: dict[int, int] = field(default_factory=dict)
    restore: int | None = None
    cuts: tuple[int, ...] = ()


def spec_of(row: int, kind: int) -> RowSpec:
    """One of everything."""
    plain = SamplingParams(temperature=3.0, seed=row)
    return (
        sampled(TOKENS, row),
        RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=TOKENS, logprobs=3),
        RowSpec(
            sampling=replace(plain, repetition_penalty=1.4, frequency_penalty=0.7),
            max_tokens=TOKENS,
            output_start=kind % 9,
        ),
        RowSpec(sampling=replace(plain, coupled=True, top_k=9), max_tokens=TOKENS),
        RowSpec(
            sampling=replace(plain, logit_bias=((5, 4.0),), top_p=0.9),
            max_tokens=TOKENS,
            min_tokens=3,
            stop_ids=(5, 6),
        ),
        sampled(TOKENS, row, speculative=False),
        sampled(1, row),
        sampled(TOKENS, row, constraint=slow.Pattern(VOCAB, 3, None, 7)),
    )[kind % 8]


def jobs(seed: int, rows: int) -> tuple[list[Job], list[Job]]:
    """Two rounds: fresh rows, two of which save a boundary, and rows of which some restore one."""
    rng = np.random.default_rng(seed)

    def cuts(start: int, length: int) -> tuple[int, ...]:
        return tuple(int(c) for c in rng.integers(start, length, 3) if rng.random() < 0.4)

    first, second = [], []
    for row in range(1, rows + 1):
        length = int(rng.integers(1, LONGEST))
        spec = spec_of(row, row + seed)
        if rng.random() < 0.3:
            spec = replace(spec, prompt_logprobs=int(rng.integers(0, 3)))
        if row <= 2:
            length = int(rng.integers(5, LONGEST))
            spec = sampled(TOKENS, row)
        saves = {int(rng.integers(1, length + 1)): row} if row <= 2 else {}
        first.append(Job(row, text(length, row), spec, saves, None, cuts(0, length)))
    for row in range(rows + 1, 2 * rows + 1):
        job = Job(row, text(int(rng.integers(1, LONGEST)), row), spec_of(row, row + seed))
        if row % 2:
            owner = first[int(rng.integers(2))]
            (point,) = owner.saves
            job.restore = owner.saves[point]
            job.prompt = owner.prompt[:point] + job.prompt
        job.cuts = cuts(len(job.prompt) // 2, len(job.prompt) + 1)
        second.append(job)
    return first, second


Found = dict[int, tuple[Bits, Logprobs | None, Logprobs | None, str | None]]


def prefill(host: Host, round_: Sequence[Job], *, together: bool) -> None:
    """One chunk of every row per step, or of one row."""
    pieces = [
        host.pieces(j.row, j.prompt, j.spec, saves=j.saves, restore=j.restore, cuts=j.cuts)
        for j in round_
    ]
    while any(pieces):
        step = [of_row.pop(0) for of_row in pieces if of_row]
        for part in [step] if together else [[piece] for piece in step]:
            host.prefill(*part)


def run(
    model: Qwen35Model, seed: int, *, together: bool, rows: int = 6, **options: Any
) -> tuple[Found, Host]:
    """Both rounds, decoded to their ends in one cohort."""
    host = Host(engine_over(model, boundaries=8, pages=200, **options))
    rounds = jobs(seed, rows)
    for round_ in rounds:
        prefill(host, round_, together=together)
    everybody = [job.row for round_ in rounds for job in round_]
    host.finish(*everybody, depth=DEPTH)
    found = {}
    for round_ in rounds:
        for job in round_:
            result = host.results[job.row]
            own = bits(host, job.row)
            if not job.spec.speculative:
                own = replace(own, mtp=own.mtp[:, :0])
            found[job.row] = (own, result.logprobs, result.prompt_logprobs, result.fault)
    return found, host


def check(found: Found, true: Found) -> None:
    assert found.keys() == true.keys()
    for row, (own, *rest) in found.items():
        assert own.same(true[row][0]), f"row {row}"
        assert tuple(rest) == true[row][1:], f"row {row}"


class Trues:
    """What each seed's rows are when their chunks run one by one."""

    def __init__(self, model: Qwen35Model) -> None:
        self.model = model
        self._known: dict[int, Found] = {}

    def __call__(self, seed: int) -> Found:
        if seed not in self._known:
            self._known[seed] = run(self.model, seed, together=False)[0]
        return self._known[seed]


@pytest.fixture(scope="module")
def true(model: Qwen35Model) -> Trues:
    return Trues(model)


@pytest.fixture(autouse=True)
def one_pass_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the padding: the more ragged the better."""
    monkeypatch.setattr(prefill_module, "SPARE_PLACES", 10**6)


@pytest.mark.parametrize("seed", range(8))
def test_ragged_rows_in_one_pass_have_the_bits_of_rows_alone(
    model: Qwen35Model, true: Trues, seed: int
) -> None:
    check(run(model, seed, together=True)[0], true(seed))


@pytest.mark.parametrize("seed", [0, 1])
def test_passes_in_buckets_change_no_bit(model: Qwen35Model, true: Trues, seed: int) -> None:
    check(run(model, seed, together=True, buckets=True)[0], true(seed))


def test_products_of_other_widths_change_no_bit(
    model: Qwen35Model, true: Trues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows past the last token, as `engine.widths` adds them, are nobody's in ragged blocks too."""
    right = true(1)
    monkeypatch.setattr(model, "widths", Always())
    check(run(model, 1, together=True)[0], right)


@pytest.mark.parametrize("spare", [0, 60])
def test_several_passes_change_no_bit(
    model: Qwen35Model, true: Trues, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setattr(prefill_module, "SPARE_PLACES", spare)
    check(run(model, 3, together=True)[0], true(3))


def test_without_an_mtp_head_it_is_the_same(model: Qwen35Model) -> None:
    logits = []
    for together in (False, True):
        host = Host(engine_over(model, boundaries=8, pages=200, max_depth=0))
        host.engine._prefill._mtp_pool = host.engine._cycle._mtp_pool = None
        for round_ in jobs(5, 6):
            prefill(host, round_, together=together)
        traces = sorted(host.engine.traces, key=lambda trace: trace.row)
        logits.append(np.concatenate([trace.logits for trace in traces]))
    assert np.array_equal(logits[0], logits[1])


def count_passes(patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass from now on."""
    seen: list[int] = []
    right = Prefill.chunks

    def counting(self: Prefill, rows: Any, chunks: Any) -> Any:
        seen.append(len(rows))
        return right(self, rows, chunks)

    patch.setattr(Prefill, "chunks", counting)
    return seen


def test_a_step_is_one_pass_but_not_where_rows_must_not_depend_on_neighbours(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for deterministic, passes in ((False, [4]), (True, [1] * 4)):
        seen = count_passes(monkeypatch)
        host = Host(engine_over(model, deterministic=deterministic, max_rows=4))
        prefill(host, [Job(row, text(6, row), sampled(2, row)) for row in range(4)], together=True)
        assert seen == passes


def test_a_row_may_restore_what_another_saves_in_the_same_step(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both() -> Host:
        host = Host(engine_over(model, boundaries=4))
        owner, borrower = text(11, 1), text(5, 2)
        (saving, rest) = host.pieces(1, owner, sampled(TOKENS, 1), saves={8: 1})
        host._point(1, 1, 8)
        (second,) = host.pieces(2, owner[:8] + borrower, sampled(TOKENS, 2), restore=1)
        host.run(prefill=(saving.chunk, second.chunk))
        host.prefill(rest)
        host.finish(1, 2, depth=DEPTH)
        return host

    right = bits(both(), 2)
    alone = Host(engine_over(model, boundaries=4))
    alone.start(2, text(11, 1)[:8] + text(5, 2), sampled(TOKENS, 2))
    alone.finish(2, depth=DEPTH)
    assert right.same(bits(alone, 2))
    monkeypatch.setattr(PromptBuilder, "_waves", lambda self, chunks: [list(chunks)])
    assert both().results[2].fault is not None


def test_results_come_in_the_plans_order(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever pass a row was in, guided or not, and beside rows that report before their end."""
    monkeypatch.setattr(prefill_module, "SPARE_PLACES", 0)
    host = Host(engine_over(model))
    guided = sampled(2, 4, constraint=slow.Pattern(VOCAB, 3, None, 7))
    reporting = sampled(2, 5, prompt_logprobs=1)
    round_ = [
        Job(1, text(3, 1), sampled(2, 1)),
        Job(2, text(20, 2), sampled(2, 2)),
        Job(5, text(9, 5), reporting, cuts=(4,)),
        Job(4, text(19, 4), guided),
        Job(3, text(2, 3), sampled(2, 3)),
    ]
    seen = count_passes(monkeypatch)
    pieces = [host.pieces(j.row, j.prompt, j.spec, cuts=j.cuts)[0].chunk for j in round_]
    result = host.run(prefill=tuple(pieces))
    assert len(seen) == 2
    assert [row.row for row in result.rows] == [1, 2, 5, 4, 3]
    assert [len(row.tokens) for row in result.rows] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("blocks_of_tokens", [False, True])
def test_recurrences_in_blocks_agree_up_to_rounding(blocks_of_tokens: bool) -> None:
    """A device whose bits depend on shapes: first tokens' logits, which span some 30."""
    model = small_model()
    model.run_in_blocks()
    logits = []
    for together in (False, True):
        host = Host(engine_over(model, boundaries=8, pages=200, chunked_prefill=blocks_of_tokens))
        for round_ in jobs(6, 6):
            prefill(host, round_, together=together)
        traces = sorted(host.engine.traces, key=lambda trace: trace.row)
        logits.append(np.concatenate([trace.logits for trace in traces]))
    assert np.abs(logits[0] - logits[1]).max() < 0.01


def held_by_a_row(model: Qwen35Model, sizes: Sequence[int]) -> int:
    """Bytes that the last row left of a pass gives back when it is released."""
    host = Host(engine_over(model, trace=False))
    rows = range(len(sizes))
    round_ = [Job(row, text(n, n), sampled(2, row)) for row, n in zip(rows, sizes, strict=True)]
    prefill(host, round_, together=True)
    for row in rows[1:]:
        host.release(row)
    mx.synchronize()
    before = mx.get_active_memory()
    host.release(0)
    mx.synchronize()
    return before - mx.get_active_memory()


@pytest.mark.parametrize("sizes", [[200], [100, 100], [100, 60, 90]])
def test_a_prefilled_row_holds_its_state_and_nothing_of_its_pass(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    state = sum(s.conv.nbytes + s.memory.nbytes for s in model.zero_states(1))
    assert held_by_a_row(model, sizes) < 1.5 * state
    if len(sizes) == 1:
        _conv_tail_at_the_padded_end(monkeypatch)  # a slice
    else:
        monkeypatch.setattr(prefill_module, "_one", lambda x, index: x[index : index + 1])
    assert held_by_a_row(model, sizes) > 1.5 * state


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
    found = run_with_fault(model, monkeypatch, unlucky)
    assert len(found) == 5
    check(found, {row: true(4)[row] for row in found})


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
