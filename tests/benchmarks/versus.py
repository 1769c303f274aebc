"""Tokens per second beside mlx-lm, on the same weights and prompts, side by side in one run.

    pip install mlx-lm
    python -m tests.benchmarks.versus                                   # the bundled model
    python -m tests.benchmarks.versus --model DIR --scripted 0.85,0.7,0.55 --sessions 1,4,8,16,32

Contenders: selfdraft at depth 0 and `auto` through its real scheduler; mlx-lm's `BatchGenerator`,
and for one session its single-stream `generate_step` (the core of `stream_generate`). On a CPU,
where packed weights make mlx-lm ten times slower, it runs with its weights dequantised, under the
same OpenBLAS. Every request has the same number of prompt and output tokens for everybody, end
tokens are ignored, all sample at one temperature. Rounds are interleaved in random order; reported
are medians with lowest and highest, and ratios to the best mlx-lm contender of the same round.

Two rates: all tokens over the whole time, prefill included; and after the first token of the last
session, when all of them decode.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import typer
from rich.console import Console
from rich.table import Table

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import Engine, SamplingParams
from engine.tiny import MODEL_DIR
from scheduler import GenerationRequest, Scheduler, SchedulerConfig, Tokens
from scheduler.config import Depth
from scheduler.depth import DepthPolicy, depth_policy

Prompts = list[list[int]]
Rates = tuple[float, float]
"""Tokens per second: overall, and while all sessions decode."""
Contender = Callable[[Prompts, int, float, int], Any]
"""(prompts, tokens, temperature, seed) → awaitable of `Rates`."""


class Clock:
    """Arrival times of tokens, and the two rates that follow."""

    def __init__(self, sessions: int) -> None:
        self.began = time.perf_counter()
        self._first: dict[int, float] = {}
        self._arrivals: list[tuple[float, int]] = []
        self._sessions = sessions

    def arrived(self, session: int, tokens: int = 1) -> None:
        now = time.perf_counter()
        self._first.setdefault(session, now)
        self._arrivals.append((now, tokens))

    def rates(self) -> Rates:
        assert len(self._first) == self._sessions
        total = sum(count for _, count in self._arrivals)
        ended = self._arrivals[-1][0]
        everybody = max(self._first.values())
        after = sum(count for at, count in self._arrivals if at > everybody)
        return total / (ended - self.began), after / max(ended - everybody, 1e-9)


async def selfdraft(
    scheduler: Scheduler,
    policy: DepthPolicy,
    prompts: Prompts,
    tokens: int,
    temperature: float,
    seed: int,
) -> Rates:
    """All prompts at once through the scheduler, which is idle, at the depths `policy` chooses."""
    scheduler._core._cohorts.free._policy = policy
    clock = Clock(len(prompts))

    async def session(index: int) -> None:
        request = GenerationRequest(
            request_id=f"{seed}-{index}",
            prompt_ids=tuple(prompts[index]),
            sampling=SamplingParams(temperature=temperature, seed=1000 * seed + index),
            max_tokens=tokens,
        )
        async with scheduler.submit(request) as handle:
            async for event in handle:
                if isinstance(event, Tokens):
                    clock.arrived(index, len(event.ids))

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(session, index)
    return clock.rates()


class MlxLm:
    """mlx-lm's two ways to generate, over one model."""

    def __init__(self, model: Path, *, dequantize: bool = False) -> None:
        utils: Any = import_module("mlx_lm.utils")
        self._generate: Any = import_module("mlx_lm.generate")
        self._make_sampler: Any = import_module("mlx_lm.sample_utils").make_sampler
        self._model, _ = utils.load_model(model)
        if dequantize:
            import mlx.core as mx

            self._model = utils.dequantize_model(self._model)
            self._model.set_dtype(mx.float32)
            mx.eval(self._model.parameters())

    async def stream(self, prompts: Prompts, tokens: int, temperature: float, seed: int) -> Rates:
        """The first prompt alone."""
        import mlx.core as mx

        mx.random.seed(seed)
        clock = Clock(1)
        sampler = self._make_sampler(temperature)
        steps = self._generate.generate_step(
            mx.array(prompts[0]), self._model, max_tokens=tokens, sampler=sampler
        )
        for _token, _ in steps:
            clock.arrived(0)
        return clock.rates()

    async def batch(self, prompts: Prompts, tokens: int, temperature: float, seed: int) -> Rates:
        """All prompts at once."""
        import mlx.core as mx

        mx.random.seed(seed)
        sampler = self._make_sampler(temperature)
        generator = self._generate.BatchGenerator(
            self._model, max_tokens=tokens, sampler=sampler, stop_tokens=[]
        )
        clock = Clock(len(prompts))
        for _ in generator.insert(prompts):
            pass
        left = len(prompts) * tokens
        while left:
            for response in generator.next_generated():
                clock.arrived(response.uid)
                left -= 1
        generator.close()
        return clock.rates()


def make_prompts(model: Path, vocab: int, sessions: int, length: int, seed: int) -> Prompts:
    """Held-out code for the bundled model, random tokens for others; all of one length."""
    rng = random.Random(seed)
    if model != MODEL_DIR:
        return [[rng.randrange(1, vocab) for _ in range(length)] for _ in range(sessions)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = (MODEL_DIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    encoded = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    long = [ids[-length:] for ids in encoded if len(ids) >= length]
    return [long[(seed * sessions + i) % len(long)] for i in range(sessions)]


async def compare(
    contenders: dict[str, Contender],
    prompts: Callable[[int], Prompts],
    *,
    rounds: int,
    tokens: int,
    temperature: float,
) -> dict[str, list[Rates]]:
    """Rounds of all contenders in random order, after one round to warm up."""
    results: dict[str, list[Rates]] = {name: [] for name in contenders}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(sorted(contenders), len(contenders)):
            rates = await contenders[name](prompts(turn), tokens, temperature, turn)
            if turn:
                results[name].append(rates)
    return results


def report(results: dict[str, list[Rates]], title: str) -> tuple[Table, list[dict[str, Any]]]:
    """A table for people and rows for a file."""
    table = Table(title=title, title_justify="left")
    for column in ("", "tokens/s", "× mlx-lm", "while all decode", "× mlx-lm"):
        table.add_column(column, justify="left" if not column else "right")
    rounds = len(next(iter(results.values())))
    rows = []
    for name, rates in results.items():
        cells: list[str] = []
        row: dict[str, Any] = {"contender": name}
        for which, label in enumerate(("overall", "decoding")):
            mine = [r[which] for r in rates]
            theirs = [
                max((results[n][t][which] for n in results if n.startswith("mlx-lm")), default=0)
                for t in range(rounds)
            ]
            ratios = [a / b for a, b in zip(mine, theirs, strict=True) if b]
            cells += [_spread(mine, 1), _spread(ratios, 2) if ratios else "–"]
            row[label], row[f"{label}_ratios"] = mine, ratios
        table.add_row(name, *cells)
        rows.append(row)
    return table, rows


def _spread(values: list[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}…{max(values):.{digits}f})"


async def run(
    config: EngineConfig,
    *,
    sessions: list[int],
    depths: list[Depth],
    scripted: list[float] | None,
    rivals: bool,
    rounds: int,
    tokens: int,
    prompt_tokens: int,
    temperature: float,
    output: Path | None,
) -> None:
    """All session counts, one after the other, on one engine: its kernels compile once."""

    def engine() -> Engine:
        from engine.load import load_engine

        return load_engine(config, scripted=scripted)

    console = Console(width=110)
    rows: list[dict[str, Any]] = []
    settings = SchedulerConfig(max_queue=256)
    async with Scheduler(engine_factory=engine, config=settings) as scheduler:
        info = scheduler.info
        ours: dict[str, Contender] = {}
        for depth in depths:
            policy = depth_policy(depth, info.max_depth)
            ours[f"selfdraft depth {depth}"] = partial(selfdraft, scheduler, policy)
        console.print(f"{info.model} on {info.device}, {info.dtype}, {info.quantization}")
        unpack = info.device.startswith("cpu") and info.quantization != "none"
        rival = MlxLm(config.model, dequantize=unpack) if rivals else None
        for count in sessions:
            contenders = dict(ours)
            if rival is not None:
                contenders["mlx-lm batch"] = rival.batch
                if count == 1:
                    contenders["mlx-lm stream"] = rival.stream
            prompts = partial(make_prompts, config.model, info.vocab_size, count, prompt_tokens)
            gc.collect()
            results = await compare(
                contenders, prompts, rounds=rounds, tokens=tokens, temperature=temperature
            )
            table, measured = report(results, f"{count} sessions")
            console.print(table)
            rows += [row | {"sessions": count} for row in measured]
            if output is not None:
                output.write_text(json.dumps(rows))


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = MODEL_DIR,
    sessions: Annotated[str, typer.Option(help="Concurrent sessions, comma-separated.")] = "1,4",
    depths: Annotated[str, typer.Option(help="Our depths, comma-separated.")] = "0,auto",
    scripted: Annotated[str, typer.Option(help="Acceptance by position, scripted.")] = "",
    rivals: Annotated[bool, typer.Option(help="Run mlx-lm.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds after a first one to warm up.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.6,
    context: Annotated[int, typer.Option(help="Positions per row.")] = 2048,
    output: Annotated[Path | None, typer.Option(help="JSON file for all numbers.")] = None,
) -> None:
    """Compare with mlx-lm on this machine."""
    counts = [int(count) for count in sessions.split(",")]
    chosen: list[Depth] = ["auto" if d == "auto" else int(d) for d in depths.split(",")]
    config = EngineConfig(model=model, max_rows=max(counts), context=context)
    config.validate()
    prepare_blas(config.blas)
    anyio.run(
        partial(
            run,
            config,
            sessions=counts,
            depths=chosen,
            scripted=[float(rate) for rate in scripted.split(",")] if scripted else None,
            rivals=rivals,
            rounds=rounds,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            temperature=temperature,
            output=output,
        )
    )


if __name__ == "__main__":
    typer.run(main)
