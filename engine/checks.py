"""Does a plan keep the contract? Asked before anything is built, so that a refusal has no effect.

Everything here raises ValueError that names the row and the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.books import Books
from engine.boundary import BoundaryStore, PlannedBoundaries
from engine.plan import (
    NULL_PAGE,
    DecodeBatch,
    EngineInfo,
    PrefillChunk,
    StepPlan,
    pages_needed,
)
from engine.rules import check_spec
from engine.step import Step, rows_of


def check_pages(info: EngineInfo, pages: NDArray[np.int32]) -> None:
    """Page ids must be the engine's."""
    if pages.size and (pages.min() < NULL_PAGE or pages.max() > info.pages):
        raise ValueError(f"page ids must be in 0…{info.pages}")


def check_table(info: EngineInfo, what: str, pages: NDArray[np.int32], positions: int) -> None:
    """A page table must cover that many positions."""
    if len(pages) < pages_needed(positions, info.page_size):
        raise ValueError(f"{what}: page table does not cover {positions} positions")
    check_pages(info, pages)


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """Checks one plan against what the engine knows when it is submitted."""

    info: EngineInfo
    books: Books
    boundaries: BoundaryStore
    flight: Iterable[Step]
    """Steps that are not collected yet."""

    def validate(self, plan: StepPlan) -> None:
        """Raise ValueError when the plan breaks the contract."""
        books, released = self.books, set(plan.release)
        points = self._check_keeps(plan)
        points.drop(plan.drop)
        self._check_copies(plan)
        lost = books.lost - released
        known = set(books.prefilling) - released
        ready = books.decoding() - released
        guided = books.guided.rows()
        chunked = [chunk.row for chunk in plan.prefill]
        if len(set(chunked)) != len(chunked):
            raise ValueError(f"a step takes one chunk per row; rows of this one: {chunked}")
        for chunk in plan.prefill:
            if chunk.row not in lost:
                self._check_chunk(chunk, known, ready)
                if chunk.restore is not None:
                    points.restore(chunk)
            spec = books.chunk_spec(chunk)
            if chunk.save is not None:
                mtp = spec is None or spec.speculative
                points.add(chunk.save, chunk.start + len(chunk.tokens), mtp=mtp)
            if chunk.row in lost:
                continue
            known.discard(chunk.row)
            (ready if chunk.last else known).add(chunk.row)
            if spec is not None and spec.constraint is not None:
                guided.add(chunk.row)
        if len(known | ready) > self.info.max_rows:
            raise ValueError(f"more than max_rows ({self.info.max_rows}) rows hold state")
        points.finish()
        if plan.decode is not None:
            self._check_decode(plan.decode, ready | lost)
            wrong = [row for row in plan.decode.rows if row in guided]
            if wrong:
                raise ValueError(f"rows with a constraint belong to guided, not decode: {wrong}")
        if plan.guided is not None:
            self._check_decode(plan.guided, ready | lost)
            self._check_guided(plan, plan.guided, guided | lost)

    def _check_keeps(self, plan: StepPlan) -> PlannedBoundaries:
        info, books = self.info, self.books
        points = PlannedBoundaries(
            self.boundaries.facts(), limit=info.boundaries, drafts=info.max_depth > 0
        )
        flying = {row for step in self.flight for row in rows_of(step.plan)}
        for keep in plan.keep:
            row = keep.row
            if row not in books.reached or row in books.faulted:
                raise ValueError(f"row {row}: only a decoding row without fault can be kept")
            if row in flying:
                raise ValueError(f"row {row}: to be kept, but a step in flight names it")
            position = books.reached[row]
            check_table(info, f"row {row}", keep.pages, position)
            points.add(keep.boundary, position, mtp=books.spec(row).speculative)
        return points

    def _check_copies(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        targets = [target for _, target in plan.copies]
        pages = np.array(plan.copies, np.int32).reshape(-1)
        check_pages(self.info, pages)
        if (pages == NULL_PAGE).any():
            raise ValueError("the null page cannot be copied")
        if len(set(targets)) < len(targets) or {s for s, _ in plan.copies} & set(targets):
            raise ValueError(f"no page may be written twice, nor read and written: {plan.copies}")

    def _check_chunk(self, chunk: PrefillChunk, known: set[int], ready: set[int]) -> None:
        size, info = len(chunk.tokens), self.info
        row = self.books.prefilling.get(chunk.row)
        if chunk.row in ready:
            raise ValueError(f"row {chunk.row}: its prompt is complete already")
        first = chunk.row not in known
        if first and chunk.restore is None and chunk.start != 0:
            raise ValueError(f"row {chunk.row}: unknown, so its chunk must start at 0")
        if (chunk.spec is not None) != first:
            raise ValueError(f"row {chunk.row}: spec belongs to the first chunk, and only there")
        if not first and (chunk.restore is not None or chunk.prefix is not None):
            raise ValueError(f"row {chunk.row}: restore and prefix belong to the first chunk")
        if chunk.restore is None and chunk.prefix is not None:
            raise ValueError(f"row {chunk.row}: prefix belongs to a restore")
        if row is not None and chunk.row in known and row.position != chunk.start:
            raise ValueError(f"row {chunk.row}: chunk starts at {chunk.start}, not {row.position}")
        if size == 0 or chunk.start + size > info.context_length:
            raise ValueError(f"row {chunk.row}: chunk of {size} at {chunk.start} is out of range")
        if len(chunk.pages) < pages_needed(chunk.start + size, info.page_size):
            raise ValueError(f"row {chunk.row}: page table does not cover the chunk")
        for what, tokens in (("token", chunk.tokens), ("prefix token", chunk.prefix)):
            if tokens is not None and tokens.size and not _within(tokens, info.vocab_size):
                raise ValueError(f"row {chunk.row}: {what} outside 0…{info.vocab_size - 1}")
        if chunk.spec is not None:
            check_spec(chunk.row, chunk.spec, info.vocab_size)
        check_pages(info, chunk.pages)

    def _check_decode(self, batch: DecodeBatch, ready: set[int]) -> None:
        unknown = [row for row in batch.rows if row not in ready]
        if unknown or len(set(batch.rows)) != len(batch.rows) or not batch.rows:
            raise ValueError(f"decode rows must be distinct and prefilled; not so: {unknown}")
        if not 0 <= batch.depth <= self.info.max_depth:
            raise ValueError(f"depth {batch.depth} is outside 0…{self.info.max_depth}")
        if len(batch.limits) != len(batch.rows) or batch.pages.shape[0] != len(batch.rows):
            raise ValueError("decode limits and pages must have one entry per row")
        if any(not 0 <= limit <= batch.depth for limit in batch.limits):
            raise ValueError(f"limits must be in 0…{batch.depth}")
        check_pages(self.info, batch.pages)

    def _check_guided(self, plan: StepPlan, batch: DecodeBatch, guided: set[int]) -> None:
        wrong = [row for row in batch.rows if row not in guided]
        if wrong:
            raise ValueError(f"guided rows must have a constraint; these have none: {wrong}")
        flying = {chunk.row for chunk in plan.prefill}
        flying.update(row for step in self.flight for row in rows_of(step.plan))
        wrong = [row for row in batch.rows if row in flying and row not in self.books.lost]
        if wrong:
            raise ValueError(f"the tokens of guided rows are not known yet, in flight: {wrong}")


def _within(tokens: NDArray[np.int32], vocab: int) -> bool:
    return bool(tokens.min() >= 0 and tokens.max() < vocab)
