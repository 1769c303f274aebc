"""What a plan may say about boundaries and copies; what they cost; what they leave behind."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import PagePool
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import (
    DecodeBatch,
    KeepRow,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    page_array,
)
from tests.engine.host import Host
from tests.engine.small import engine_over, greedy, small_model

OFF = RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=4, speculative=False)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def prepared(model: Qwen35Model) -> Host:
    """Row 1 decodes; boundary 1 is at 10 with MTP history, boundary 2 at 4 without; both full."""
    host = Host(engine_over(model, boundaries=2))
    host.start(1, list(range(12)), greedy(8), saves={10: 1})
    host.start(2, list(range(20, 26)), OFF, saves={4: 2})
    return host


def chunk(**changes: Any) -> PrefillChunk:
    values: dict[str, Any] = {
        "row": 9,
        "tokens": np.array([50, 51], np.int32),
        "start": 10,
        "pages": page_array([1, 2]),
        "last": True,
        "spec": greedy(3),
        "restore": 1,
        "prefix": np.arange(10, dtype=np.int32),
    }
    return PrefillChunk(**(values | changes))


def keep(row: int = 1, boundary: int = 7, pages: tuple[int, ...] = (1, 2)) -> KeepRow:
    return KeepRow(row=row, boundary=boundary, pages=page_array(pages))


NO_HISTORY = {"start": 4, "restore": 2, "prefix": np.zeros(4, np.int32)}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"prefill": (chunk(restore=5),)}, "boundary 5 is unknown"),
        ({"prefill": (chunk(),), "drop": (1,)}, "boundary 1 is unknown"),
        ({"prefill": (chunk(start=8),)}, "starts at 8, boundary 1 10"),
        ({"prefill": (chunk(prefix=None),)}, "prefix must be the 10 tokens"),
        ({"prefill": (chunk(restore=None),)}, "must start at 0"),
        ({"prefill": (chunk(spec=None),)}, "spec belongs to the first chunk"),
        ({"prefill": (chunk(restore=None, start=0),)}, "prefix belongs to a restore"),
        ({"prefill": (chunk(**NO_HISTORY),)}, "speculative, but boundary 2 has no MTP history"),
        (
            {
                "prefill": (
                    chunk(spec=RowSpec(sampling=SamplingParams(), max_tokens=3, prompt_logprobs=0)),
                )
            },
            "prompt_logprobs and restore exclude each other",
        ),
        ({"prefill": (chunk(save=1),)}, "boundary 1 exists already"),
        ({"prefill": (chunk(save=3),)}, "3 boundaries, the engine holds 2"),
        ({"keep": (keep(),)}, "3 boundaries, the engine holds 2"),
        ({"keep": (keep(row=4),), "drop": (1,)}, "row 4: only a decoding row"),
        ({"keep": (keep(pages=(1,)),), "drop": (1,)}, "does not cover 12 positions"),
        ({"keep": (keep(boundary=2),), "drop": (1,)}, "boundary 2 exists already"),
        ({"copies": ((1, 3), (2, 3))}, "no page may be written twice"),
        ({"copies": ((1, 3), (3, 4))}, "nor read and written"),
        ({"copies": ((0, 3),)}, "the null page cannot be copied"),
        ({"copies": ((1, 161),)}, "page ids must be in"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_refused_whole(
    model: Qwen35Model, plan: dict[str, Any], message: str
) -> None:
    host = prepared(model)
    with pytest.raises(ValueError, match=message):
        host.engine.submit(StepPlan(step=9, **plan))
    host.run(drop=(2,))
    host.run(keep=(keep(),))
    host.finish(1, depth=2)
    assert len(host.results[1].tokens) == 8


def test_a_row_in_flight_cannot_be_kept(model: Qwen35Model) -> None:
    host = Host(engine_over(model, boundaries=2))
    host.start(1, [1, 2, 3], greedy(8))
    table = page_array(host.pages[1])[None]
    batch = DecodeBatch(rows=(1,), pages=table, depth=1, limits=(1,))
    host.engine.submit(StepPlan(step=5, decode=batch))
    with pytest.raises(ValueError, match="row 1: to be kept, but a step in flight names it"):
        host.engine.submit(StepPlan(step=6, keep=(keep(),)))
    host.engine.collect()
    host.engine.submit(StepPlan(step=6, keep=(keep(),)))


def test_a_row_may_end_in_flight_and_be_released_behind(model: Qwen35Model) -> None:
    """Nothing is remembered of it."""
    host = Host(engine_over(model, boundaries=2))
    host.start(1, [1, 2, 3], greedy(2))
    host.submit_decode(1, depth=1)
    host.submit(release=(1,))
    host.collect()
    host.collect()
    books = host.engine._books
    assert host.results[1].ended
    assert (books.ends, books.reached, books.faulted) == ({}, {}, set())


def test_a_row_that_faulted_cannot_be_kept() -> None:
    poisoned = small_model()
    poisoned.model.embed_tokens.weight[77] = float("nan")
    host = Host(engine_over(poisoned, boundaries=2))
    host.start(1, [1, 77, 3], greedy(8))
    assert host.results[1].fault is not None
    with pytest.raises(ValueError, match="row 1: only a decoding row without fault"):
        host.engine.submit(StepPlan(step=6, keep=(keep(),)))


def test_an_engine_without_memory_for_boundaries_keeps_none(model: Qwen35Model) -> None:
    host = Host(engine_over(model))
    with pytest.raises(ValueError, match="1 boundaries, the engine holds 0"):
        host.start(1, [1, 2, 3], greedy(8), saves={2: 1})


def test_plain_rows_may_start_from_any_boundary_and_save_without_history(
    model: Qwen35Model,
) -> None:
    host = prepared(model)
    host.start(3, [*range(10), 60], OFF, restore=1)
    host.start(4, [*range(20, 24), 61], OFF, restore=2)
    host.finish(3, 4, depth=0)
    assert host.engine._boundaries.facts() == {1: (10, True), 2: (4, False)}
    host.drop(1)
    host.keep(3, 5)
    assert host.engine._boundaries.facts()[5] == (14, False)


def test_unknown_boundaries_are_dropped_in_silence(model: Qwen35Model) -> None:
    host = prepared(model)
    host.run(drop=(1, 77))
    assert host.engine._boundaries.facts() == {2: (4, False)}


# --- memory --------------------------------------------------------------------------------------


def test_a_boundary_costs_what_the_engine_says_and_holds_nothing_else(model: Qwen35Model) -> None:
    """A slice of a chunk's or a cohort's arrays would keep the whole of them alive."""
    count = 40
    host = Host(engine_over(model, boundaries=count, pages=400, trace=False))
    states = sum(s.conv.nbytes + s.memory.nbytes for s in model.zero_states(1))
    expected = states + model.config.hidden_size * 4
    rows = range(1, count // 2 + 1)
    for row in rows:
        host.start(row, list(range(90)), greedy(6), saves={80: row})
        host.finish(row, depth=2)
        host.keep(row, count + row)
    gc.collect()
    mx.synchronize()
    full = mx.get_active_memory()
    stored = host.engine._boundaries
    assert all(stored[key].nbytes == expected for key in stored.facts())
    assert len(stored) == count
    host.run(drop=tuple(stored.facts()))
    gc.collect()
    held = full - mx.get_active_memory()
    assert count * expected <= held <= count * expected * 1.1


def _peak_of_copies(model: Qwen35Model) -> tuple[int, int]:
    """(peak beyond what is held, bytes of one pool's keys) of steps that copy pages."""
    host = Host(engine_over(model, boundaries=4, pages=4000, trace=False))
    host.start(1, list(range(30)), greedy(200), saves={13: 1})
    host.decode(1, depth=2)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for target in range(100, 140):
        host.run(copies=((1, target), (2, target + 100)))
        host.decode(1, depth=2)
    for row in range(2, 6):
        host.start(row, [*range(13), 70, 71], greedy(4), restore=1)
        host.finish(row, 1, depth=1)
        host.keep(row, row)
        host.drop(row)
    return mx.get_peak_memory() - before, host.engine._pools[0].keys.nbytes


def test_pages_are_copied_in_place(model: Qwen35Model) -> None:
    above, pool = _peak_of_copies(model)
    assert above < pool / 2


def test_a_pool_copied_with_its_page_is_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(self: PagePool, source: mx.array, target: mx.array) -> list[mx.array]:
        for name in ("keys", "values"):
            pool = getattr(self, name)
            other = pool + 0
            other[target] = pool[source]
            setattr(self, name, other)
        return []

    monkeypatch.setattr(PagePool, "copy", whole)
    above, pool = _peak_of_copies(model)
    assert above > pool / 2


def test_copies_reach_every_pool(model: Qwen35Model) -> None:
    host = Host(engine_over(model, boundaries=1))
    host.start(1, list(range(30)), greedy(3))
    source, target = host.pages[1][0], 150
    host.run(copies=((source, target),))
    for pool in host.engine._pools:
        assert mx.any(pool.keys[source] != 0).item()
        assert mx.array_equal(pool.keys[source], pool.keys[target])
        assert mx.array_equal(pool.values[source], pool.values[target])
