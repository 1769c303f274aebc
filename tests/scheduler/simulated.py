"""Small machines and loads for tests of the simulator."""

from __future__ import annotations

from typing import Any

from scheduler import SchedulerConfig
from scheduler.simulation import (
    AcceptanceModel,
    Amount,
    Kind,
    MachineCosts,
    MachineSpec,
    Open,
    Scenario,
    WidthCosts,
)

STEP_S = 0.02
TOKEN_S = 0.001


def make_spec(**others: Any) -> MachineSpec:
    """A machine whose cycles take 20 ms and a little per position, and prompts 1 ms per token."""
    widths = [(1, STEP_S), (64, 2 * STEP_S)]
    costs = {"decode": WidthCosts(widths), "token_s": TOKEN_S} | others.pop("costs", {})
    values: dict[str, Any] = {
        "costs": MachineCosts(**costs),
        "acceptance": AcceptanceModel(rates=(0.7, 0.6)),
        "max_rows": 8,
        "max_depth": 2,
        "pages": 2048,
        "boundaries": 16,
        "prefill_chunk": 64,
    }
    return MachineSpec(**values | others)


def make_kind(prompt: float | Amount = 40, output: float | Amount = 20, **others: Any) -> Kind:
    """One kind of request; lengths are constant unless given as `Amount`."""
    return Kind(
        prompt_tokens=prompt if isinstance(prompt, Amount) else Amount(median=prompt),
        output_tokens=output if isinstance(output, Amount) else Amount(median=output),
        **others,
    )


def make_scenario(**others: Any) -> Scenario:
    values: dict[str, Any] = {
        "machine": make_spec(),
        "load": Open(
            kinds=(
                make_kind(Amount(median=60, p95=300), Amount(median=15, p95=60)),
                make_kind(400, 8, share=0.2, priority="batch", tenant="long"),
            ),
            rate=4.0,
        ),
        "scheduler": SchedulerConfig(max_queue=32),
        "duration_s": 60.0,
    }
    return Scenario(**values | others)
