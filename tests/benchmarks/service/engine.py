"""An engine that has its tokens ready: what is left is what everything around it costs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    DecodeBatch,
    EngineInfo,
    Finish,
    Logprobs,
    PrefillChunk,
    RowResult,
    RowSpec,
    SavedPrefix,
    StepPlan,
    StepResult,
)

DEPTH = 2
"""Drafts per cycle: bursts are of 1 … 3 tokens."""


@dataclass(slots=True)
class _Row:
    spec: RowSpec
    emitted: int = 0


class BurstEngine:
    """Rows emit `burst` tokens of `text` per step, over and over; a step takes `step_s`, asleep."""

    def __init__(self, text: tuple[int, ...], *, vocab_size: int, max_rows: int) -> None:
        self.max_in_flight = 2
        self.burst = 1
        self.step_s = 0.0
        self._text = text
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()
        self._next_at = 0.0
        self._logprobs: dict[tuple[int, int], Logprobs] = {}
        self._info = EngineInfo(
            model="bursts",
            family="none",
            vocab_size=vocab_size,
            context_length=32_768,
            layers=1,
            mtp_layers=1,
            max_depth=DEPTH,
            max_rows=max_rows,
            pages=64 * max_rows,
            page_size=16,
            page_bytes=1024,
            row_bytes=1024,
            weight_bytes=1024,
            parameters=1024,
            dtype="none",
            quantization="none",
            device="none",
            blas="none",
        )

    def resize(self, *, context_length: int, pages: int) -> None:
        """Before a scheduler has asked."""
        self._info = replace(self._info, context_length=context_length, pages=pages)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, plan: StepPlan) -> None:
        for row in plan.release:
            self._rows.pop(row, None)
        results: list[RowResult] = []
        for chunk in plan.prefill:
            results += self._prefill(chunk)
        for batch in (plan.decode, plan.guided):
            if batch is not None:
                results += self._decode(batch)
        seconds = self.step_s if results else 0.0
        self._results.append(
            StepResult(step=plan.step, rows=tuple(results), depth=DEPTH, device_s=seconds)
        )

    def collect(self) -> StepResult:
        result = self._results.popleft()
        if result.rows and self.step_s:
            now = time.monotonic()
            time.sleep(max(self._next_at - now, 0.0))
            self._next_at = max(self._next_at, now) + self.step_s
        return result

    def _decode(self, batch: DecodeBatch) -> list[RowResult]:
        limits = zip(batch.rows, batch.limits, strict=True)
        return [self._emit(row, most=min(self.burst, limit + 1)) for row, limit in limits]

    def _emit(self, row: int, *, most: int) -> RowResult:
        state = self._rows[row]
        at, left = state.emitted, state.spec.max_tokens - state.emitted
        if not left:
            return RowResult(row=row)
        count = min(most, left)
        text = self._text
        tokens = tuple(text[(at + n) % len(text)] for n in range(count))
        state.emitted += count
        logprobs = state.spec.logprobs
        return RowResult(
            row=row,
            tokens=tokens,
            drafted=count - 1,
            accepted=count - 1,
            finish=Finish.LENGTH if count == left else None,
            logprobs=None if logprobs is None else self._some(count, logprobs),
        )

    def _prefill(self, chunk: PrefillChunk) -> list[RowResult]:
        if chunk.spec is not None:
            self._rows[chunk.row] = _Row(chunk.spec)
        asked = self._rows[chunk.row].spec.prompt_logprobs
        if asked is None and not chunk.last:
            return []
        result = self._emit(chunk.row, most=1) if chunk.last else RowResult(row=chunk.row)
        if asked is None:
            return [result]
        positions = len(chunk.tokens) - (chunk.start == 0)
        return [replace(result, prompt_logprobs=self._some(positions, asked))]

    def _some(self, tokens: int, alternatives: int) -> Logprobs:
        key = (tokens, alternatives)
        if key not in self._logprobs:
            self._logprobs[key] = Logprobs(
                chosen=(-0.7,) * tokens,
                top_ids=(tuple(range(100, 100 + alternatives)),) * tokens,
                top=(tuple(-0.7 - n / 3 for n in range(alternatives)),) * tokens,
            )
        return self._logprobs[key]

    def export_boundary(
        self, boundary: int, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        raise NotImplementedError

    def read_boundary(self, path: Path) -> SavedPrefix:
        raise NotImplementedError

    def import_boundary(self, boundary: int, pages: NDArray[np.int32], path: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._rows.clear()
