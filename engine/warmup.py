"""A first text before anybody waits for one: kernels compile, pools are touched, weights speak."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import EngineError
from engine.plan import Engine, RowSpec, SamplingParams
from engine.solo import generate

TOKENS = 6
"""Generated per row."""
ROWS = 4
"""Rows of the larger batch."""


def warm_up(engine: Engine) -> None:
    """Runs a prefill of a whole chunk and decode cycles at depth 0 and at the deepest, for one row
    and for a few. Nothing of it stays. Raises EngineError when a row of it fails: such an engine
    would fail its first client."""
    for rows, depth in _batches(engine):
        spec = RowSpec(sampling=SamplingParams(temperature=0.7, top_k=20), max_tokens=TOKENS)
        prompt = _prompt(engine, rows)
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


def _prompt(engine: Engine, rows: int) -> list[int]:
    """One chunk of prompt, or as much of it as `rows` of them have room for."""
    info = engine.info
    room = min(info.context_length, info.pages // rows * info.page_size) - TOKENS
    return [index % info.vocab_size for index in range(min(info.prefill_chunk, room))]
