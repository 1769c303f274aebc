"""Benchmark options: scripted acceptance, and synthetic checkpoints to run it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.load import load_engine
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.scripted import ScriptedCycle
from engine.solo import generate
from tests.benchmarks.synthetic import write_checkpoint
from tests.engine.small import engine_over, greedy, small_model

RATES = (0.85, 0.7, 0.55)
CYCLES = 60


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("coupled", [False, True])
def test_drafts_stand_at_the_scripted_rates(
    model: Qwen35Model, temperature: float, coupled: bool
) -> None:
    engine = engine_over(model, trace=False)
    ScriptedCycle.script(engine.cycle, RATES)
    specs = [
        RowSpec(
            sampling=SamplingParams(temperature=temperature, seed=seed, coupled=coupled),
            max_tokens=CYCLES * 3,
        )
        for seed in range(4)
    ]
    results = generate(engine, [([1, 2], spec) for spec in specs], depth=4)
    assert all(len(r.tokens) == CYCLES * 3 for r in results)
    drafted = [sum(r.drafted[j] for r in results) for j in range(4)]
    accepted = [sum(r.accepted[j] for r in results if len(r.accepted) > j) for j in range(4)]
    beyond = RATES[2] * RATES[2] / RATES[1]
    for tried, stood, rate in zip(drafted, accepted, (*RATES, beyond), strict=True):
        error = (rate * (1 - rate) / tried) ** 0.5
        assert abs(stood / tried - rate) < 4 * error


def test_limits_hold_under_a_script(model: Qwen35Model) -> None:
    engine = engine_over(model, trace=False)
    ScriptedCycle.script(engine.cycle, (1.0, 1.0))
    result = generate(engine, [([1, 2], greedy(40))], depth=3, limits=lambda cycle, row, depth: 1)[
        0
    ]
    assert len(result.drafted) == 1
    assert result.accepted == result.drafted


@pytest.mark.parametrize("rates", [(), (1.2,), (0.5, 0.6), (0.5, -0.1)])
def test_scripts_out_of_range_are_refused(model: Qwen35Model, rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must fall within 0…1"):
        ScriptedCycle.script(engine_over(model).cycle, rates)


def test_a_synthetic_checkpoint_loads_and_runs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, geometry="tiny")
    config = EngineConfig(model=tmp_path, context=256, max_rows=2, kv_memory=1 << 22)
    engine = load_engine(config, scripted=(1.0, 1.0, 1.0))
    try:
        result = generate(engine, [([5, 6, 7], greedy(13))], depth=3)[0]
    finally:
        engine.close()
    assert engine.info.quantization.startswith("affine 4-bit")
    assert len(result.tokens) == 13
    assert result.cycles == 3  # one token from the prompt, four from every cycle
