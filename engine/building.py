"""Turns plans into graphs, part by part; nothing here waits for the device or hands it anything.

What fails before the device has seen it (no room, an error while a row's chunk is built) costs that
row and nobody else: its writes are taken back from the graph. Chunks are `engine.prompts`' part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from engine.books import Books
from engine.boundary import BoundaryStore, boundary_of
from engine.cache import PagePool, page_table
from engine.cycle import DecodeCycle
from engine.guided import Form, Guide
from engine.padding import NOBODYS_FORM, Buckets, Shape
from engine.plan import (
    DecodeBatch,
    EngineInfo,
    KeepRow,
    RowResult,
)
from engine.prefill import Prefill
from engine.preflight import Room
from engine.prompts import PromptBuilder, lose
from engine.results import Output
from engine.rows import RowTable, make_statics
from engine.step import OutOfMemoryError, Step


class StepBuilder:
    """Builds the parts of one engine's steps."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        cycle: DecodeCycle,
        prefill: Prefill,
        pools: list[PagePool],
        books: Books,
        boundaries: BoundaryStore,
        room: Room,
        shape: Shape | None,
        trace: bool,
    ) -> None:
        """`shape`: the one that every cycle is padded to; None pads none."""
        self._vocab = info.vocab_size
        self._drafts = info.max_depth > 0
        self._cycle = cycle
        self._prompts = PromptBuilder(
            vocab=info.vocab_size,
            prefill=prefill,
            pools=pools,
            books=books,
            boundaries=boundaries,
            room=room,
            together=shape is None or isinstance(shape, Buckets),
            trace=trace,
        )
        self._pools = pools
        self._books = books
        self._boundaries = boundaries
        self._room = room
        self._shape = shape
        self._trace = trace

    @property
    def one_by_one(self) -> bool:
        """Whether a cohort's rows run one after the other (see `engine.padding`)."""
        return self._shape is not None and self._shape.rows == 1

    def build(self, step: Step) -> None:
        """Everything of the step but its guided cohort."""
        plan = step.plan
        fresh = [array for keep in plan.keep for array in self._keep(keep)]
        self._books.release(plan.release)
        self._boundaries.drop(plan.drop)
        if plan.copies:
            pairs = mx.array(plan.copies, mx.int32)
            for pool in self._pools:
                step.first += pool.copy(pairs[:, 0], pairs[:, 1])
        fresh += self._prompts.build(step)
        if plan.decode is not None:
            batch = self.admit(step, plan.decode, "decode")
            if batch.rows:
                self._cohort(step, self._books.free, batch)
        step.ends += [array for output in step.outputs for array in output.ends]
        if not step.ends and (plan.keep or plan.copies):
            # Summed, because a view would hold on to the pool.
            step.ends = [self._pools[0].keys[0, 0, 0].sum()]
        step.pending = [*self.live_arrays(), *fresh, *step.ends]

    def guided(
        self, step: Step, batch: DecodeBatch, before_reading: Callable[[mx.array], None]
    ) -> list[mx.array]:
        """A guided cohort that was admitted; returns what is there when it is done."""
        done = len(step.outputs)
        self._cohort(step, self._books.guided, batch, before_reading)
        return [array for output in step.outputs[done:] for array in output.ends]

    def live_arrays(self) -> list[mx.array]:
        """Everything that lives on from step to step."""
        live = [array for pool in self._pools for array in pool.current()]
        return [*live, *self._books.arrays()]

    def _keep(self, keep: KeepRow) -> list[mx.array]:
        """Save a decoding row's point; returns what must be evaluated."""
        books = self._books
        table = books.table(keep.row)
        rows = books.ends.get(keep.row) or table.one(keep.row)
        mtp = table.spec(keep.row).speculative and self._drafts
        if mtp:
            rows = self._cycle.settled(rows, page_table(keep.pages[None]))
            if keep.row not in books.ends:
                table.replace(keep.row, rows)
        saved = boundary_of(
            position=books.reached[keep.row],
            states=rows.states,
            carry=rows.last_hidden(),
            mtp=mtp,
        )
        self._boundaries.add(keep.boundary, saved)
        return saved.arrays()

    def _cohort(
        self,
        step: Step,
        table: RowTable,
        batch: DecodeBatch,
        before_reading: Callable[[mx.array], None] | None = None,
    ) -> None:
        """A cohort's cycle, or one for each of its rows. `before_reading`: of a guided one."""
        if self._shape is not None:
            batch = self._shape.pad(batch)
        if not self.one_by_one:
            self._run(step, table, batch, before_reading)
            return
        for index, row in enumerate(batch.rows):
            alone = replace(
                batch,
                rows=(row,),
                pages=batch.pages[index : index + 1],
                limits=batch.limits[index : index + 1],
            )
            self._run(step, table, alone, before_reading)

    def _run(
        self,
        step: Step,
        table: RowTable,
        batch: DecodeBatch,
        before_reading: Callable[[mx.array], None] | None,
    ) -> None:
        """One cycle."""
        if self.one_by_one:
            rows = table.one(batch.rows[0])
            statics = make_statics(table.specs(batch.rows), self._vocab)
        else:
            rows, statics = table.batch(batch.rows)
        step.before.append((batch.rows, rows))
        forms: tuple[Form, ...] = ()
        guide = None
        if before_reading is not None:
            forms = tuple(self._books.forms.get(row, NOBODYS_FORM) for row in batch.rows)
            guide = Guide(
                forms, vocab=self._vocab, limits=batch.limits, before_reading=before_reading
            )
        limits = mx.array(batch.limits, mx.int32)
        pages = page_table(batch.pages)
        output = self._cycle.run(rows, statics, pages, batch.depth, limits, guide)
        if self.one_by_one:
            table.replace(batch.rows[0], output.rows)
        else:
            table.update(output.rows)
        step.outputs.append(
            Output(
                rows=batch.rows,
                specs=table.specs(batch.rows),
                packed=output.packed,
                width=batch.depth + 1,
                logits=output.logits if self._trace else None,
                forms=forms,
            )
        )

    def admit(self, step: Step, batch: DecodeBatch, part: str) -> DecodeBatch:
        """The cohort without rows that are gone or for whose joining there is no room."""
        books = self._books
        table = books.guided if part == "guided" else books.free
        # One by one, a row more takes no more room.
        running = batch.rows if self.one_by_one else table.stacked
        staying = set(batch.rows).intersection(running)
        here = [row for row in batch.rows if row in staying and row not in books.lost]
        kept: list[int] = []
        for index, row in enumerate(batch.rows):
            if row in books.lost:
                step.lost[part, row] = RowResult(row=row)
                continue
            if row not in staying:
                try:
                    self._room.check(step.need + self._cohort_bytes(table, [*here, row], batch))
                except OutOfMemoryError as error:
                    lose(step, books, part, row, error)
                    continue
                here.append(row)
            kept.append(index)
        step.need += self._cohort_bytes(table, here, batch)
        if len(kept) == len(batch.rows):
            return batch
        return DecodeBatch(
            rows=tuple(batch.rows[index] for index in kept),
            pages=batch.pages[kept],
            depth=batch.depth,
            limits=tuple(batch.limits[index] for index in kept),
        )

    def _cohort_bytes(self, table: RowTable, rows: list[int], batch: DecodeBatch) -> int:
        return self._room.cohort_bytes(
            table.specs(rows), batch.pages.shape[1], depth=batch.depth, shape=self._shape
        )
