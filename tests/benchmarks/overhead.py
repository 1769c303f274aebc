"""What the scheduler itself costs: `python -m tests.benchmarks.overhead [--profile]`. No model.

The real core before a simulated device, two steps in flight, nobody's clock: CPU microseconds of
`submit`, `plan` and `commit` (with what the loop calls beside them: `next_due`, `acknowledge`)
while all rows decode at depth 3 and requests end and start as they do in service, with n more
waiting. Every request has a deadline, a tenant of 100 and a class of three.
"""

from __future__ import annotations

import cProfile
import pstats
import random
import statistics
import time
from collections import deque
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.plan import SamplingParams, StepPlan, StepResult
from scheduler import GenerationRequest, Priority, SchedulerConfig, SchedulerCore, Tokens
from scheduler.costs import CostTable
from scheduler.simulation.costs import AcceptanceModel, MachineCosts, MachineSpec, TableCosts
from scheduler.simulation.engine import STOP, SimulatedEngine, work_seed

STEP_S = 0.02
IN_FLIGHT = 2
CYCLES = {(1, 0): 0.01, (256, 3): 0.02}
PROMPT, LEAST, MOST = 64, 100, 300
"""Tokens of a prompt, and of the shortest and longest text."""


class Bench:
    """A core that always has `rows` rows and `waiting` requests behind them."""

    def __init__(self, *, rows: int, waiting: int) -> None:
        pages = rows * 64
        spec = MachineSpec(
            costs=MachineCosts(
                decode=TableCosts(CostTable(seconds={(1, 0): 0.01, (256, 3): 0.02})), token_s=1e-4
            ),
            acceptance=AcceptanceModel(),
            max_rows=rows,
            pages=pages,
            prefill_chunk=1024,
        )
        self.engine = SimulatedEngine(spec, seed=1)
        config = SchedulerConfig(
            depth=3, max_queue=waiting + rows, max_queued_tokens=10**9, max_token_gap_s=10.0
        )
        self.core = SchedulerCore(info=self.engine.info, config=config, max_in_flight=IN_FLIGHT)
        self.rng = random.Random(1)
        self.now, self.made, self.waiting = 0.0, 0, waiting
        self.results: deque[StepResult] = deque()
        self.spent: dict[str, list[float]] = {"submit": [], "plan": [], "commit": []}
        self.rows = 0

    def step(self) -> None:
        """Top up the queue, plan and run a step, and commit the one before it."""
        self.now += STEP_S
        missing = self.waiting + 8 - len(self.core._queue)
        requests = [self._request() for _ in range(missing)]
        began = time.process_time()
        for request in requests:
            self.core.submit(request, self.now)
        if requests:
            self.spent["submit"].append((time.process_time() - began) / len(requests))
        began = time.process_time()
        self.core.next_due()
        plan: StepPlan = self.core.plan(self.now)
        self.spent["plan"].append(time.process_time() - began)
        self.rows = len(plan.decode.rows) if plan.decode else 0
        self.results.append(self.engine.run(plan))
        if len(self.results) < IN_FLIGHT:
            return
        result = self.results.popleft()
        began = time.process_time()
        for request_id, event in self.core.commit(result, self.now):
            if isinstance(event, Tokens):
                self.core.acknowledge(request_id, len(event.ids), self.now)
        self.spent["commit"].append(time.process_time() - began)

    def _request(self) -> GenerationRequest:
        self.made += 1
        rng = self.rng
        return GenerationRequest(
            request_id=f"r{self.made}",
            prompt_ids=tuple(rng.randrange(1, 1 << 20) for _ in range(PROMPT)),
            sampling=SamplingParams(seed=work_seed(self.made, rng.randint(LEAST, MOST))),
            max_tokens=MOST,
            stop_ids=(STOP,),
            deadline=self.now + 10_000 + rng.random(),
            tenant=f"t{rng.randrange(100)}",
            priority=rng.choice(list(Priority)),
        )


def warmed(rows: int, waiting: int) -> Bench:
    bench = Bench(rows=rows, waiting=waiting)
    while bench.rows < rows - 4:
        bench.step()
    for times in bench.spent.values():
        times.clear()
    return bench


def main(
    steps: Annotated[int, typer.Option(help="Steps measured per point.")] = 300,
    profile: Annotated[bool, typer.Option(help="Profile the largest point.")] = False,
) -> None:
    """Measure the scheduler."""
    points = [(rows, 0) for rows in (16, 64, 256)] + [(256, n) for n in (100, 1000, 10_000)]
    if profile:
        bench = warmed(*points[-1])
        with cProfile.Profile() as found:
            for _ in range(steps):
                bench.step()
        pstats.Stats(found).sort_stats("tottime").print_stats(28)
        return
    table = Table(title="CPU microseconds; median (90th percentile)", title_justify="left")
    for column in ("rows", "waiting", "submit", "plan", "commit", "plan + commit per row"):
        table.add_column(column, justify="right")
    for rows, waiting in points:
        bench = warmed(rows, waiting)
        for _ in range(steps):
            bench.step()
        plan, commit = bench.spent["plan"], bench.spent["commit"]
        both = statistics.median(p + c for p, c in zip(plan, commit, strict=False)) / rows
        cells = [_spread(bench.spent[name]) for name in ("submit", "plan", "commit")]
        table.add_row(str(rows), f"{waiting:,}", *cells, f"{both * 1e6:.1f}")
    Console(width=110).print(table)


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    high = ordered[int(0.9 * len(ordered))]
    return f"{statistics.median(ordered) * 1e6:,.0f} ({high * 1e6:,.0f})"


if __name__ == "__main__":
    typer.run(main)
