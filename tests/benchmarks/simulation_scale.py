"""How fast the simulator is, and that a long run leaves nothing behind.

    python -m tests.benchmarks.simulation_scale --requests 100000

One machine of 64 rows under Poisson arrivals of three kinds: short requests, long prompts, and some
with deadlines. The scheduler's books are checked every so often, and at the end nothing of any
request may be there. Memory is read half-way and at the end: what grows with the number of requests
is the record of each, kept for the report.
"""

from __future__ import annotations

import gc
import resource
import time
from typing import Annotated

import typer
from rich.console import Console

from scheduler import SchedulerConfig
from scheduler.config import Depth
from scheduler.simulation import (
    Amount,
    Kind,
    MachineCosts,
    MachineSpec,
    Open,
    Scenario,
    Simulation,
    WidthCosts,
)

RATE = 30.0
CHECKS = 200
"""Times the books are checked."""


def scenario(requests: int, depth: Depth) -> Scenario:
    machine = MachineSpec(
        name="fast",
        costs=MachineCosts(
            decode=WidthCosts([(1, 0.008), (64, 0.02), (256, 0.05)]), token_s=5e-5, host_s=1e-3
        ),
        max_rows=64,
        max_depth=3,
        pages=40_000,
        boundaries=128,
        prefill_chunk=512,
    )
    kinds = (
        Kind(
            prompt_tokens=Amount(median=80, p95=400),
            output_tokens=Amount(median=24, p95=96),
            share=8,
        ),
        Kind(prompt_tokens=Amount(median=1500), output_tokens=Amount(median=16), priority="batch"),
        Kind(prompt_tokens=Amount(median=20), output_tokens=Amount(median=2), deadline_s=0.4),
    )
    return Scenario(
        machine=machine,
        load=Open(kinds=kinds, rate=RATE, shared_tokens=64),
        scheduler=SchedulerConfig(depth=depth),
        duration_s=requests / RATE,
    )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(
    requests: Annotated[int, typer.Option(help="Requests, about.")] = 100_000,
    depth: Annotated[str, typer.Option(help="auto or 0 … 3.")] = "auto",
) -> None:
    """Run, check, and say how long it took."""
    console = Console(width=100, highlight=False)
    simulation = Simulation(scenario(requests, "auto" if depth == "auto" else int(depth)))
    [machine] = simulation.fleet.machines
    began, half = time.process_time(), 0.0
    for n in range(CHECKS):
        simulation.timeline.run(until=simulation.scenario.duration_s * n / CHECKS)
        machine.core.integrity()
        if n == CHECKS // 2:
            half = peak_mib()
    report = simulation.run()
    seconds = time.process_time() - began
    gc.collect()
    found = machine.statistics()
    console.print(f"{report.requests} requests in {seconds:.1f} s of processor time")
    console.print(f"{report.requests / seconds * 60:.0f} requests per minute")
    console.print(
        f"{found.steps} steps, {seconds / found.steps * 1e6:.0f} µs each, "
        f"{report.rows_per_cycle:.1f} rows per cycle; {simulation.timeline.now:.0f} s simulated"
    )
    console.print(f"outcomes {report.outcomes}")
    console.print(
        f"left: {machine.core.live} requests, {found.rows_held} rows, "
        f"{found.pages_used - found.pages_cached} pages beside kept prefixes"
    )
    console.print(f"peak memory {half:.0f} MiB half-way, {peak_mib():.0f} MiB at the end")


if __name__ == "__main__":
    typer.run(main)
