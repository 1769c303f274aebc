"""A small host for tests: counts page references, shares prefixes, keeps and restores boundaries.

What the scheduler does with much policy, done with none: the test says which row starts where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    DecodeBatch,
    KeepRow,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    StepResult,
    page_array,
    pages_needed,
)
from engine.runner import MLXEngine
from engine.solo import SoloResult


@dataclass(slots=True)
class Point:
    """A boundary: its tokens and the pages that hold them."""

    tokens: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk, and the pages to be copied in its step."""

    chunk: PrefillChunk
    copies: tuple[tuple[int, int], ...]


class Host:
    """Drives one engine, one step per call."""

    def __init__(self, engine: MLXEngine) -> None:
        self.engine = engine
        self.results: dict[int, SoloResult] = {}
        self.tokens: dict[int, list[int]] = {}
        """Prompt and output of every row."""
        self.pages: dict[int, list[int]] = {}
        self.points: dict[int, Point] = {}
        self.guided: set[int] = set()
        self._step = 0
        self._uses: Counter[int] = Counter()
        self._free = list(range(engine.info.pages, 0, -1))

    def start(
        self,
        row: int,
        prompt: Sequence[int],
        spec: RowSpec,
        *,
        saves: dict[int, int] | None = None,
        restore: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """Prefill a row, in pieces of `chunk` that also end at each position of `saves` (position
        → boundary id), from the boundary `restore` where one is given."""
        begin = 0 if restore is None else len(self.points[restore].tokens)
        cuts = range(begin, len(prompt), chunk or len(prompt))
        for piece in self.pieces(row, prompt, spec, saves=saves, restore=restore, cuts=cuts):
            self.prefill(piece)

    def prefill(self, *pieces: Piece) -> None:
        """One step with these pieces, of different rows."""
        copies = tuple(pair for piece in pieces for pair in piece.copies)
        self.run(prefill=tuple(piece.chunk for piece in pieces), copies=copies)
        for piece in pieces:
            if piece.chunk.save is not None:
                end = piece.chunk.start + len(piece.chunk.tokens)
                self._point(piece.chunk.save, piece.chunk.row, end)

    def pieces(
        self,
        row: int,
        prompt: Sequence[int],
        spec: RowSpec,
        *,
        saves: dict[int, int] | None = None,
        restore: int | None = None,
        cuts: Iterable[int] = (),
    ) -> list[Piece]:
        """A row's prompt, cut at these positions and where it is saved, to be run in order."""
        saves, size = saves or {}, self.engine.info.page_size
        if spec.constraint is not None:
            self.guided.add(row)
        point = self.points[restore] if restore is not None else Point([], [])
        begin = len(point.tokens)
        assert list(prompt[:begin]) == point.tokens
        assert len(prompt) > begin
        shared = point.pages[: begin // size]
        for page in shared:
            self._uses[page] += 1
        own = self._take(pages_needed(len(prompt) + spec.max_tokens, size) - len(shared))
        copies = ((point.pages[begin // size], own[0]),) if begin % size else ()
        self.pages[row], self.tokens[row] = shared + own, list(prompt)
        self.results[row] = SoloResult(row=row)
        ends = sorted(end for end in {*saves, len(prompt), *cuts} if end > begin)
        return [
            Piece(
                PrefillChunk(
                    row=row,
                    tokens=np.asarray(prompt[here:end], np.int32),
                    start=here,
                    pages=page_array(self.pages[row]),
                    last=end == len(prompt),
                    spec=spec if here == begin else None,
                    restore=restore if here == begin else None,
                    prefix=np.asarray(point.tokens, np.int32) if here == begin and begin else None,
                    save=saves.get(end),
                ),
                copies if here == begin else (),
            )
            for here, end in pairwise([begin, *ends])
        ]

    def decode(self, *rows: int, depth: int, even_finished: bool = False) -> None:
        """One cycle."""
        live = [row for row in rows if even_finished or not self.results[row].ended]
        if live:
            self.submit_decode(*live, depth=depth)
            self.collect()

    def submit_decode(self, *rows: int, depth: int) -> None:
        """One cycle, not waited for; rows with a constraint in a cohort of their own."""
        self.submit(
            decode=self._cohort([row for row in rows if row not in self.guided], depth),
            guided=self._cohort([row for row in rows if row in self.guided], depth),
        )

    def _cohort(self, rows: list[int], depth: int) -> DecodeBatch | None:
        if not rows:
            return None
        width = max(len(self.pages[row]) for row in rows)
        tables = [self.pages[row] + [0] * (width - len(self.pages[row])) for row in rows]
        return DecodeBatch(
            rows=tuple(rows),
            pages=np.asarray(tables, np.int32),
            depth=depth,
            limits=(depth,) * len(rows),
        )

    def finish(self, *rows: int, depth: int) -> None:
        """Cycles until these rows have ended."""
        while any(not self.results[row].ended for row in rows):
            self.decode(*rows, depth=depth)

    def keep(self, row: int, boundary: int, *, release: bool = True) -> None:
        """Keep a row at its last emitted token, and forget it."""
        keep = KeepRow(row=row, boundary=boundary, pages=page_array(self.pages[row]))
        self.run(keep=(keep,), release=(row,) if release else ())
        self._point(boundary, row, len(self.tokens[row]) - 1)
        if release:
            self._give(self.pages.pop(row))

    def release(self, row: int) -> None:
        self.run(release=(row,))
        self._give(self.pages.pop(row))

    def drop(self, boundary: int) -> None:
        self.run(drop=(boundary,))
        self._give(self.points.pop(boundary).pages)

    def run(self, **parts: Any) -> StepResult:
        """Submit a step and take its result."""
        self.submit(**parts)
        return self.collect()

    def submit(self, **parts: Any) -> None:
        self.engine.submit(StepPlan(step=self._step, **parts))
        self._step += 1

    def collect(self) -> StepResult:
        """Take the oldest step's result."""
        result = self.engine.collect()
        for row in result.rows:
            self.results[row.row].add(row)
            self.tokens[row.row] += row.tokens
        return result

    def _point(self, boundary: int, row: int, position: int) -> None:
        count = pages_needed(position, self.engine.info.page_size)
        pages = self.pages[row][:count]
        for page in pages:
            self._uses[page] += 1
        self.points[boundary] = Point(self.tokens[row][:position], pages)

    def _take(self, count: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        self._uses.update(pages)
        return pages

    def _give(self, pages: list[int]) -> None:
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._free.append(page)  # taken again first, so that stale numbers would show


def sampled(max_tokens: int, seed: int, **options: Any) -> RowSpec:
    """A row whose tokens depend on the bits of the target's and the draft's distributions: hot, so
    that heads of random weights agree now and then."""
    params = SamplingParams(temperature=3.0, seed=seed)
    return RowSpec(sampling=params, max_tokens=max_tokens, **options)


@dataclass(frozen=True)
class Bits:
    """Everything a row's generation can be compared by."""

    tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    logits: NDArray[np.float32]
    mtp: NDArray[np.float32]
    """MTP keys and values of the slots that exist for certain, [2, slots, heads, dim]."""

    def same(self, other: Bits) -> bool:
        return (
            (self.tokens, self.drafted, self.accepted)
            == (other.tokens, other.drafted, other.accepted)
            and np.array_equal(self.logits, other.logits)
            and np.array_equal(self.mtp, other.mtp)
        )


def bits(host: Host, row: int) -> Bits:
    """Of a row that has its pages still. Slots that may be pending are written first, by keeping
    the row under a throw-away id."""
    result, size = host.results[row], host.engine.info.page_size
    logits = [t.logits for t in host.engine.traces if t.row == row]
    host.keep(row, 10**9 + row, release=False)
    position = len(host.tokens[row]) - 1
    host.drop(10**9 + row)
    pool = host.engine._cycle._mtp_pool
    assert pool is not None
    table = mx.array(host.pages[row][: pages_needed(position, size)])
    both = [np.array(x[table]).reshape(-1, *x.shape[2:]) for x in (pool.keys, pool.values)]
    return Bits(
        tokens=result.tokens,
        drafted=result.drafted,
        accepted=result.accepted,
        logits=np.concatenate(logits),
        mtp=np.stack(both)[:, 1:position],
    )
