"""Memory: flat over many steps, and page pools are updated in place."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import PagePool
from engine.cycle import CycleOutput, DecodeCycle
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import DecodeBatch, StepPlan, page_array
from engine.runner import MLXEngine
from tests.engine.driver import Driver
from tests.engine.host import Host
from tests.engine.small import engine_over, greedy, operations, small_model

POOL_PAGES = 4000


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def _driver(model: Qwen35Model, in_flight: int) -> Driver:
    driver = Driver(engine_over(model, pages=POOL_PAGES, trace=False), in_flight=in_flight)
    driver.join(0, [3, 1, 4], greedy(230, seed=0))
    driver.join(1, [1, 5], greedy(230, seed=1))
    return driver


def _cycles(driver: Driver, count: int) -> None:
    for cycle in range(count):
        rows = [0, 1] if cycle % 7 else [1]  # row 0 sits out now and then
        driver.decode(rows, depth=cycle % 4, even_finished=True)
    driver.drain()
    mx.synchronize()


def test_memory_is_flat_over_many_steps(model: Qwen35Model) -> None:
    """Nothing may hold on to the graphs of past steps."""
    driver = _driver(model, in_flight=2)
    _cycles(driver, 40)
    before = mx.get_active_memory()
    _cycles(driver, 140)
    assert abs(mx.get_active_memory() - before) < 100_000
    driver.engine.submit(StepPlan(step=10_000, release=(0, 1)))
    driver.engine.collect()
    assert len(_engine(driver)._books.free) == 0


def _engine(driver: Driver) -> MLXEngine:
    assert isinstance(driver.engine, MLXEngine)
    return driver.engine


def _peak_above_pools(model: Qwen35Model) -> tuple[int, int]:
    """(peak of a run beyond the pools themselves, bytes of one pool's keys)."""
    gc.collect()
    before = mx.get_active_memory()
    driver = _driver(model, in_flight=2)
    _cycles(driver, 8)
    pools = _engine(driver)._pools
    mx.reset_peak_memory()
    _cycles(driver, 24)
    total = sum(pool.nbytes for pool in pools)
    return mx.get_peak_memory() - before - total, pools[0].keys.nbytes


def test_pools_are_updated_in_place(model: Qwen35Model) -> None:
    above, pool = _peak_above_pools(model)
    assert above < pool / 2


def test_a_copied_pool_is_seen(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that holds a pool across a step makes MLX copy it."""
    write = PagePool.write
    held: dict[int, mx.array] = {}

    def holding(self: PagePool, *arguments: mx.array) -> None:
        view = self.keys[:]
        mx.eval(view)
        held[id(self)] = view
        write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PagePool, "write", holding)
    above, pool = _peak_above_pools(model)
    assert above > pool / 2


# --- thousands of cycles -------------------------------------------------------------------------


def tiny_host() -> Host:
    """One recurrent layer, one of attention, and a head: many cycles in little time."""
    model = small_model(num_hidden_layers=2, full_attention_interval=2)
    return Host(engine_over(model, pages=64, boundaries=3, trace=False))


def turns(host: Host, cycles: int) -> None:
    """At least so many cycles of a conversation beside another row: every turn starts from the
    last one's boundary, at changing depths; long ones start over."""
    row, ran = 1 + max(host.tokens, default=0), 0
    host.start(row, [1, 2], greedy(4))
    while ran < cycles:
        host.results = {row: host.results[row]}
        host.tokens = {row: host.tokens[row]}
        while not host.results[row].ended:
            host.decode(row, depth=ran % 3)
            ran += 1
        host.keep(row, row)
        row += 1
        point = host.points[row - 1].tokens
        longer = len(point) < 60
        prompt = [*point, row % 90, 5] if longer else [1, 2]
        host.start(row, prompt, greedy(30), restore=row - 1 if longer else None)
        host.drop(row - 1)
    host.release(row)


def check_flat(cycles: int) -> int:
    """Memory after a warm-up and after that many cycles more; returns the difference in bytes."""
    host = tiny_host()
    turns(host, 60)
    levels = []
    for _ in range(2):
        gc.collect()
        mx.synchronize()
        levels.append(mx.get_active_memory())
        mx.reset_peak_memory()
        if len(levels) == 1:
            turns(host, cycles)
    assert len(host.engine._books.free) == 0
    assert len(host.engine._boundaries) == 0
    assert not host.engine._books.reached
    return levels[1] - levels[0]


def test_memory_is_flat_over_thousands_of_cycles_and_turns() -> None:
    """`tests/benchmarks/flat.py` runs 10,000 of them."""
    assert abs(check_flat(500)) < 20_000


def test_a_graph_that_is_never_evaluated_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that each cycle adds to, and nobody computes, holds on to all of them."""
    commit = DecodeCycle._commit
    total = [mx.zeros((1,))]

    def counting(self: DecodeCycle, *arguments: Any) -> CycleOutput:
        output = commit(self, *arguments)
        total[0] = total[0] + output.logits.sum()
        return output

    monkeypatch.setattr(DecodeCycle, "_commit", counting)
    assert check_flat(100) > 20_000


def nodes(engine: MLXEngine) -> int:
    """Operations of the newest step's graph, which must not have been handed over yet."""
    return operations(engine._flight[-1].pending)


def test_the_graph_does_not_grow(model: Qwen35Model) -> None:
    driver = _driver(model, in_flight=2)
    engine, sizes = _engine(driver), set()
    for _ in range(30):
        driver.decode([0, 1], depth=2, even_finished=True)
        engine.submit(StepPlan(step=9999, decode=_both(driver)))
        sizes.add(nodes(engine))
        engine.collect()
        engine.collect()
        driver._flying = 0
    assert len(sizes) == 1
    assert 100 < sizes.pop() < 2000


def test_boundaries_add_nothing_to_a_cycle(model: Qwen35Model) -> None:
    """What a keep needs is taken when a row ends, not carried along."""
    sizes = set()
    for boundaries in (0, 4):
        for depth in (0, 2):
            host = Host(engine_over(model, boundaries=boundaries))
            host.start(1, [1, 2, 3], greedy(9))
            host.start(2, [4], greedy(9))
            host.submit_decode(1, 2, depth=depth)
            host.submit_decode(1, 2, depth=depth)
            sizes.add((depth, nodes(host.engine)))
            host.collect()
    assert len(sizes) == 2


def _both(driver: Driver) -> DecodeBatch:
    width = max(len(driver.pages[row]) for row in (0, 1))
    tables = np.stack(
        [page_array(driver.pages[row] + [0] * (width - len(driver.pages[row]))) for row in (0, 1)]
    )
    return DecodeBatch(rows=(0, 1), pages=tables, depth=2, limits=(2, 2))
