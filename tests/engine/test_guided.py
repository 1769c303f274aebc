"""Rows with a constraint: the form holds, the law is the masked target's, nobody else notices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import cycle as cycle_module
from engine import guided as guided_module
from engine import sampling
from engine.books import Books
from engine.guided import Guide
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import (
    Constraint,
    DecodeBatch,
    Finish,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    page_array,
)
from engine.runner import MLXEngine
from engine.solo import generate
from tests.engine import slow
from tests.engine.driver import Driver
from tests.engine.small import engine_over, greedy, operations, small_model
from tests.engine.test_slow import VOCAB, Request, judge_all

END = 7


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model(2)


def guided(seed: int, form: tuple[int, int | None], *, most: int = 14, **sampling: Any) -> Request:
    params = SamplingParams(seed=seed, **({"temperature": 0.0} | sampling))
    spec = RowSpec(sampling=params, max_tokens=most, stop_ids=(END,))
    return Request(prompt=[seed, 5, 9], spec=spec, form=form)


ROWS = [
    guided(1, (3, None)),
    guided(2, (2, 9)),
    guided(3, (5, None), temperature=2.0, coupled=True),
    guided(4, (4, 11), temperature=6.0),
    guided(5, (1, 2)),
]


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_own_drafts_obey_the_form_and_so_does_what_is_said(model: Qwen35Model, depth: int) -> None:
    ready = [row.ready() for row in ROWS]
    results = generate(engine_over(model, trace=False), ready, depth=depth, chunk=2)
    judge_all(model, ROWS, results)
    for (_, spec), result in zip(ready, results, strict=True):
        assert isinstance(spec.constraint, slow.Pattern)
        assert spec.constraint.tokens == result.tokens
        assert spec.constraint.refused == 0
    assert results[4].finish is Finish.STOP
    assert results[4].tokens[-1] == END
    assert len(results[4].tokens) == 3


def test_drafts_that_ignore_the_form_are_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would still be exact, and never accepted."""
    everything = mx.ones((1, 1, VOCAB), mx.bool_)
    monkeypatch.setattr(Guide, "draft_mask", lambda self, drafts: everything)
    ready = [row.ready() for row in ROWS]
    results = generate(engine_over(model, trace=False), ready, depth=3)
    judge_all(model, ROWS, results)
    refused = [spec.constraint.refused for _, spec in ready if spec.constraint]  # type: ignore
    assert sum(refused) > 10


LAW_ROWS = [
    guided(20 + i, (3, None), most=40, temperature=12.0, draft_temperature=20.0) for i in range(12)
]


def _excess(model: Qwen35Model) -> float:
    results = generate(engine_over(model, trace=False), [row.ready() for row in LAW_ROWS], depth=3)
    assert sum(sum(result.accepted) for result in results) > 40
    ranks = [rank for v in judge_all(model, LAW_ROWS, results) for rank in v.ranks]
    assert len(ranks) > 300
    return slow.pit_excess(ranks)


def test_the_law_is_the_masked_targets(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _excess(model) < 4.5
    right: Callable[..., Any] = sampling.accept
    monkeypatch.setattr(
        cycle_module, "accept", lambda d, q, p, u, limits: right(d, q, p, u * 0.02, limits)
    )
    assert _excess(model) > 6


def _free(i: int, most: int = 20) -> RowSpec:
    sampling = SamplingParams(temperature=2.0 * (i % 2), seed=i, coupled=True)
    return RowSpec(sampling=sampling, max_tokens=most)


def _traced(engine: MLXEngine, row: int) -> NDArray[np.float32]:
    return np.concatenate([t.logits for t in engine.traces if t.row == row])


def test_free_rows_beside_keep_their_bits_in_a_pipeline(model: Qwen35Model) -> None:
    """Free cycles stay in flight while guided rows take part in every other step."""
    starts = [[3, 1], [4, 1, 5]]
    apart = engine_over(model)
    alone = [generate(apart, [(p, _free(i))])[0] for i, p in enumerate(starts)]
    lone = [generate(apart, [row.ready()])[0].tokens for row in ROWS[:3]]
    engine = engine_over(model)
    driver = Driver(engine, in_flight=2)
    for i, prompt in enumerate(starts):
        driver.join(i, prompt, _free(i))
    for i, row in enumerate(ROWS[:3]):
        driver.join(10 + i, *row.ready())
    driver.drain()
    for cycle in range(60):
        rows = [0, 1]
        if cycle % 2:
            driver.drain()  # the host must know what guided rows said
            rows = [row for row in driver.active if row >= 10]
            rows += [0] * (cycle % 4 == 1)
        driver.decode(rows, depth=cycle % 4, even_finished=cycle % 2 == 0)
    driver.drain()
    for i, result in enumerate(alone):
        assert driver.results[i].tokens == result.tokens
        assert np.array_equal(_traced(engine, i), _traced(apart, result.row))
    for i, tokens in enumerate(lone):
        assert driver.results[10 + i].tokens == tokens


def test_a_guided_step_may_follow_one_in_flight(model: Qwen35Model) -> None:
    engine = engine_over(model)
    driver = Driver(engine)
    driver.join(0, [3, 1], _free(0))
    driver.join(1, *ROWS[0].ready())
    pages = {row: page_array(driver.pages[row])[None] for row in (0, 1)}
    free = DecodeBatch(rows=(0,), pages=pages[0], depth=2, limits=(2,))
    both = DecodeBatch(rows=(1,), pages=pages[1], depth=2, limits=(2,))
    engine.submit(StepPlan(step=90, decode=free))
    engine.submit(StepPlan(step=91, decode=free, guided=both))
    first, second = engine.collect(), engine.collect()
    assert [[r.row for r in result.rows] for result in (first, second)] == [[0], [0, 1]]
    assert second.depth == 2
    assert all(result.device_s >= 0 <= result.wait_s for result in (first, second))
    expected = generate(engine_over(model), [([3, 1], _free(0))])[0].tokens
    said = driver.results[0].tokens + [t for r in (first, second) for t in r.rows[0].tokens]
    assert said == expected[: len(said)]


def test_a_complete_form_ends_before_the_minimum_length(model: Qwen35Model) -> None:
    row = guided(1, (2, 3))
    row = replace(row, spec=replace(row.spec, min_tokens=9))
    for depth in (0, 3):
        results = generate(engine_over(model), [row.ready()], depth=depth)
        judge_all(model, [row], results)
        assert len(results[0].tokens) == 4


class Broken:
    """A constraint that breaks its promises when it is asked for the n-th time."""

    def __init__(self, at: int, answer: Callable[[], NDArray[Any] | None]) -> None:
        self._left, self._answer = at, answer

    def mask(self, drafted: Sequence[int]) -> NDArray[Any] | None:
        self._left -= 1
        if self._left < 0:
            return self._answer()
        return np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)

    def advance(self, tokens: Sequence[int]) -> None:
        pass


def _raises() -> None:
    raise RuntimeError("no such state")


BREAKS: list[tuple[Callable[[], Any], str]] = [
    (_raises, "no such state"),
    (lambda: np.zeros(3, np.uint32), "allows no token"),
    (lambda: np.zeros(2, np.uint32), r"not uint32 \(3,\)"),
    (lambda: np.zeros(3, np.int64), r"not uint32 \(3,\)"),
]


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(("answer", "text"), BREAKS)
def test_a_constraint_that_breaks_its_promises_ends_its_own_row(
    model: Qwen35Model, at: int, answer: Callable[[], Any], text: str
) -> None:
    alone = generate(engine_over(model), [ROWS[0].ready()])[0].tokens
    broken = RowSpec(
        sampling=SamplingParams(temperature=1.0), max_tokens=30, constraint=Broken(at, answer)
    )
    results = generate(engine_over(model), [([2], broken), ROWS[0].ready()], depth=2)
    assert results[0].fault is not None
    assert results[0].finish is None
    import re

    assert re.search(text, results[0].fault)
    assert results[1].fault is None
    assert results[1].tokens == alone


class CannotAdvance(Broken):
    def advance(self, tokens: Sequence[int]) -> None:
        raise KeyError("lost")


def test_a_constraint_that_cannot_advance_ends_its_row(model: Qwen35Model) -> None:
    spec = RowSpec(sampling=SamplingParams(), max_tokens=9, constraint=CannotAdvance(99, _raises))
    result = generate(engine_over(model), [([2], spec)])[0]
    assert len(result.tokens) == 1
    assert result.fault is not None
    assert "lost" in result.fault


def test_plans_that_put_rows_into_the_wrong_cohort_are_refused(model: Qwen35Model) -> None:
    engine = engine_over(model)
    driver = Driver(engine)
    driver.join(0, [3, 1], greedy(9))
    driver.join(1, *ROWS[0].ready())

    def batch(row: int) -> DecodeBatch:
        pages = page_array(driver.pages[row])[None]
        return DecodeBatch(rows=(row,), pages=pages, depth=1, limits=(1,))

    with pytest.raises(ValueError, match="belong to guided"):
        engine.submit(StepPlan(step=50, decode=batch(1)))
    with pytest.raises(ValueError, match="must have a constraint"):
        engine.submit(StepPlan(step=50, guided=batch(0)))
    chunk = PrefillChunk(
        row=2,
        tokens=np.array([1], np.int32),
        start=0,
        pages=page_array([30, 31, 32]),
        last=True,
        spec=ROWS[1].ready()[1],
    )
    late = DecodeBatch(rows=(2,), pages=page_array([30, 31, 32])[None], depth=0, limits=(0,))
    with pytest.raises(ValueError, match="in flight"):
        engine.submit(StepPlan(step=50, prefill=(chunk,), guided=late))
    engine.submit(StepPlan(step=50, prefill=(chunk,)))
    with pytest.raises(ValueError, match="in flight"):
        engine.submit(StepPlan(step=51, guided=late))
    engine.collect()
    engine.submit(StepPlan(step=51, guided=late))
    with pytest.raises(ValueError, match="in flight"):
        engine.submit(StepPlan(step=52, guided=late))
    engine.collect()


def _peak_above_pools(model: Qwen35Model) -> tuple[int, int]:
    """(peak of a run beyond the pools themselves, bytes of one pool's keys)."""
    gc.collect()
    before = mx.get_active_memory()
    engine = engine_over(model, pages=8000, trace=False)
    driver = Driver(engine)
    driver.join(0, [3, 1, 4], greedy(200, seed=0))
    driver.join(1, [1, 5], replace(ROWS[0].ready()[1], max_tokens=200, stop_ids=()))
    for cycle in range(4):
        driver.decode([0, 1], depth=cycle)
    mx.reset_peak_memory()
    for cycle in range(12):
        driver.decode([0, 1], depth=cycle % 4)
    mx.synchronize()
    total = sum(pool.nbytes for pool in engine._pools)
    return mx.get_peak_memory() - before - total, engine._pools[0].keys.nbytes


def test_two_cohorts_of_a_step_update_the_pools_in_place(model: Qwen35Model) -> None:
    above, pool = _peak_above_pools(model)
    assert above < pool / 2


def test_a_free_part_held_while_the_guided_part_runs_copies_the_pools(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = MLXEngine._dispatch
    held: list[mx.array] = []

    def holding(self: MLXEngine, step: Any) -> None:
        right(self, step)
        held[:] = [pool.keys[:] for pool in self._pools]
        mx.eval(held)

    monkeypatch.setattr(MLXEngine, "_dispatch", holding)
    above, pool = _peak_above_pools(model)
    assert above > pool / 2


def left_by_guided_steps(model: Qwen35Model) -> tuple[int, int]:
    """After many steps: (bytes more than after a few, most operations that guided rows waited for
    between steps)."""
    engine = engine_over(model, trace=False)
    driver = Driver(engine)
    driver.join(0, [3, 1, 4], greedy(240, seed=0))
    driver.join(1, [1, 5], replace(ROWS[0].ready()[1], max_tokens=240, stop_ids=()))
    sizes, graph = [], 0
    for cycle in range(45):
        driver.decode([0, 1], depth=cycle % 3)
        graph = max(graph, operations(engine._books.guided.arrays()))
        if cycle in (14, 44):
            gc.collect()
            mx.synchronize()
            sizes.append(mx.get_active_memory())
    return sizes[1] - sizes[0], graph


def test_nothing_holds_on_to_past_guided_steps(model: Qwen35Model) -> None:
    """What a row leaves is evaluated with its step: the next one, which reads it, may be long in
    coming, and the graph holds all that it was made from."""
    growth, graph = left_by_guided_steps(model)
    assert abs(growth) < 100_000
    assert graph == 0


def test_guided_rows_that_are_not_evaluated_are_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Books.arrays

    def missing(self: Books) -> list[mx.array]:
        guided = {id(array) for array in self.guided.arrays()}
        return [array for array in right(self) if id(array) not in guided]

    monkeypatch.setattr(Books, "arrays", missing)
    _, graph = left_by_guided_steps(model)
    assert graph > 50


def test_the_device_has_work_while_a_constraint_thinks(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free cohort handed over, then the first question; waited for before anything is read, so
    that no pool is written while it runs (a GPU would make MLX copy it)."""
    events: list[str] = []
    engine = engine_over(model, trace=False)
    driver = Driver(engine)
    driver.join(0, [3, 1, 4], greedy(20))
    driver.join(1, *ROWS[0].ready())
    hand_over, wait = mx.async_eval, MLXEngine._await
    mask, prefixes = slow.Pattern.mask, Guide._prefixes

    def note(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            events.append(name)
            return right(*arguments)

        return noting

    monkeypatch.setattr(mx, "async_eval", note("hand over", hand_over))
    monkeypatch.setattr(MLXEngine, "_await", note("wait", wait))
    monkeypatch.setattr(slow.Pattern, "mask", note("ask", mask))
    monkeypatch.setattr(Guide, "_prefixes", note("read", prefixes))
    driver.decode([0, 1], depth=1)
    assert events == [
        "hand over",  # the free cohort
        "read",  # no drafts yet: nothing is read
        "ask",
        "read",
        "wait",
        "ask",
        "wait",
        "hand over",  # the guided cohort
        "wait",  # collect
    ]


def test_masks_are_unpacked_bit_by_bit() -> None:
    """Odd vocabulary; bits past it count for nothing."""
    words = np.array([0x80000001, 0xFFFFFFF4], np.uint32)

    class Fixed:
        def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32]:
            return words

        def advance(self, tokens: Sequence[int]) -> None: ...

    constraint: Constraint = Fixed()
    form = guided_module.Form(constraint, frozenset(), 5)
    guide = Guide([form], vocab=35, limits=[0])
    mask = np.array(guide.draft_mask([]))  # limit 0: no draft of this row matters
    assert mask.all()
    mask = np.array(guide.verify_mask(mx.zeros((1, 0), mx.int32)))
    assert np.flatnonzero(mask[0, 0]).tolist() == [0, 31, 34]
    words[:] = (0, 0xFFFFFFF8)
    again = Guide([form], vocab=35, limits=[0])
    again.verify_mask(mx.zeros((1, 0), mx.int32))
    assert form.fault == "its constraint allows no token"
