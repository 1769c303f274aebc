"""The executor: steps evaluated on a thread of their own give the same bits and copy no pool."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest

from engine import runner
from engine.cache import page_table, window
from engine.executor import Executor
from engine.plan import EngineFailedError, RowSpec, SamplingParams
from engine.runner import MLXEngine
from tests.engine.driver import Driver
from tests.engine.small import engine_over, greedy, prompts, small_model

TOKENS = 24


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.stop()


def threaded(executor: Executor) -> MLXEngine:
    """An engine whose arrays were all made on the executor's thread."""
    return executor.call(lambda: engine_over(small_model())).run_on(executor)


def specs() -> list[RowSpec]:
    """Greedy, rejection, coupled and penalised rows side by side."""
    sampled = [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=0.8, seed=2, coupled=True),
        SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.5, repetition_penalty=1.2),
    ]
    rows = [RowSpec(sampling=s, max_tokens=TOKENS) for s in sampled]
    return [greedy(TOKENS), *rows, greedy(TOKENS)]


def run(engine: MLXEngine, *, in_flight: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """Rows that join one after the other, at changing depths; tokens and traced logits by row."""
    driver = Driver(engine, in_flight=in_flight)
    joined: list[int] = []
    for turn, (prompt, spec) in enumerate(zip(prompts(5), specs(), strict=True)):
        driver.join(turn, prompt, spec)
        joined.append(turn)
        for depth in (3, 0, 2):
            driver.decode(joined, depth=depth)
    while any(not driver.results[row].ended for row in joined):
        driver.decode(joined, depth=3)
    driver.drain()
    logits = [np.concatenate([t.logits for t in engine.traces if t.row == row]) for row in joined]
    return [driver.results[row].tokens for row in joined], logits


def test_same_bits_as_on_one_thread(executor: Executor) -> None:
    tokens, logits = run(engine_over(small_model()), in_flight=1)
    for _ in range(3):
        ahead, found = run(threaded(executor), in_flight=2)
        assert ahead == tokens
        assert all(np.array_equal(a, b) for a, b in zip(found, logits, strict=True))


def test_no_pool_is_copied(executor: Executor) -> None:
    """A pool far larger than everything else: a copy would show in the peak."""

    def large() -> MLXEngine:
        return engine_over(small_model(), pages=20_000)

    engine = executor.call(large).run_on(executor)
    pool = engine._pools[0].keys.nbytes
    driver = Driver(engine, in_flight=2)
    for row, prompt in enumerate(prompts(3)):
        driver.join(row, prompt, greedy(TOKENS))
    driver.drain()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(6):
        driver.decode([0, 1, 2], depth=3)
    driver.drain()
    assert mx.get_peak_memory() - before < pool / 4


def test_a_held_pool_would_be_copied(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []

    def holding(first: list[mx.array], pending: list[mx.array]) -> tuple[float, float]:
        held.append(list(pending))
        return right(first, pending)

    right = runner._evaluate
    monkeypatch.setattr(runner, "_evaluate", holding)
    with pytest.raises(AssertionError):
        test_no_pool_is_copied(executor)


def test_a_step_is_evaluated_as_it_was_built(executor: Executor) -> None:
    """A write of the next step must not reach into what was handed over."""
    engine = threaded(executor)
    pool = engine._pools[0]
    with mx.stream(executor.stream):
        handed_over = pool.current()[0]
        where = window(mx.array([0]), 1, page_table(np.array([[3]], np.int32)), 8)
        one = mx.ones((1, 1, *pool.keys.shape[2:]))
        pool.write(one, one, where)
        sums = executor.call(lambda: (handed_over.sum().item(), pool.keys.sum().item()))
    assert sums[0] == 0
    assert sums[1] != 0


def test_a_failed_evaluation_ends_the_engine(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(first: list[mx.array], pending: list[mx.array]) -> tuple[float, float]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runner, "_evaluate", broken)
    driver = Driver(threaded(executor))
    with pytest.raises(EngineFailedError, match="out of luck"):
        driver.join(0, prompts(1)[0], greedy(4))


def test_the_gap_is_what_the_device_waits(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are built ahead follow at once; the host's delay shows where they are not."""
    right = runner._evaluate

    def slowly(first: list[mx.array], pending: list[mx.array]) -> tuple[float, float]:
        began, _ = right(first, pending)
        time.sleep(0.05)
        return began, time.perf_counter()

    monkeypatch.setattr(runner, "_evaluate", slowly)
    assert median_gap(threaded(executor), in_flight=2) < 0.02
    assert median_gap(threaded(executor), in_flight=1, between=lambda: time.sleep(0.06)) > 0.06


def median_gap(
    engine: MLXEngine, *, in_flight: int, between: Callable[[], None] = lambda: None
) -> float:
    gaps: list[float] = []
    right = engine.collect

    def collect() -> object:
        result = right()
        gaps.extend([] if result.gap_s is None else [result.gap_s])
        return result

    engine.collect = collect  # type: ignore[method-assign, assignment]
    driver = Driver(engine, in_flight=in_flight)
    driver.join(0, prompts(2)[1], greedy(30))
    for _ in range(8):
        driver.decode([0], depth=0)
        between()
    driver.drain()
    assert len(gaps) >= 5
    assert min(gaps) >= 0
    return float(np.median(gaps))


def test_a_job_returns_or_raises(executor: Executor) -> None:
    assert executor.call(lambda: 7) == 7
    assert executor.call(lambda: executor.call(threading.current_thread)).name == "device"
    with pytest.raises(ZeroDivisionError):
        executor.call(lambda: 1 // 0)


def test_it_ends_with_its_last_reference() -> None:
    executor = Executor()
    thread = executor.call(threading.current_thread)
    del executor
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_stopping_twice_is_stopping() -> None:
    executor = Executor()
    executor.stop()
    executor.stop()
