"""Tokens per second at depth auto (and fixed depths) against depth 0, side by side in one run.

    python -m tests.benchmarks.speed                        # the bundled model, held-out code
    python -m tests.benchmarks.speed --model DIR --sessions 1,4,8 --rounds 5

Each setting runs the same held-out prompts through the real scheduler, every round in another
order, so that drift of a noisy machine falls on all alike. Reported are medians over rounds with
the lowest and highest, and each setting's ratio to depth 0 of the same round: of all tokens per
second from submission on, and of the rate a session decodes at after its first token. Sampled text
differs between depths (not in law), but the number of tokens does not: stop tokens are off.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import Engine, SamplingParams
from engine.tiny import MODEL_DIR
from scheduler import Finished, GenerationRequest, Scheduler, SchedulerConfig
from scheduler.config import Depth

HELD_OUT = MODEL_DIR / "heldout.jsonl"


@dataclass
class Run:
    """One setting over all rounds."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second of each round, prefill and queueing included."""
    decoding: list[float] = field(default_factory=list)
    """Tokens per second of a session between its first and last token, mean of each round."""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cycles: int = 0
    tokens: int = 0

    def add(self, seconds: float, finished: list[Finished]) -> None:
        tokens = sum(f.usage.completion_tokens for f in finished)
        self.rates.append(tokens / seconds)
        self.decoding.append(statistics.mean(_decode_rate(f) for f in finished))
        self.tokens += tokens - len(finished)  # first tokens come from prefill
        for f in finished:
            self.cycles += f.usage.cycles
            _add(self.drafted, f.usage.drafted_per_position)
            _add(self.accepted, f.usage.accepted_per_position)

    @property
    def acceptance(self) -> str:
        """Accepted share of each position, of the cycles that tried it."""
        pairs = zip(self.accepted, self.drafted, strict=False)
        return " ".join(f"{a / d:.2f}" for a, d in pairs if d) or "–"


def _decode_rate(finished: Finished) -> float:
    usage = finished.usage
    assert usage.first_token_at is not None
    assert usage.last_token_at is not None
    return (usage.completion_tokens - 1) / (usage.last_token_at - usage.first_token_at)


def _add(total: list[int], counts: tuple[int, ...]) -> None:
    total.extend([0] * (len(counts) - len(total)))
    for i, count in enumerate(counts):
        total[i] += count


def held_out_prompts(model: Path, count: int, longest: int) -> list[list[int]]:
    """Token ids of held-out prompts, the longest cut at the front."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    random.Random(1).shuffle(texts)
    return [tokenizer.encode(text).ids[-longest:] for text in texts[:count]]


async def measure(
    scheduler: Scheduler,
    *,
    prompts: list[list[int]],
    sessions: int,
    tokens: int,
    temperature: float,
    seed: int,
) -> tuple[float, list[Finished]]:
    """Run all prompts, `sessions` at a time; seconds, and how each request ended.

    The clock runs from the first submission to the last token, prefill included.
    """
    waiting = list(enumerate(prompts))
    finished: list[Finished] = []
    began = anyio.current_time()

    async def worker() -> None:
        while waiting:
            index, prompt = waiting.pop()
            request = GenerationRequest(
                request_id=f"{seed}-{index}",
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=temperature, seed=seed * 1000 + index),
                max_tokens=tokens,
            )
            async with scheduler.submit(request) as handle:
                async for event in handle:
                    if isinstance(event, Finished):
                        finished.append(event)

    async with anyio.create_task_group() as group:
        for _ in range(sessions):
            group.start_soon(worker)
    return anyio.current_time() - began, finished


async def compare(
    engine: Callable[[], Engine],
    prompts: list[list[int]],
    depths: list[Depth],
    *,
    sessions: int,
    rounds: int,
    tokens: int,
    temperature: float,
) -> dict[Depth, Run]:
    """All settings on one loaded engine each, rounds interleaved."""
    runs: dict[Depth, Run] = {depth: Run() for depth in depths}
    order = random.Random(0)
    async with AsyncExitStack() as stack:
        schedulers = {}
        for depth in depths:
            scheduler = Scheduler(engine_factory=engine, config=SchedulerConfig(depth=depth))
            schedulers[depth] = await stack.enter_async_context(scheduler)
        load = partial(measure, prompts=prompts, sessions=sessions, tokens=tokens)
        for scheduler in schedulers.values():  # shapes, the controller's table
            await load(scheduler, temperature=temperature, seed=0)
        for turn in range(1, rounds + 1):
            for depth in order.sample(depths, len(depths)):
                result = await load(schedulers[depth], temperature=temperature, seed=turn)
                runs[depth].add(*result)
    return runs


def report(runs: dict[Depth, Run], title: str) -> Table:
    """Medians with lowest and highest, and ratios to depth 0 of the same round."""
    table = Table(title=title, title_justify="left")
    columns = ("depth", "tokens/s", "×", "decode/session", "×", "tokens/cycle", "acceptance")
    for column in columns:
        table.add_column(column, justify="right")
    base = runs[0]
    for depth, run in runs.items():
        table.add_row(
            str(depth),
            _spread(run.rates, 1),
            _spread([a / b for a, b in zip(run.rates, base.rates, strict=True)], 2),
            _spread(run.decoding, 1),
            _spread([a / b for a, b in zip(run.decoding, base.decoding, strict=True)], 2),
            f"{run.tokens / max(1, run.cycles):.2f}",
            run.acceptance,
        )
    return table


def _spread(values: list[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}…{max(values):.{digits}f})"


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = MODEL_DIR,
    sessions: Annotated[str, typer.Option(help="Concurrent sessions, comma-separated.")] = "1,4",
    depths: Annotated[str, typer.Option(help="Settings beside depth 0.")] = "auto,1,2,3",
    rounds: Annotated[int, typer.Option(help="Rounds per setting.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.6,
    prompt_tokens: Annotated[int, typer.Option(help="Longest prompt.")] = 96,
    requests: Annotated[int, typer.Option(help="Requests per session and round.")] = 2,
    blas: Annotated[str, typer.Option(help="auto or reference.")] = "auto",
) -> None:
    """Compare speculation with plain decoding on this machine."""
    config = EngineConfig(model=model, blas=blas)  # type: ignore[arg-type]
    config.validate()
    found = prepare_blas(config.blas)

    def engine() -> Engine:
        from engine.load import load_engine

        return load_engine(config)

    console = Console(width=120)
    console.print(f"{platform.machine()}, {platform.processor() or platform.platform()}")
    console.print(f"BLAS {found.name}, temperature {temperature}, {tokens} tokens per request")
    settings: list[Depth] = [0, *(d if d == "auto" else int(d) for d in depths.split(","))]  # type: ignore[list-item]
    for count in (int(s) for s in sessions.split(",")):
        prompts = held_out_prompts(model, count * requests, prompt_tokens)
        work = partial(
            compare,
            engine,
            prompts,
            settings,
            sessions=count,
            rounds=rounds,
            tokens=tokens,
            temperature=temperature,
        )
        runs = anyio.run(work)
        console.print(report(runs, f"{count} session{'s' if count > 1 else ''}"))


if __name__ == "__main__":
    typer.run(main)
