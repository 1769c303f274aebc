"""Prefill: prompts in chunks, those of several rows in one pass, each at its own length.

Nothing is ever padded into a recurrent state (`engine.blocks` says how rows lie in a pass). The
MTP history is built along: slot p pairs the trunk's hidden at p with the token at p + 1, so a chunk
writes the slots start - 1 … end - 2, with the hidden of the chunk before carried over; the prompt's
last slot waits for the first sampled token, exactly as slots wait after a decode cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.blocks import Block, block_of, share_passes
from engine.boundary import Boundary, boundary_of
from engine.cache import (
    PagePool,
    RecurrentState,
    RecurrentTrail,
    in_block,
    page_table,
    slot_window,
    window,
)
from engine.choice import make_noise, sample
from engine.cycle import FLAG_FAULT, FLAG_LENGTH, FLAG_STOP
from engine.guided import Guide
from engine.logprobs import prompt_records, record
from engine.models.delta import keep_all
from engine.models.qwen3_5 import Qwen35Model
from engine.noise import Purpose
from engine.padding import Buckets
from engine.plan import NULL_PAGE, PrefillChunk, RowSpec
from engine.rows import RowArrays, make_statics
from engine.rules import add_counts, apply_rules, needs_counts, now
from engine.sampling import shape

SPARE_PLACES, SPARE_PLACES_IN_BUCKETS = 128, 512
"""Places of a pass (rows × longest chunk) up to which padding is not looked at. Measured on a CPU
(tests/benchmarks): up to 128, one pass is faster than several. In buckets, on a GPU, where a pass
of this size should be the host's time only, 512 is an estimate."""
SPARE_KEYS = 1024
"""Keys up to which attention's padding is not looked at, at that many places."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row whose prompt is not complete yet."""

    spec: RowSpec
    position: int
    """Prompt tokens done so far."""
    states: tuple[RecurrentState, ...]
    carry: mx.array | None
    """[1, 1, H]: hidden of the last position done; None before the first chunk."""
    prompted: NDArray[np.bool_] | None = None
    """[V]: tokens of the prompt so far; None when no penalty of the row needs them."""
    said: NDArray[np.int32] | None = None
    """[V]: how often each of them counts as output (`RowSpec.output_start`); None as above."""

    def arrays(self) -> list[mx.array]:
        flat = [a for state in self.states for a in (state.conv, state.memory)]
        return flat if self.carry is None else [*flat, self.carry]


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass over chunks of B rows leaves."""

    rows: tuple[PrefillRow, ...]
    """The rows after it; none shares an array with another."""
    hidden: mx.array
    """[B, 1, H]: the trunk's hidden of each chunk's last token."""
    records: tuple[mx.array | None, ...]
    """Log probabilities of the chunk's tokens (without the prompt's first), of rows that report
    their prompt."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Completed prompts: each row's decode state, and [B, 1 + TAIL + R] for the host (see
    `engine.cycle.CycleOutput.packed`)."""

    rows: tuple[RowArrays, ...]
    packed: mx.array
    logits: mx.array
    """[B, 1, V]."""


class Prefill:
    """Builds prefill graphs over one model and its page pools."""

    def __init__(
        self,
        *,
        model: Qwen35Model,
        pools: list[PagePool],
        mtp_pool: PagePool | None,
        page_size: int,
        chunked: bool = False,
        buckets: Buckets | None = None,
    ) -> None:
        """`chunked`: run recurrences in blocks (see `Qwen35Model.trunk`). `buckets`: passes come in
        a few shapes."""
        self._model = model
        self._pools = pools
        self._mtp_pool = mtp_pool
        self._page_size = page_size
        self._chunked = chunked
        self._buckets = buckets

    def start(self, spec: RowSpec, boundary: Boundary | None = None) -> PrefillRow:
        """A row before its first chunk, at a boundary where it restores one."""
        if boundary is not None:
            return PrefillRow(
                spec=spec,
                position=boundary.position,
                states=boundary.states,
                carry=boundary.carry,
            )
        return PrefillRow(
            spec=spec, position=0, states=tuple(self._model.zero_states(1)), carry=None
        )

    def passes(self, chunks: Sequence[PrefillChunk]) -> list[list[int]]:
        """Which of a step's chunks run in one pass."""
        spare = SPARE_PLACES if self._buckets is None else SPARE_PLACES_IN_BUCKETS
        return share_passes(
            [len(chunk.tokens) for chunk in chunks],
            [len(chunk.pages) for chunk in chunks],
            spare=spare,
            spare_scores=spare * max(1, SPARE_KEYS // self._page_size),
        )

    def dimensions(self, chunks: Sequence[PrefillChunk]) -> tuple[int, int, int]:
        """Rows, places per row and pages per row of a pass over these chunks."""
        rows, width = len(chunks), max(len(chunk.tokens) for chunk in chunks)
        pages = max(len(chunk.pages) for chunk in chunks)
        if self._buckets is None:
            return rows, width, pages
        return self._buckets.prompts(rows, width, pages)

    def chunks(self, rows: Sequence[PrefillRow], chunks: Sequence[PrefillChunk]) -> Passed:
        """Run one chunk of each row, in one pass."""
        batch, width, columns = self.dimensions(chunks)
        sizes = [len(chunk.tokens) for chunk in chunks]
        block = block_of(sizes, batch=batch, width=width)
        tokens = np.concatenate([chunk.tokens for chunk in chunks])[None]
        table = page_table(_pages(chunks, batch, columns))
        start = np.zeros(batch, np.int32)
        start[: len(rows)] = [row.position for row in rows]
        where = window(mx.array(start), width, table, self._page_size)
        inputs = mx.array(tokens.astype(np.int32))
        states: list[list[RecurrentState]] = []

        def settle(trail: RecurrentTrail) -> list[mx.array]:
            state = keep_all(trail, block)
            own = [_own(state, index) for index in range(len(rows))]
            states.append(own)
            return [array for one in own for array in (one.conv, one.memory)]

        hidden, _ = self._model.trunk(
            inputs,
            in_block(where, block),
            self._pools,
            self._stacked(rows, batch),
            chunked=self._chunked and width > 1,
            settle=settle,
        )
        ends = np.cumsum(sizes, dtype=np.int32)
        before = _before(rows, hidden, ends - np.array(sizes, np.int32))
        if self._mtp_pool is not None:
            self._write_slots(rows, sizes, before, inputs, block, mx.array(start - 1), table)
        # Taken out, like the states: a slice would hold on to the whole pass's.
        last = mx.take(hidden[0], mx.array(ends - 1), axis=0)[:, None]
        after, records = [], []
        for index, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            prompted, said = self._counted(row, chunk)
            after.append(
                PrefillRow(
                    spec=row.spec,
                    position=row.position + sizes[index],
                    states=tuple(layer[index] for layer in states),
                    carry=last if len(rows) == 1 else _one(last, index),
                    prompted=prompted,
                    said=said,
                )
            )
            piece = slice(int(ends[index]) - sizes[index], int(ends[index]))
            asked = row.spec.prompt_logprobs is not None
            records.append(self._report(row, before[:, piece], inputs[:, piece]) if asked else None)
        return Passed(rows=tuple(after), hidden=last, records=tuple(records))

    def _stacked(self, rows: Sequence[PrefillRow], batch: int) -> list[RecurrentState]:
        """The rows' recurrent states, zeros for stand-ins."""
        if all(row.carry is None for row in rows):
            return self._model.zero_states(batch)
        parts = [row.states for row in rows]
        if batch > len(rows):
            parts.append(tuple(self._model.zero_states(batch - len(rows))))
        if len(parts) == 1:
            return list(parts[0])
        return [
            RecurrentState(
                mx.concatenate([state.conv for state in layer], axis=0),
                mx.concatenate([state.memory for state in layer], axis=0),
            )
            for layer in zip(*parts, strict=True)
        ]

    def _counted(
        self, row: PrefillRow, chunk: PrefillChunk
    ) -> tuple[NDArray[np.bool_] | None, NDArray[np.int32] | None]:
        """`PrefillRow.prompted` and `said` after this chunk, a restored prefix included."""
        if not needs_counts(row.spec):
            return None, None
        vocab, output_start = self._model.config.vocab_size, row.spec.output_start
        seen = np.zeros(vocab, np.bool_) if row.prompted is None else row.prompted.copy()
        said = np.zeros(vocab, np.int32) if row.said is None else row.said.copy()
        pieces = [(chunk.start, chunk.tokens)]
        if chunk.prefix is not None:
            pieces.append((0, chunk.prefix))
        for start, tokens in pieces:
            seen[tokens] = True
            if output_start is not None:
                np.add.at(said, tokens[max(0, output_start - start) :], 1)
        return seen, said

    def _report(self, row: PrefillRow, before: mx.array, tokens: mx.array) -> mx.array | None:
        """Records [n, …] of the chunk's tokens [1, W], each under the hidden before it [1, W, H];
        a prompt's first token has none."""
        assert row.spec.prompt_logprobs is not None
        if row.carry is None:
            before, tokens = before[:, 1:], tokens[:, 1:]
        if tokens.shape[1] == 0:
            return None
        return prompt_records(self._model.head, before, tokens, row.spec.prompt_logprobs)

    def boundary(self, row: PrefillRow) -> Boundary:
        """The point a row has reached."""
        assert row.carry is not None
        return boundary_of(
            position=row.position,
            states=row.states,
            carry=row.carry if self._mtp_pool is not None else row.carry[:, :0],
            mtp=self._mtp_pool is not None and row.spec.speculative,
        )

    def _write_slots(
        self,
        rows: Sequence[PrefillRow],
        sizes: Sequence[int],
        before: mx.array,
        tokens: mx.array,
        block: Block,
        start: mx.array,
        table: mx.array,
    ) -> None:
        """The MTP slots `start` [B] and following of rows that speculate: tokens [1, N], each with
        the hidden before it [1, N, H]."""
        assert self._mtp_pool is not None
        written = np.zeros((block.batch, block.width), np.bool_)
        for place, row, size in zip(written, rows, sizes, strict=False):
            if row.spec.speculative:
                # A prompt's first token has no hidden before it, hence no slot.
                place[int(row.carry is None) : size] = True
        if not written.any():
            return
        where = slot_window(start, block.width, table, self._page_size)
        where = in_block(where, block, None if written.all() else mx.array(written))
        self._model.mtp_exact(before, tokens, where, self._mtp_pool)

    def finish(
        self, rows: Sequence[PrefillRow], hidden: mx.array, guide: Guide | None = None
    ) -> FirstTokens:
        """Sample each row's first token from its prompt's last hidden, [B, 1, H]."""
        logits = self._model.head(hidden)
        vocab = logits.shape[-1]
        specs = [row.spec for row in rows]
        statics = make_statics(specs, vocab)
        length = mx.array([row.position for row in rows], mx.int32)
        budget = mx.array([spec.max_tokens for spec in specs], mx.int32)
        prompted, counts = _counts(rows, vocab)
        mask = None if guide is None else guide.verify_mask(mx.zeros((len(rows), 0), mx.int32))
        history = now(budget, counts, prompted, statics.rules)
        ruled = apply_rules(logits, statics.rules, history, mask)
        law = shape(ruled, statics.target)[:, 0]
        noise = make_noise(statics, length[:, None], vocab)
        if noise is None:
            token = mx.argmax(law, axis=-1).astype(mx.int32)
        else:
            token = sample(law, statics, noise, 0, Purpose.TARGET)
        fault = ~mx.isfinite(logits.sum(axis=-1)).all(axis=-1)
        if guide is not None:
            fault = fault | guide.broken
        count = mx.where(fault, 0, 1).astype(mx.int32)
        stopped = (token[:, None] == statics.stops).any(axis=-1) & ~fault
        spent = (budget <= 1) & ~fault & ~stopped
        flags = stopped * FLAG_STOP + spent * FLAG_LENGTH + fault * FLAG_FAULT
        zero = mx.zeros_like(token)
        packed = mx.stack([token, count, zero, zero, flags.astype(mx.int32)], 1)
        if statics.logprobs is not None:
            records = record(logits, token[:, None], statics.logprobs)
            packed = mx.concatenate([packed, records[:, 0]], axis=1)
        if statics.rules.counting:
            counts = add_counts(counts, token[:, None], count[:, None])
        width = 0 if self._mtp_pool is None else 1
        stacked = RowArrays(
            length=length,
            primary=token,
            remaining=budget - count,
            done=fault | stopped | spent,
            states=(),
            pending_hidden=hidden[:, :width],
            pending_tokens=token[:, None][:, :width],
            pending_count=mx.full((len(rows),), width, mx.int32),
            counts=counts,
            prompted=prompted,
        )
        return FirstTokens(rows=_apart(stacked, rows), packed=packed, logits=logits)


def _pages(chunks: Sequence[PrefillChunk], batch: int, columns: int) -> NDArray[np.int32]:
    """The chunks' page tables [batch, columns]."""
    pages = np.full((batch, columns), NULL_PAGE, np.int32)
    for row, chunk in zip(pages, chunks, strict=False):
        row[: len(chunk.pages)] = chunk.pages
    return pages


def _before(rows: Sequence[PrefillRow], hidden: mx.array, first: NDArray[np.int32]) -> mx.array:
    """The hidden before each token, [1, N, H] of hidden [1, N, H]; a chunk's first token, at
    `first` [B], comes after the chunk before. Zeros before a prompt's first."""
    none = mx.zeros((1, 1, hidden.shape[-1]), hidden.dtype)
    # Restored where nothing needs it, a carry is empty.
    carries = [none if row.carry is None or not row.carry.size else row.carry for row in rows]
    joined = mx.concatenate([*carries, hidden], axis=1)
    if len(rows) == 1:
        return joined[:, :-1]
    index = np.arange(len(rows) - 1, len(rows) - 1 + hidden.shape[1])
    index[first] = np.arange(len(rows))
    return mx.take(joined, mx.array(index.astype(np.int32)), axis=1)


def _one(stacked: mx.array, index: int) -> mx.array:
    """Row `index` of [B, …] as [1, …]; a copy, because a slice would hold on to all rows."""
    return mx.take(stacked, mx.array([index], mx.int32), axis=0)


def _own(state: RecurrentState, index: int) -> RecurrentState:
    """A row of a stacked state by itself."""
    if state.memory.shape[0] == 1:
        return state
    return RecurrentState(_one(state.conv, index), _one(state.memory, index))


def _counts(rows: Sequence[PrefillRow], vocab: int) -> tuple[mx.array, mx.array]:
    """`RowArrays.prompted` and `counts` of the rows' prompts."""
    size = vocab if any(row.prompted is not None for row in rows) else 0
    seen, said = np.zeros((len(rows), size), np.bool_), np.zeros((len(rows), size), np.int32)
    for index, row in enumerate(rows):
        if row.prompted is not None:
            seen[index] = row.prompted
        if row.said is not None:
            said[index] = row.said
    return mx.array(seen), mx.array(said)


def _apart(stacked: RowArrays, rows: Sequence[PrefillRow]) -> tuple[RowArrays, ...]:
    """Each row by itself, with its states, and without what it only had for a neighbour's sake."""
    if len(rows) == 1:
        return (replace(stacked, states=rows[0].states),)
    own = []
    for index, row in enumerate(rows):
        arrays = replace(stacked.take([index]), states=row.states)
        own.append(arrays if needs_counts(row.spec) else arrays.counting(0))
    return tuple(own)
