"""Builds the prefill part of a step: its chunks in as few passes as their lengths allow.

What fails costs one row. A pass that cannot be built, or has no room, is taken back from the graph,
and its chunks are built one after the other; whichever fails alone, faults alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.books import Books
from engine.boundary import BoundaryStore, LostBoundaryError
from engine.cache import PagePool
from engine.guided import Form, Guide
from engine.plan import EngineFailedError, PrefillChunk, RowResult
from engine.prefill import FirstTokens, Passed, Prefill, PrefillRow
from engine.preflight import Room
from engine.results import Output
from engine.step import GoneError, OutOfMemoryError, Step


@dataclass(frozen=True, slots=True)
class Started:
    """A chunk whose row is ready for it."""

    chunk: PrefillChunk
    row: PrefillRow


@dataclass(frozen=True, slots=True)
class Sampled:
    """First tokens that were sampled together."""

    places: tuple[int, ...]
    """Of their rows in the pass."""
    first: FirstTokens
    forms: tuple[Form, ...]


class PromptBuilder:
    """Builds chunks into one engine's steps."""

    def __init__(
        self,
        *,
        vocab: int,
        prefill: Prefill,
        pools: list[PagePool],
        books: Books,
        boundaries: BoundaryStore,
        room: Room,
        together: bool,
        trace: bool,
    ) -> None:
        """`together`: chunks share passes; otherwise each row's numbers are what they would be in a
        step of its own (`EngineConfig.deterministic`)."""
        self._vocab = vocab
        self._prefill = prefill
        self._pools = pools
        self._books = books
        self._boundaries = boundaries
        self._room = room
        self._together = together
        self._trace = trace

    def build(self, step: Step) -> list[mx.array]:
        """All chunks of the step; returns what else must be evaluated."""
        fresh: list[mx.array] = []
        for wave in self._waves(step.plan.prefill):
            started = [one for chunk in wave for one in self._start(step, chunk)]
            for places in self._prefill.passes([one.chunk for one in started]):
                fresh += self._pass(step, [started[place] for place in places])
        return fresh

    def _waves(self, chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
        """Chunks that may run side by side: none restores what another of them saves."""
        waves: list[list[PrefillChunk]] = []
        saves: set[int | None] = set()
        for chunk in chunks:
            waits = chunk.restore is not None and chunk.restore in saves
            if not waves or waits or not self._together:
                waves.append([])
                saves.clear()
            waves[-1].append(chunk)
            saves.add(chunk.save)
        return waves

    def _start(self, step: Step, chunk: PrefillChunk) -> list[Started]:
        """The chunk with its row; nothing when the row is gone or cannot start."""
        try:
            spec = self._books.chunk_spec(chunk)
            if chunk.row in self._books.lost or spec is None:
                raise GoneError
            row = self._books.prefilling.get(chunk.row)
            if row is None:
                start = None if chunk.restore is None else self._boundaries[chunk.restore]
                row = self._prefill.start(spec, start)
            return [Started(chunk, row)]
        except Exception as error:
            self._refuse(step, chunk, error)
            return []

    def _pass(self, step: Step, started: list[Started]) -> list[mx.array]:
        """Build one pass, or its chunks one by one, or fault the row."""
        handles = [pool.handles() for pool in self._pools]
        chunks = [one.chunk for one in started]
        try:
            specs = [one.row.spec for one in started]
            dimensions = self._prefill.dimensions(chunks)
            need = step.need + self._room.chunk_bytes(chunks, specs, dimensions)
            self._room.check(need)
            fresh = self._run(step, started)
            step.need = need
            return fresh
        except EngineFailedError:
            raise
        except Exception as error:
            for pool, before in zip(self._pools, handles, strict=True):
                pool.restore(before)
            if len(started) == 1:
                self._refuse(step, chunks[0], error)
                return []
        return [array for one in started for array in self._pass(step, [one])]

    def _run(self, step: Step, started: list[Started]) -> list[mx.array]:
        chunks = [one.chunk for one in started]
        passed = self._prefill.chunks([one.row for one in started], chunks)
        saved = {
            chunk.save: self._prefill.boundary(row)
            for chunk, row in zip(chunks, passed.rows, strict=True)
            if chunk.save is not None
        }
        sampled = self._sampled(passed, chunks)
        outputs = self._outputs(passed, chunks, sampled)
        # Nothing below raises: the engine's books and the graph change together.
        books = self._books
        for boundary, point in saved.items():
            self._boundaries.add(boundary, point)
        for chunk, row in zip(chunks, passed.rows, strict=True):
            if chunk.last:
                books.prefilling.pop(chunk.row, None)
                books.reached[chunk.row] = row.position - 1
            else:
                books.prefilling[chunk.row] = row
        for group in sampled:
            for place, arrays in zip(group.places, group.first.rows, strict=True):
                table = books.guided if group.forms else books.free
                table.add(chunks[place].row, passed.rows[place].spec, arrays)
                if group.forms:
                    books.forms[chunks[place].row] = group.forms[0]
        if not all(chunk.last for chunk in chunks):
            step.ends.append(passed.hidden)
        step.outputs += outputs
        return [array for point in saved.values() for array in point.arrays()]

    def _sampled(self, passed: Passed, chunks: Sequence[PrefillChunk]) -> list[Sampled]:
        """First tokens of the rows whose prompt is complete; a constraint is asked for its own."""
        last = [place for place, chunk in enumerate(chunks) if chunk.last]
        guided = [place for place in last if passed.rows[place].spec.constraint is not None]
        free = [place for place in last if place not in guided]
        groups = [(place,) for place in guided] + ([tuple(free)] if free else [])
        found = []
        for places in groups:
            rows = [passed.rows[place] for place in places]
            hidden = passed.hidden
            if len(places) < len(chunks):
                hidden = mx.take(hidden, mx.array(places, mx.int32), axis=0)
            forms: tuple[Form, ...] = ()
            guide, spec = None, rows[0].spec
            if spec.constraint is not None:
                forms = (Form(spec.constraint, frozenset(spec.stop_ids), spec.max_tokens),)
                guide = Guide(forms, vocab=self._vocab, limits=(0,))
            found.append(Sampled(places, self._prefill.finish(rows, hidden, guide), forms))
        return found

    def _outputs(
        self, passed: Passed, chunks: Sequence[PrefillChunk], sampled: Sequence[Sampled]
    ) -> list[Output]:
        """What the host is to read."""
        outputs = [
            Output(
                rows=tuple(chunks[place].row for place in group.places),
                specs=tuple(passed.rows[place].spec for place in group.places),
                packed=group.first.packed,
                width=1,
                logits=group.first.logits if self._trace else None,
                chunk=True,
                prompts=tuple(passed.records[place] for place in group.places),
                forms=group.forms,
            )
            for group in sampled
        ]
        for chunk, row, records in zip(chunks, passed.rows, passed.records, strict=True):
            if not chunk.last and row.spec.prompt_logprobs is not None:
                outputs.append(
                    Output(
                        rows=(chunk.row,),
                        specs=(row.spec,),
                        packed=None,
                        width=0,
                        chunk=True,
                        prompts=(records,),
                    )
                )
        return outputs

    def _refuse(self, step: Step, chunk: PrefillChunk, error: Exception) -> None:
        """Its row does not run this chunk."""
        if chunk.save is not None:
            self._boundaries.lose(chunk.save, chunk.start + len(chunk.tokens))
        if not isinstance(error, GoneError):
            lose(step, self._books, "prefill", chunk.row, error)
        elif chunk.last:
            step.lost["prefill", chunk.row] = RowResult(row=chunk.row)


def lose(step: Step, books: Books, part: str, row: int, error: Exception) -> None:
    """Fault a row that this step cannot run; nothing of it stays on the device."""
    text = str(error) if isinstance(error, (OutOfMemoryError, LostBoundaryError)) else ""
    fault = text or f"building its step failed: {type(error).__name__}: {error}"
    books.release([row])
    books.faulted.add(row)
    books.lost.add(row)
    step.lost[part, row] = RowResult(row=row, fault=fault)
