"""What long prompts do to running streams: the gaps between their tokens, and the prompts' time to
first token, at several bounds side by side.

    python -m tests.benchmarks.gap                                  # the bundled model
    python -m tests.benchmarks.gap --gaps none,0.5,0.25,0.15 --streams 4 --prompts 3

Per setting the real scheduler runs `streams` streams; when they and the estimates are warm (one
prompt of a third of the length has gone by), `prompts` long ones arrive at once. A gap is the time
between two deliveries to one stream, counted from the prompts' arrival to the last one's first
token. Streams are sampled without an end; where one is full, another takes its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import Engine, SamplingParams
from engine.tiny import MODEL_DIR
from scheduler import GenerationRequest, Scheduler, SchedulerConfig, Statistics, Tokens
from scheduler.config import Depth
from tests.benchmarks.speed import held_out_prompts

WARM_TOKENS = 40
"""Tokens of each stream before anything is measured."""


@dataclass
class Run:
    """One setting."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    """Seconds from a long prompt's arrival to its first token."""
    seconds: float = 0.0
    stream_tokens: int = 0
    """Of all streams while the prompts were there."""
    over: int = 0
    steps: int = 0
    share: float = 0.0
    """Of the contended time, the prompts'; as estimated."""
    error: float = 0.0


@dataclass
class Scene:
    """One scheduler and what runs on it."""

    scheduler: Scheduler
    temperature: float
    run: Run = field(default_factory=Run)
    measuring: bool = False
    warm: list[int] = field(default_factory=list)
    """Tokens of each stream."""

    def request(self, name: str, prompt: list[int], max_tokens: int) -> GenerationRequest:
        sampling = SamplingParams(temperature=self.temperature, seed=len(prompt))
        return GenerationRequest(
            request_id=name, prompt_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens
        )

    async def stream(self, number: int, prompt: list[int]) -> None:
        """Streams until cancelled."""
        room = self.scheduler.limits.room(len(prompt))
        turn = 0
        while True:
            turn += 1
            request = self.request(f"stream-{number}-{turn}", prompt, room)
            last: float | None = None
            async with self.scheduler.submit(request) as handle:
                async for event in handle:
                    if not isinstance(event, Tokens):
                        continue
                    self.warm[number] += len(event.ids)
                    if self.measuring:
                        self.run.stream_tokens += len(event.ids)
                        if last is not None:
                            self.run.gaps.append(event.at - last)
                    last = event.at

    async def first_token(self, name: str, prompt: list[int]) -> float:
        async with self.scheduler.submit(self.request(name, prompt, 1)) as handle:
            async for _ in handle:
                pass
        assert handle.finished is not None
        usage = handle.finished.usage
        assert usage.first_token_at is not None
        return usage.first_token_at - usage.submitted_at

    async def measure(self, streams: list[list[int]], prompts: list[list[int]]) -> Run:
        self.warm = [0] * len(streams)
        async with anyio.create_task_group() as group:
            for number, prompt in enumerate(streams):
                group.start_soon(self.stream, number, prompt)
            while min(self.warm) < WARM_TOKENS:
                await anyio.sleep(0.01)
            await self.first_token("warm", prompts[0][-len(prompts[0]) // 3 :])
            before, began = self.scheduler.statistics(), anyio.current_time()
            self.measuring = True

            async def one(number: int, prompt: list[int]) -> None:
                self.run.firsts.append(await self.first_token(f"long-{number}", prompt))

            async with anyio.create_task_group() as long:
                for number, prompt in enumerate(prompts[1:]):
                    long.start_soon(one, number, prompt)
            self.measuring = False
            self.run.seconds = anyio.current_time() - began
            self.note(before, self.scheduler.statistics())
            group.cancel_scope.cancel()
        return self.run

    def note(self, before: Statistics, after: Statistics) -> None:
        run = self.run
        run.over = after.gap_exceeded - before.gap_exceeded
        run.steps = after.steps - before.steps
        contended = after.contended_s - before.contended_s
        prefill = after.contended_prefill_s - before.contended_prefill_s
        run.share = prefill / contended if contended else 0.0
        run.error = after.mixed_step_error


def long_prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """Held-out text, strung together; no two with a common beginning."""
    pool = [token for prompt in held_out_prompts(model, 1000, 4096) for token in prompt]
    return [
        [pool[(place + number * 977) % len(pool)] for place in range(tokens)]
        for number in range(count)
    ]


def report(runs: dict[float | None, Run], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("gap, s", "p50", "p90", "p99", "max", "over", "TTFT mean", "TTFT max")
    for column in (*columns, "streams, tok/s", "share", "error"):
        table.add_column(column, justify="right")
    for gap, run in runs.items():
        cuts = statistics.quantiles(run.gaps, n=100)
        bounded = gap is not None
        table.add_row(
            "none" if gap is None else f"{gap:g}",
            *(f"{cuts[percent - 1]:.3f}" for percent in (50, 90, 99)),
            f"{max(run.gaps):.3f}",
            f"{run.over} of {run.steps}" if bounded else "",
            f"{statistics.mean(run.firsts):.1f}",
            f"{max(run.firsts):.1f}",
            f"{run.stream_tokens / run.seconds:.1f}",
            f"{run.share:.2f}" if bounded else "",
            f"{run.error:.2f}" if bounded else "",
        )
    return table


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = MODEL_DIR,
    gaps: Annotated[str, typer.Option(help="Bounds in seconds, or none.")] = "none,0.5,0.25,0.15",
    share: Annotated[float, typer.Option(help="prefill_share.")] = 0.25,
    streams: Annotated[int, typer.Option(help="Running streams.")] = 4,
    prompts: Annotated[int, typer.Option(help="Long prompts that arrive at once.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 1500,
    chunk: Annotated[int | None, typer.Option(help="prefill_chunk; the engine's own.")] = None,
    depth: Annotated[str, typer.Option(help="auto or a number.")] = "auto",
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.6,
    blas: Annotated[str, typer.Option(help="auto or reference.")] = "auto",
) -> None:
    """Compare bounds on the gap on this machine."""
    config = EngineConfig(model=model, blas=blas, prefill_chunk=chunk, prefix_memory=0)  # type: ignore[arg-type]
    config.validate()
    found = prepare_blas(config.blas)
    console = Console(width=130)
    console.print(f"BLAS {found.name}; {streams} streams, then {prompts} × {prompt_tokens} tokens")
    chosen: Depth = "auto" if depth == "auto" else int(depth)
    runs: dict[float | None, Run] = {}
    for text in gaps.split(","):
        gap = None if text == "none" else float(text)
        settings = SchedulerConfig(
            depth=chosen, prefill_chunk=chunk, max_token_gap_s=gap, prefill_share=share
        )
        running = held_out_prompts(model, streams, 64)
        arriving = long_prompts(model, prompts + 1, prompt_tokens)
        runs[gap] = anyio.run(_measure, _loader(config), settings, temperature, running, arriving)
        run = runs[gap]
        console.print(f"{text}: {len(run.gaps)} gaps in {run.seconds:.0f} s", highlight=False)
    console.print(report(runs, "gaps between deliveries to a stream, seconds"))


def _loader(config: EngineConfig) -> Callable[[], Engine]:
    def load() -> Engine:
        from engine.load import load_engine

        return load_engine(config)

    return load


async def _measure(
    engine: Callable[[], Engine],
    settings: SchedulerConfig,
    temperature: float,
    streams: list[list[int]],
    prompts: list[list[int]],
) -> Run:
    async with Scheduler(engine_factory=engine, config=settings) as scheduler:
        return await Scene(scheduler, temperature).measure(streams, prompts)


if __name__ == "__main__":
    typer.run(main)
