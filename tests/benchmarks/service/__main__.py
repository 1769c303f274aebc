"""Runs the comparisons and prints Markdown: `python -m tests.benchmarks.service --help`."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engine.tiny import MODEL_DIR
from tests.benchmarks.service.client import Measured, measured
from tests.benchmarks.service.load import Load, Outcome
from tests.benchmarks.service.stalls import stalls
from tests.benchmarks.speed import held_out_prompts

ROWS = 256
SESSIONS = (1, 4, 16)
STREAMS = (1, 16, 64, 256)
STEPS = {1: 250, 16: 120, 64: 50, 256: 24}
"""Bursts per stream, by streams."""
STEP_S = 0.0003
"""Length of a step per stream, at least `SHORTEST_S`: so long that every burst is sent before the
next one comes, as behind a real engine."""
SHORTEST_S = 0.002
STOPS = ("\n\n\n\n", "Observation:", "class Zebra", "<|end of answer|>")
"""Of which the text has beginnings but none whole."""
PROMPT = tuple(range(100, 116))
VARIANTS: dict[str, Callable[..., Load]] = {
    "plain": Load,
    "5 logprobs": lambda **load: Load(logprobs=5, **load),
    "4 stop strings": lambda **load: Load(stops=STOPS, **load),
    "gateway": lambda **load: Load(gateway=True, **load),
}


class Part(StrEnum):
    """What to measure."""

    MODEL = "model"
    BURSTS = "bursts"
    STALLS = "stalls"


@dataclass
class Pair:
    """Both ways in, over all rounds."""

    alone: list[Outcome] = field(default_factory=list)
    served: list[Outcome] = field(default_factory=list)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median (lowest … highest)."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}…{high:,.{digits}f})"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print(flush=True)


def compare_model(model: Path, rounds: int, tokens: int) -> Iterator[Sequence[str]]:
    """The bundled model alone and served; the order changes from round to round."""
    order = random.Random(0)
    with measured(model=model, bursts=False, depth=3, rows=16) as child:
        for sessions in SESSIONS:
            prompts = held_out_prompts(model, sessions, 96)
            pair = Pair()
            for turn in range(rounds + 1):
                load = Load(prompts=prompts, tokens=tokens, seed=turn, temperature=0.6)
                for way in order.sample(("alone", "served"), 2):
                    outcome = getattr(child, way)(load)
                    if turn:  # the first round warms up
                        getattr(pair, way).append(outcome)
            yield from _model_rows(sessions, pair)


def _model_rows(sessions: int, pair: Pair) -> Iterator[Sequence[str]]:
    figures: dict[str, tuple[Callable[[Outcome], float], int]] = {
        "tokens/s": (lambda o: o.tokens / o.wall_s, 1),
        "time to first token, ms": (lambda o: 1e3 * statistics.median(o.ttft_s), 1),
        "inter-token latency, ms": (lambda o: 1e3 * statistics.median(o.token_s), 2),
        "CPU ms per token": (lambda o: 1e3 * o.cpu_s / o.tokens, 2),
    }
    for name, (figure, digits) in figures.items():
        alone, served = map(figure, pair.alone), map(figure, pair.served)
        a, s = list(alone), list(served)
        ratios = [y / x for x, y in zip(a, s, strict=True)]
        yield str(sessions), name, spread(a, digits), spread(s, digits), spread(ratios, 3)


def _cost(outcome: Outcome) -> float:
    """CPU microseconds per token while all streams run."""
    return 1e6 * outcome.steady_cpu_s / outcome.steady_tokens


def compare_bursts(
    model: Path, rounds: int, against: Path | None, names: Sequence[str]
) -> Iterator[Sequence[str]]:
    """Every point on every checkout, rounds interleaved."""
    order = random.Random(0)
    checkouts = [against, None] if against is not None else [None]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                measured(model=model, bursts=True, depth=2, rows=ROWS, checkout=checkout)
            )
            for checkout in checkouts
        ]
        for name in names:
            for streams in STREAMS if name == "plain" else (1, 64):
                for burst in (1, 3):
                    pairs = [Pair() for _ in children]
                    for _ in range(rounds):
                        for n in order.sample(range(len(children)), len(children)):
                            _run(children[n], pairs[n], name, streams, burst)
                    yield name, str(streams), str(burst), *_burst_cells(pairs, burst)


def _run(child: Measured, pair: Pair, name: str, streams: int, burst: int) -> None:
    child.ask("pace", burst=burst, step_s=max(SHORTEST_S, STEP_S * streams))
    load = VARIANTS[name](prompts=[PROMPT] * streams, tokens=1 + burst * STEPS[streams])
    pair.alone.append(child.alone(load))
    pair.served.append(child.served(load))


def _burst_cells(pairs: list[Pair], burst: int) -> Iterator[str]:
    """Of each checkout; of two, the ratio of what they cost when served, round by round."""
    costs = []
    for pair in pairs:
        alone, served = [_cost(o) for o in pair.alone], [_cost(o) for o in pair.served]
        service = [s - a for s, a in zip(served, alone, strict=True)]
        costs.append(served)
        yield from (spread(alone), spread(served), spread(service))
        yield f"{statistics.median(service) * burst:,.0f}"
    if len(costs) == 2:
        yield spread([after / before for before, after in zip(*costs, strict=True)], 2)


def main(
    parts: Annotated[list[Part] | None, typer.Argument(help="All when none is named.")] = None,
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = MODEL_DIR,
    rounds: Annotated[int, typer.Option(help="Rounds of each comparison.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens per session of the model.")] = 64,
    only: Annotated[str, typer.Option(help="Variants of bursts, comma-separated.")] = ",".join(
        VARIANTS
    ),
    against: Annotated[
        Path | None,
        typer.Option(help="Another checkout that has this package: bursts on both, in turn."),
    ] = None,
) -> None:
    """What the service costs beside the engine."""
    wanted = set(parts or Part)
    model = model.resolve()
    if Part.MODEL in wanted:
        print("### The bundled model, depth 3")
        table(
            ("sessions", "", "engine alone", "served", "ratio"),
            compare_model(model, rounds, tokens),
        )
    if Part.BURSTS in wanted:
        print("### CPU microseconds per token of the server, an engine that has its tokens ready")
        cells = ("alone", "served", "the service", "the same per burst")
        columns = ["", "streams", "burst", *cells]
        if against is not None:
            columns += [*(f"{cell}, after" for cell in cells), "served, after/before"]
        table(columns, compare_bursts(model, rounds, against, only.split(",")))
    if Part.STALLS in wanted:
        print("### Longest stay of the event loop in one callback, one request, CPU ms")
        found = asyncio.run(stalls(model, rounds))
        table(
            ("request", "ms"),
            ((s.what if s.ended == "OK" else s.ended, f"{1e3 * s.cpu_s:.1f}") for s in found),
        )


if __name__ == "__main__":
    typer.run(main)
