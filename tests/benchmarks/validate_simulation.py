"""The simulator beside the real scheduler and engine: one load, run and simulated, and the error.

    python -m tests.benchmarks.validate_simulation                       # about 8 minutes
    python -m tests.benchmarks.validate_simulation --seconds 20 --rates 0.5 --tune-seconds 10

Phases, on the bundled model and CPU: (1) `engine.tune` measures cycles; (2) a calibration load,
with other prompts and seeds than what follows, gives the costs of prefill, acceptance by position,
the gap between steps and the noise; (3) Poisson loads run through `scheduler.Scheduler`; (4) their
very arrivals are simulated. Of a load nothing goes into its simulation but arrival times and
lengths. The last column uses cycle times of the load itself in place of tune's: what is left there
is the simulator's own error, the rest is that costs measured beforehand were not those of the run.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import MAX_DEPTH, Engine, EngineInfo, SamplingParams
from engine.tiny import MODEL_DIR
from engine.tune import measure
from scheduler import (
    CostTable,
    Finished,
    GenerationRequest,
    Scheduler,
    SchedulerConfig,
    StepRecord,
    Tokens,
)
from scheduler.config import Depth
from scheduler.simulation import (
    AcceptanceModel,
    Arrival,
    MachineCosts,
    MachineSpec,
    Open,
    Report,
    Scenario,
    Summary,
    TableCosts,
    simulate,
)
from tests.benchmarks.speed import held_out_prompts

TEMPERATURE = 0.6
LEAST_SAMPLES = 5
"""Cycles of one shape below which its time in the run is not used."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one run."""

    times: list[float]
    prompts: list[list[int]]
    tokens: int
    seed: int


@dataclass(kw_only=True)
class Observed:
    """What a run brought."""

    seconds: float = 0.0
    """From the first arrival to the last end."""
    tokens: int = 0
    arrived: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    reached: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    """[j]: cycles in which draft j + 1 was up and the ones before it stood."""
    stood: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    """[j]: those of them in which it stood too."""
    steps: list[StepRecord] = field(default_factory=list)

    def add(self, burst: Tokens) -> None:
        self.tokens += len(burst.ids)
        for j in range(min(burst.accepted + 1, burst.drafted)):
            self.reached[j] += 1
            self.stood[j] += burst.accepted > j

    def chances(self) -> tuple[float, ...]:
        """Of each draft, given that the ones before it stood."""
        return tuple(s / r for s, r in zip(self.stood, self.reached, strict=True) if r)


async def run_load(
    scheduler: Scheduler, load: Load, observed: Observed, sink: list[list[StepRecord]]
) -> None:
    """Send the load on time; `sink[0]` is where the scheduler's step records go."""
    sink[0] = observed.steps
    began = anyio.current_time() + 0.05

    async def one(index: int) -> None:
        await anyio.sleep_until(began + load.times[index])
        name = f"{load.seed}-{index}"
        request = GenerationRequest(
            request_id=name,
            prompt_ids=tuple(load.prompts[index]),
            sampling=SamplingParams(temperature=TEMPERATURE, seed=load.seed * 10_000 + index),
            max_tokens=load.tokens,
        )
        arrived = anyio.current_time()
        last: float | None = None
        async with scheduler.submit(request) as handle:
            async for event in handle:
                if isinstance(event, Finished):
                    continue
                observed.add(event)
                if last is None:
                    observed.ttft.append(event.at - arrived)
                else:
                    observed.gaps.append(event.at - last)
                last = event.at
        observed.end_to_end.append(anyio.current_time() - arrived)

    async with anyio.create_task_group() as group:
        for index in range(len(load.times)):
            group.start_soon(one, index)
    observed.seconds = anyio.current_time() - began - load.times[0]


def make_load(prompts: list[list[int]], times: list[float], tokens: int, seed: int) -> Load:
    rng = random.Random(seed)
    chosen = [rng.choice(prompts) for _ in times]
    return Load(times=times, prompts=chosen, tokens=tokens, seed=seed)


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    times, now = [], rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times or [0.0]


# --- costs ---------------------------------------------------------------------------------------


def tuned(make: Callable[[], Engine], *, depth: Depth, seconds: float) -> CostTable:
    """What `selfdraft tune` would write."""
    engine = make()
    try:
        info = engine.info
        rows = [b for b in (1, 2, 3, 4, 6, 8, 12, 16) if b <= info.max_rows]
        most = info.max_depth if depth == "auto" else depth
        depths = range(min(most, 4) + 1) if depth == "auto" else [most]
        found = measure(
            engine,
            rows=rows,
            depths=list(depths),
            seconds=seconds,
            clock=time.monotonic,
            context=96,
        )
    finally:
        engine.close()
    return CostTable(seconds={(p.rows, p.depth): p.seconds for p in found.points})


def prefill_costs(steps: list[StepRecord]) -> tuple[float, float]:
    """(chunk_s, token_s) by least squares over steps that only prefill."""
    alone = [s for s in steps if s.prompt_tokens and not s.rows]
    tokens = np.array([s.prompt_tokens for s in alone], dtype=np.float64)
    seconds = np.array([s.device_s for s in alone])
    if len(alone) < 3 or np.ptp(tokens) == 0:
        return 0.0, float(seconds.sum() / tokens.sum())
    terms = np.stack([np.ones_like(tokens), tokens], axis=1)
    chunk_s, token_s = np.linalg.lstsq(terms, seconds, rcond=None)[0]
    return max(float(chunk_s), 0.0), max(float(token_s), 1e-6)


def cycle_times(steps: list[StepRecord]) -> dict[tuple[int, int], list[float]]:
    """(rows, depth) → device seconds of steps that ran nothing else."""
    found: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for s in steps:
        if s.rows and not s.prompt_tokens:
            found[s.rows, s.depth].append(s.device_s)
    return dict(found)


def own_table(base: CostTable, steps: list[StepRecord]) -> CostTable:
    """`base`, with means of the run where it has enough cycles."""
    means = {
        shape: statistics.mean(times)
        for shape, times in cycle_times(steps).items()
        if len(times) >= LEAST_SAMPLES
    }
    return CostTable(seconds={**base.seconds, **means})


def noise_of(steps: list[StepRecord]) -> float:
    """Standard deviation of log seconds within shapes, without the farthest tenth."""
    deviations: list[float] = []
    for times in cycle_times(steps).values():
        if len(times) >= LEAST_SAMPLES:
            middle = math.log(statistics.median(times))
            deviations += [math.log(t) - middle for t in times]
    if len(deviations) < 10:
        return 0.0
    low, high = np.quantile(deviations, (0.159, 0.841))
    return float(high - low) / 2


def means_of(medians: CostTable, noise: float) -> CostTable:
    """tune gives medians, and the simulator's noise keeps the mean: of a lognormal law the mean is
    e^(σ² / 2) medians."""
    factor = math.exp(noise**2 / 2)
    return CostTable(seconds={shape: s * factor for shape, s in medians.seconds.items()})


def machine_of(info: EngineInfo, table: CostTable, calibration: Observed) -> MachineSpec:
    chunk_s, token_s = prefill_costs(calibration.steps)
    noise = noise_of(calibration.steps)
    gaps = [s.gap_s for s in calibration.steps if s.gap_s is not None]
    host = [s.host_s + s.build_s for s in calibration.steps if s.rows]
    return MachineSpec(
        name=info.model,
        costs=MachineCosts(
            decode=TableCosts(means_of(table, noise)),
            token_s=token_s,
            chunk_s=chunk_s,
            gap_s=statistics.median(gaps) if gaps else 0.0,
            host_s=statistics.median(host) if host else 0.0,
            noise=noise,
        ),
        acceptance=AcceptanceModel(rates=calibration.chances()),
        max_rows=info.max_rows,
        max_depth=info.max_depth,
        context_length=info.context_length,
        pages=info.pages,
        page_size=info.page_size,
        boundaries=info.boundaries,
        prefill_chunk=info.prefill_chunk,
    )


# --- the two sides -------------------------------------------------------------------------------


def simulated(machine: MachineSpec, load: Load, config: SchedulerConfig) -> Report:
    """The load's own arrivals on a simulated machine; one run."""
    trace = tuple(
        Arrival(arrival_s=at, prompt_tokens=len(prompt), output_tokens=load.tokens)
        for at, prompt in zip(load.times, load.prompts, strict=True)
    )
    scenario = Scenario(
        machine=machine,
        load=Open(trace=trace),
        scheduler=config,
        duration_s=load.times[-1] + 1.0,
        seed=load.seed,
    )
    return simulate(scenario)


def real_numbers(observed: Observed) -> dict[str, float]:
    return _numbers(
        observed.tokens / observed.seconds,
        Summary.of(np.array(observed.ttft)),
        np.array(observed.gaps),
        Summary.of(np.array(observed.end_to_end)),
    )


def simulated_numbers(report: Report, first: float) -> dict[str, float]:
    """`first`: when the first request arrived. Rates are over the whole run, as of the real one."""
    times, counts = report.series.token_times, report.series.token_counts
    rate = float(counts.sum()) / float(times.max() - first)
    return _numbers(rate, report.ttft, report.series.gaps, report.end_to_end)


def _numbers(
    rate: float, ttft: Summary, gaps: np.ndarray[Any, Any], end_to_end: Summary
) -> dict[str, float]:
    gap = Summary.of(gaps)
    return {
        "tokens/s": rate,
        "TTFT p50, s": ttft.p50,
        "TTFT p90, s": ttft.p90,
        "gap p50, s": gap.p50,
        "gap p99, s": gap.p99,
        "end to end p50, s": end_to_end.p50,
        "end to end p90, s": end_to_end.p90,
    }


def compare(
    title: str, real: dict[str, float], sims: dict[str, list[dict[str, float]]]
) -> tuple[Table, list[dict[str, Any]]]:
    """Side by side, with relative errors; several simulated runs count as their median."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("real", justify="right")
    for name in sims:
        table.add_column(name, justify="right")
        table.add_column("error", justify="right")
    rows: list[dict[str, Any]] = []
    for what, value in real.items():
        cells, row = [f"{value:.3f}"], {"what": what, "real": value}
        for name, runs in sims.items():
            found = statistics.median(run[what] for run in runs)
            row[name] = found
            cells += [f"{found:.3f}", f"{found / value - 1:+.0%}"]
        table.add_row(what, *cells)
        rows.append(row)
    return table, rows


async def run(
    make: Callable[[], Engine],
    table: CostTable,
    *,
    depth: Depth,
    rates: list[float],
    seconds: float,
    tokens: int,
    prompt_tokens: int,
    repeats: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Phases 2 to 4."""
    prompts = held_out_prompts(MODEL_DIR, 200, prompt_tokens)
    half = len(prompts) // 2
    config = SchedulerConfig(depth=depth, prefix_cache=False, cost_table=lambda info: table)
    sink: list[list[StepRecord]] = [[]]
    results = []
    scheduler = Scheduler(
        engine_factory=make, config=config, on_step=lambda record: sink[0].append(record)
    )
    async with scheduler:
        warm = [0.3 * n for n in range(12)]
        await run_load(scheduler, make_load(prompts[:half], warm, tokens, 1), Observed(), sink)
        calibration = Observed()
        # Sparse and crowded: prompts alone, and batches of several sizes.
        times = [4.0 * n for n in range(8)] + [34 + 0.4 * n for n in range(24)]
        await run_load(scheduler, make_load(prompts[:half], times, tokens, 2), calibration, sink)
        machine = machine_of(scheduler.info, table, calibration)
        costs = machine.costs
        chances = " ".join(f"{rate:.2f}" for rate in machine.acceptance.rates)
        console.print(
            f"calibrated: {1 / costs.token_s:.0f} prompt tokens/s, {costs.chunk_s * 1e3:.0f} ms a "
            f"chunk, gap {costs.gap_s * 1e3:.1f} ms, host {costs.host_s * 1e3:.1f} ms, noise "
            f"{costs.noise:.2f}, acceptance given the ones before {chances or 'none'}"
        )
        for number, rate in enumerate(rates):
            load = make_load(
                prompts[half:], poisson_times(rate, seconds, 100 + number), tokens, 10 + number
            )
            observed = Observed()
            await run_load(scheduler, load, observed, sink)
            mine = own_table(means_of(table, costs.noise), observed.steps)
            own = replace(machine, costs=replace(costs, decode=TableCosts(mine)))
            sims = {
                name: [
                    simulated_numbers(
                        simulated(spec, replace(load, seed=seed), config), load.times[0]
                    )
                    for seed in range(repeats)
                ]
                for name, spec in (("simulated", machine), ("cycle times of the run", own))
            }
            shapes = cycle_times(observed.steps)
            drift = [
                statistics.median(t) / TableCosts(table).seconds(*shape)
                for shape, t in shapes.items()
                if len(t) >= LEAST_SAMPLES
            ]
            title = f"{rate:g} requests/s, {len(load.times)} in {seconds:g} s"
            found, rows = compare(title, real_numbers(observed), sims)
            console.print(found)
            if drift:
                console.print(
                    f"cycles of the run over tune's, by shape: {min(drift):.2f} … "
                    f"{max(drift):.2f}, median {statistics.median(drift):.2f}"
                )
            results += [{"rate": rate, "requests": len(load.times), **row} for row in rows]
    return results


def main(
    rates: Annotated[str, typer.Option(help="Requests per second.")] = "0.4,0.8,1.2",
    seconds: Annotated[float, typer.Option(help="Length of each load.")] = 120.0,
    tokens: Annotated[int, typer.Option(help="Output tokens per request.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Longest prompt.")] = 96,
    depth: Annotated[str, typer.Option(help="auto or 0 … 8.")] = "auto",
    max_rows: Annotated[int, typer.Option(help="Rows at once.")] = 8,
    tune_seconds: Annotated[float, typer.Option(help="Time to measure cycles for.")] = 60.0,
    repeats: Annotated[int, typer.Option(help="Simulated runs; the median counts.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON file for all numbers.")] = None,
) -> None:
    """Run, simulate and compare."""
    config = EngineConfig(model=MODEL_DIR, max_rows=max_rows, context=1024)
    config.validate()
    found = prepare_blas(config.blas)
    chosen: Depth = "auto" if depth == "auto" else int(depth)

    def make() -> Engine:
        from engine.load import load_engine

        return load_engine(config)

    console = Console(width=110, highlight=False)
    console.print(f"BLAS {found.name}; depth {depth}, {max_rows} rows, {tokens} tokens a request")
    table = tuned(make, depth=chosen, seconds=tune_seconds)
    work = partial(
        run,
        make,
        table,
        depth=chosen,
        rates=[float(rate) for rate in rates.split(",")],
        seconds=seconds,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        repeats=repeats,
        console=console,
    )
    results = anyio.run(work)
    if output is not None:
        output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
