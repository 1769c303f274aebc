"""Acceptance by position: coupled beside rejection mode, on the bundled model's held-out text.

    python -m tests.benchmarks.acceptance --prompts 8 --tokens 96 --depth 3

Every setting decodes the same prompts with the same seeds. Coupling draws draft and target with one
noise and accepts when they agree; the most that any way of drawing can accept is 1 - TV(p, q),
which rejection sampling attains position by position.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import Engine, RowSpec, SamplingParams
from engine.solo import generate
from engine.tiny import MODEL_DIR

TEMPERATURES = (0.6, 0.8, 1.0)
TOP_K = (0, 20)


@dataclass(frozen=True)
class Acceptance:
    """One setting."""

    by_position: list[float]
    """Share of draft j + 1 accepted, of the cycles that reached it."""
    tokens_per_cycle: float


def held_out_prompts(count: int) -> list[list[int]]:
    """The first prompts of the held-out set, as ids."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    with (MODEL_DIR / "heldout.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["prompt"] for line in itertools.islice(file, count)]
    return [tokenizer.encode(text).ids for text in texts]


def measure(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, *, tokens: int, depth: int
) -> Acceptance:
    """Decode the prompts together; every draft is up for acceptance."""
    requests = [
        (prompt, RowSpec(sampling=replace(params, seed=seed), max_tokens=tokens))
        for seed, prompt in enumerate(prompts)
    ]
    results = generate(engine, requests, depth=depth)
    accepted = [sum(r.accepted[j] for r in results if len(r.accepted) > j) for j in range(depth)]
    # A draft is reached when the one before it was accepted and it was up itself.
    drafted = [sum(r.drafted[j] for r in results if len(r.drafted) > j) for j in range(depth)]
    reached = [drafted[0], *(min(a, d) for a, d in zip(accepted, drafted[1:], strict=False))]
    decoded = sum(len(r.tokens) - 1 for r in results)
    return Acceptance(
        by_position=[a / r for a, r in zip(accepted, reached, strict=True) if r],
        tokens_per_cycle=decoded / sum(r.cycles for r in results),
    )


def main(
    prompts: Annotated[int, typer.Option(min=1, max=16)] = 8,
    tokens: Annotated[int, typer.Option(min=2)] = 96,
    depth: Annotated[int, typer.Option(min=1, max=8)] = 3,
) -> None:
    """Print acceptance by position for every temperature, top-k and mode."""
    config = EngineConfig(model=MODEL_DIR, mtp_gate="off", max_rows=prompts, kv_memory=1 << 26)
    prepare_blas(config.blas)
    from engine.load import load_engine

    engine = load_engine(config)
    table = Table("temperature", "top-k", "mode", "accepted by position", "tokens per cycle")
    texts = held_out_prompts(prompts)
    for temperature, top_k, coupled in itertools.product(TEMPERATURES, TOP_K, (False, True)):
        params = SamplingParams(temperature=temperature, top_k=top_k, coupled=coupled)
        found = measure(engine, texts, params, tokens=tokens, depth=depth)
        table.add_row(
            str(temperature),
            str(top_k or "–"),
            "coupled" if coupled else "rejection",
            " ".join(f"{share:.2f}" for share in found.by_position),
            f"{found.tokens_per_cycle:.2f}",
        )
    Console().print(table)
    engine.close()


if __name__ == "__main__":
    typer.run(main)
