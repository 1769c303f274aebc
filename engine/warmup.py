"""A first text before anybody waits for one: kernels compile, pools are touched, weights speak."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import EngineError
from engine.plan import Engine, RowSpec, SamplingParams
from engine.solo import generate

TOKENS = 3
"""Generated per row."""
SHORT = 8
"""Prompt tokens where a whole chunk has been run before."""
ROWS = 4
"""Rows of the larger batch."""


def warm_up(engine: Engine) -> None:
    """Runs a prefill of a whole chunk and decode cycles at depth 0 and at the deepest, for one row
    and for a few. Nothing of it stays. Raises EngineError when a row of it fails: such an engine
    would fail its first client."""
    for index, (rows, depth) in enumerate(_batches(engine)):
        spec = RowSpec(sampling=SamplingParams(temperature=0.7, top_k=20), max_tokens=TOKENS)
        prompt = _prompt(engine, rows, SHORT if index else engine.info.prefill_chunk)
        if not prompt:
            continue
        for result in generate(engine, [(prompt, spec)] * rows, depth=depth):
            if result.fault is not None:
                raise EngineError(f"warm-up at {rows} rows and depth {depth}: {result.fault}")


def _batches(engine: Engine) -> Iterator[tuple[int, int]]:
    """(rows, depth), each once."""
    info = engine.info
    for rows in sorted({1, min(ROWS, info.max_rows)}):
        for depth in sorted({0, info.max_depth}):
            yield rows, depth


def _prompt(engine: Engine, rows: int, length: int) -> list[int]:
    """That many tokens, or as many as `rows` such prompts have room for."""
    info = engine.info
    room = min(info.context_length, info.pages // rows * info.page_size) - TOKENS
    return [index % info.vocab_size for index in range(min(length, room))]
