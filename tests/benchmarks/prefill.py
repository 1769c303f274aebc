"""A step with the prompts of several rows: in passes they share, and one by one.

.venv/bin/python -m tests.benchmarks.prefill [--model DIR] [--rounds 7]

Seconds from `submit` to `collect` of one step, and nodes of its graph: on a GPU the host encodes
node after node, and short prompts cost little else. Both ways take turns in one engine, in random
order; reported are medians with lowest and highest.
"""

from __future__ import annotations

import io
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig, WeightsChoice
from engine.load import load_engine
from engine.plan import PrefillChunk, RowSpec, SamplingParams, StepPlan, page_array, pages_needed
from engine.tiny import MODEL_DIR

if TYPE_CHECKING:
    from engine.runner import MLXEngine

MIXES: dict[str, list[int]] = {
    **{f"{rows} of {size}": [size] * rows for size in (16, 64) for rows in (1, 2, 4, 8)},
    "8 of 9…64": [9, 64, 31, 17, 48, 12, 25, 38],
    "7 of 8, 1 of 200": [8, 8, 8, 200, 8, 8, 8, 8],
}
"""Prompt lengths of the rows of one step."""

SPEC = RowSpec(sampling=SamplingParams(temperature=0.7, seed=1), max_tokens=8)


class Steps:
    """Runs steps of prompts over one engine, and counts what they are made of."""

    def __init__(self, engine: MLXEngine) -> None:
        self.engine = engine
        self._ids = itertools.count(1)
        self._rng = np.random.default_rng(0)

    def run(self, sizes: list[int], *, together: bool) -> float:
        """Seconds that one step with these prompts takes."""
        self.engine._builder._prompts._together = together
        chunks = self._chunks(sizes)
        began = time.perf_counter()
        self.engine.submit(StepPlan(step=next(self._ids), prefill=chunks))
        rows = self.engine.collect().rows
        seconds = time.perf_counter() - began
        assert all(row.tokens and row.fault is None for row in rows)
        self.release(chunks)
        return seconds

    def nodes(self, sizes: list[int], *, together: bool) -> int:
        """Nodes of the graph of such a step."""
        import mlx.core as mx  # once the engine has chosen a BLAS

        from engine.step import Step

        self.engine._builder._prompts._together = together
        chunks = self._chunks(sizes)
        step = Step(plan=StepPlan(step=next(self._ids), prefill=chunks))
        with self.engine._building():
            self.engine._builder.build(step)
        dot = io.StringIO()
        mx.export_to_dot(dot, *step.pending)
        self.engine._on_device(lambda: mx.eval(step.pending))
        step.pending.clear()
        self.release(chunks)
        return dot.getvalue().count("shape=rectangle")

    def release(self, chunks: tuple[PrefillChunk, ...]) -> None:
        released = tuple(chunk.row for chunk in chunks)
        self.engine.submit(StepPlan(step=next(self._ids), release=released))
        self.engine.collect()

    def _chunks(self, sizes: list[int]) -> tuple[PrefillChunk, ...]:
        info, chunks, page = self.engine.info, [], 1
        for size in sizes:
            pages = list(range(page, page + pages_needed(size + SPEC.max_tokens, info.page_size)))
            page += len(pages)
            chunks.append(
                PrefillChunk(
                    row=next(self._ids),
                    tokens=self._rng.integers(0, info.vocab_size, size, dtype=np.int32),
                    start=0,
                    pages=page_array(pages),
                    last=True,
                    spec=SPEC,
                )
            )
        return tuple(chunks)


def measure(steps: Steps, rounds: int) -> dict[str, dict[bool, list[float]]]:
    """Seconds by mix and by whether passes are shared; the first round of each is not counted."""
    found = {name: {together: list[float]() for together in (False, True)} for name in MIXES}
    order, pairs = random.Random(0), list(itertools.product(MIXES, (False, True)))
    for turn in range(rounds + 1):
        for name, together in order.sample(pairs, len(pairs)):
            seconds = steps.run(MIXES[name], together=together)
            if turn:
                found[name][together].append(seconds)
    return found


def main(
    model: Annotated[Path, typer.Option(help="checkpoint folder")] = MODEL_DIR,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    packed: Annotated[bool, typer.Option(help="keep quantised weights packed")] = False,
) -> None:
    """Print the table."""
    weights: WeightsChoice = "keep" if packed else "auto"
    engine = load_engine(EngineConfig(model=model, weights=weights, mtp_gate="off"))
    steps = Steps(engine)
    table = Table("prompts", "one by one, ms", "shared, ms", "x", "nodes", "nodes shared")
    for name, ways in measure(steps, rounds).items():
        spread = {
            together: f"{statistics.median(s) * 1e3:.0f} ({min(s) * 1e3:.0f}…{max(s) * 1e3:.0f})"
            for together, s in ways.items()
        }
        gain = statistics.median(ways[False]) / statistics.median(ways[True])
        nodes = [steps.nodes(MIXES[name], together=together) for together in (False, True)]
        table.add_row(name, spread[False], spread[True], f"{gain:.2f}", *map(str, nodes))
    Console().print(f"{engine.info.model} on {engine.info.device}, {engine.info.blas}")
    Console(width=120).print(table)
    engine.close()


if __name__ == "__main__":
    typer.run(main)
