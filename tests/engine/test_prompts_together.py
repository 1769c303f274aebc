"""Chunks of one step share a pass; every row gets the bits it gets by itself."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from engine import blocks
from engine import prefill as prefill_module
from engine.blocks import Block, block_of, share_passes
from engine.models import delta
from engine.models.qwen3_5 import Qwen35Model
from engine.prompts import PromptBuilder
from tests.engine import slow
from tests.engine.host import Host, bits, sampled
from tests.engine.small import engine_over, small_model
from tests.engine.test_widths import Always
from tests.engine.together import (
    DEPTH,
    TOKENS,
    VOCAB,
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
        monkeypatch.setattr(prefill_module, "keep_all", lambda trail, _: delta.keep_all(trail))
    else:
        monkeypatch.setattr(prefill_module, "_one", lambda x, index: x[index : index + 1])
    assert held_by_a_row(model, sizes) > 1.5 * state
