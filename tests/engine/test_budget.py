"""The budget: sums, the pool it leaves, and refusals that name a number that then works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import (
    Budget,
    Costs,
    device_working_set,
    estimate,
    host_memory,
    plan_budget,
    size,
)
from engine.errors import BudgetError
from engine.models.qwen3_5_config import Qwen35Config
from tests.engine.tiny_checkpoints import text_config

GIB = 1024**3
COSTS = Costs(
    weight_bytes=2 * GIB,
    page_bytes=1_000_000,
    gather_bytes=50_000,
    row_bytes=20_000_000,
    verify_row_bytes=30_000_000,
    prefill_token_bytes=200_000,
    attention_token_bytes=200_000,
    score_bytes=64,
)
PLAN: dict[str, Any] = {
    "working_set": 8 * GIB,
    "page_size": 16,
    "max_rows": 16,
    "prefill_chunk": 256,
    "context": 32768,
}


def plan(costs: Costs = COSTS, **changes: Any) -> Budget:
    return plan_budget(costs, **(PLAN | changes))


def test_default_pool_holds_2048_tokens_per_row() -> None:
    budget = plan()
    assert budget.pages == 16 * 2048 // 16
    assert budget.total + budget.free == budget.working_set == 8 * GIB
    assert budget.free >= 0


def test_default_pool_is_no_larger_than_the_context_needs() -> None:
    assert plan(context=100).pages == 16 * 100 // 16


def test_default_pool_shrinks_to_what_fits_and_uses_it() -> None:
    budget = plan(working_set=5 * GIB)
    assert 16 <= budget.pages < 2048
    assert 0 <= budget.free < COSTS.page_bytes + COSTS.gather_bytes + 16 * 256 * 64


def test_table_names_every_part() -> None:
    lines = plan().table().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "weights",
        "kv pool",
        "rows",
        "transient",
        "reserve",
        "free",
    ]
    assert "2048 pages of 16: 32768 tokens" in lines[1]
    assert plan().rows[1].bytes == 2049 * COSTS.page_bytes, "the null page is paid for too"


def test_transient_is_the_cache_limit() -> None:
    transient = plan().cache_limit
    assert transient == 16 * 30_000_000 + 2048 * 50_000 + 256 * (200_000 + 32768 * 64)


def test_kv_memory_is_the_pool() -> None:
    assert plan(kv_memory=1_000_000_000).pages == 999, "one page is the null page"


BOUNDED = replace(COSTS, boundary_bytes=10_000_000)


def test_boundaries_have_a_row_of_their_own() -> None:
    budget = plan(BOUNDED, prefix_memory=105_000_000)
    assert budget.boundaries == 10
    assert "boundaries" in budget.table()
    assert budget.total - plan().total == 10 * 10_000_000 + 16 * 20_000_000
    assert plan(BOUNDED, prefix_memory=0).boundaries == 0
    assert plan(prefix_memory=None).boundaries == 0, "a boundary without bytes is none"


def test_boundaries_are_64_or_a_tenth_or_none() -> None:
    assert plan(BOUNDED, prefix_memory=None).boundaries == 64
    assert plan(BOUNDED, prefix_memory=None, working_set=5 * GIB).boundaries == 53
    tight = {"kv_memory": 1_900_000_000, "working_set": int(5.5 * GIB)}
    assert plan(BOUNDED, prefix_memory=0, **tight).free < 640_000_000
    assert plan(BOUNDED, prefix_memory=None, **tight).boundaries == 0


def test_a_refused_prefix_memory_names_the_most_that_works() -> None:
    with pytest.raises(BudgetError, match="lower prefix_memory to at most") as caught:
        plan(BOUNDED, prefix_memory=8 * GIB)
    most = int(re.findall(r"\d+", caught.value.change)[-1])
    assert plan(BOUNDED, prefix_memory=most).boundaries == most // 10_000_000
    with pytest.raises(BudgetError):
        plan(BOUNDED, prefix_memory=most + 10_000_000)


def test_cycles_of_one_shape_pay_for_the_whole_context() -> None:
    budget = plan(cycle_rows=32, context=2048)
    (row,) = [row for row in budget.rows if row.name == "padding"]
    assert row.bytes == 16 * (20_000_000 + 30_000_000) + 32 * 128 * 50_000
    assert budget.cache_limit == plan(context=2048).cache_limit + row.bytes
    with pytest.raises(BudgetError, match="lower context to at most") as caught:
        plan(cycle_rows=32, working_set=5 * GIB)
    most = int(re.findall(r"\d+", caught.value.change)[-1])
    assert plan(cycle_rows=32, working_set=5 * GIB, context=most).free >= 0
    with pytest.raises(BudgetError):
        plan(cycle_rows=32, working_set=5 * GIB, context=most + 16)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"kv_memory": 100}, "kv_memory"),
        ({"kv_memory": 50 * GIB}, "kv_memory"),
        ({"max_rows": 200}, "max_rows"),
        ({"working_set": int(3.1 * GIB), "max_rows": 1, "prefill_chunk": 8192}, "prefill_chunk"),
    ],
)
def test_a_refusal_names_a_value_that_works(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(**changes)
    match = re.search(
        rf"(?:raise|lower) {setting} to (?:at least |at most )?(\d+)", caught.value.change
    )
    assert match, caught.value.change
    value = int(match.group(1))
    assert plan(**(changes | {setting: value})).free >= 0
    # One step back towards what was asked must fail: the value is the nearest that works.
    asked = (PLAN | changes)[setting]
    step = COSTS.page_bytes if setting == "kv_memory" else 1
    with pytest.raises(BudgetError):
        plan(**(changes | {setting: value + (step if asked > value else -step)}))


def test_a_model_that_never_fits_asks_for_another() -> None:
    with pytest.raises(BudgetError, match=r"largest part: weights.*smaller or more strongly"):
        plan(working_set=2 * GIB)


@given(
    working_set=st.integers(3 * GIB, 64 * GIB),
    max_rows=st.integers(1, 256),
    chunk=st.integers(1, 8192),
    context=st.integers(2, 300_000),
    page_size=st.sampled_from([1, 8, 16, 256]),
    kv_memory=st.none() | st.integers(1, 64 * GIB),
)
def test_a_budget_that_is_given_always_fits(
    working_set: int, max_rows: int, chunk: int, context: int, page_size: int, kv_memory: int | None
) -> None:
    try:
        budget = plan(
            working_set=working_set,
            max_rows=max_rows,
            prefill_chunk=chunk,
            context=context,
            page_size=page_size,
            kv_memory=kv_memory,
        )
    except BudgetError:
        return
    assert budget.total <= working_set
    assert budget.pages * page_size >= min(context, 256)
    if kv_memory is not None:
        assert (budget.pages + 1) * COSTS.page_bytes <= kv_memory


def test_estimate_counts_pages_and_rows_exactly() -> None:
    arch = Qwen35Config.from_dict(text_config("hf"))
    costs = estimate(arch, weight_bytes=1, item_bytes=4, page_size=16, depth=3, mtp=True)
    # One full-attention layer and the head: keys and values of 2 heads × 32.
    assert costs.page_bytes == 2 * (2 * 16 * 2 * 32 * 4)
    assert costs.gather_bytes == costs.page_bytes, "one layer's, gathered and laid out"
    # Three linear layers: 4 × 16 × 16 float32 memory, 3 rows of 128 channels; 4 pending hiddens
    # and the last one once more.
    assert costs.row_bytes == 3 * (4 * 16 * 16 * 4 + 3 * 128 * 4) + 5 * 64 * 4
    assert costs.boundary_bytes == 3 * (4 * 16 * 16 * 4 + 3 * 128 * 4) + 64 * 4
    without = estimate(arch, weight_bytes=1, item_bytes=2, page_size=16, depth=0, mtp=False)
    assert without.page_bytes == 2 * 16 * 2 * 32 * 2


def test_keeping_states_costs_one_per_layer_and_position() -> None:
    arch = Qwen35Config.from_dict(text_config("hf"))
    state = 4 * 16 * 16 * 4

    def verify(*, keep_states: bool, token_by_token: bool) -> int:
        costs = estimate(
            arch,
            weight_bytes=1,
            item_bytes=4,
            page_size=16,
            depth=3,
            mtp=True,
            keep_states=keep_states,
            token_by_token=token_by_token,
        )
        return costs.verify_row_bytes

    kept, replayed, in_blocks = (
        verify(keep_states=keep, token_by_token=token)
        for keep, token in ((True, True), (False, True), (False, False))
    )
    assert kept - replayed == 3 * 4 * state
    assert replayed - in_blocks == 4 * state, "one layer's, a state per token"


def test_rows_pay_for_the_dearer_of_prefill_and_verify() -> None:
    dear = replace(COSTS, prefill_row_bytes=COSTS.verify_row_bytes + 1000)
    assert plan(dear).cache_limit == plan().cache_limit + 16 * 1000


def test_layers_of_two_kinds_do_not_add_up() -> None:
    costs = replace(COSTS, prefill_token_bytes=300, attention_token_bytes=200, score_bytes=10)
    assert costs.prefill(5, 9) == 5 * 300
    assert costs.prefill(5, 11) == 5 * 310


def test_working_set_by_device() -> None:
    metal = {"max_recommended_working_set_size": 12 * GIB, "memory_size": 16 * GIB}
    assert device_working_set(metal, on_gpu=True) == 12 * GIB
    cuda: dict[str, str | int] = {"total_memory": 100 * GIB, "free_memory": 95 * GIB}
    assert device_working_set(cuda, on_gpu=True) == 90 * GIB
    assert device_working_set(cuda | {"free_memory": GIB}, on_gpu=True) == GIB
    with pytest.raises(BudgetError, match="does not report"):
        device_working_set({"device_name": "?"}, on_gpu=True)
    assert device_working_set({}, on_gpu=False) == int(host_memory() * 0.75)


def test_a_container_limits_the_host(tmp_path: Path) -> None:
    whole = host_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    assert host_memory(tmp_path) == GIB


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 * GIB, "3.00 GiB"), (-2048, "-2.00 KiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text
