"""Memory: flat over many steps, and page pools are updated in place."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from engine.cache import PagePool
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import StepPlan
from engine.runner import MLXEngine
from tests.engine.driver import Driver
from tests.engine.small import engine_over, greedy, small_model

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
    assert len(_engine(driver)._table) == 0


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
