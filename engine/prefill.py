"""Prefill: one row's prompt in chunks, each at its own length.

Nothing is ever padded into a recurrent state. The MTP history is built along: slot p pairs the
trunk's hidden at p with the token at p + 1, so a chunk writes the slots start - 1 … end - 2, with
the hidden of the chunk before carried over; the prompt's last slot waits for the first sampled
token, exactly as slots wait after a decode cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.boundary import Boundary, boundary_of
from engine.cache import PagePool, RecurrentState, page_table, slot_window, window
from engine.choice import make_noise, sample
from engine.cycle import FLAG_FAULT, FLAG_LENGTH, FLAG_STOP
from engine.guided import Guide
from engine.logprobs import prompt_records, record
from engine.models.delta import keep_all
from engine.models.qwen3_5 import Qwen35Model
from engine.noise import Purpose
from engine.plan import PrefillChunk, RowSpec
from engine.rows import RowArrays, make_statics
from engine.rules import add_counts, apply_rules, needs_counts, now
from engine.sampling import shape


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
class FirstToken:
    """A completed prompt: the row's decode state, and [1, 1 + TAIL + R] for the host (see
    `engine.cycle.CycleOutput.packed`)."""

    rows: RowArrays
    packed: mx.array
    logits: mx.array


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
    ) -> None:
        """`chunked`: run recurrences in blocks (see `Qwen35Model.trunk`)."""
        self._model = model
        self._pools = pools
        self._mtp_pool = mtp_pool
        self._page_size = page_size
        self._chunked = chunked

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

    def chunk(
        self, row: PrefillRow, chunk: PrefillChunk
    ) -> tuple[PrefillRow, mx.array, mx.array | None]:
        """Run one chunk; returns the row after it, the chunk's last hidden [1, 1, H] and, when the
        row reports its prompt, the records of the chunk's tokens (without the prompt's first)."""
        size = len(chunk.tokens)
        tokens = mx.array(np.ascontiguousarray(chunk.tokens, dtype=np.int32))[None]
        table = page_table(chunk.pages[None])
        where = window(mx.array([row.position], mx.int32), size, table, self._page_size)
        hidden, trails = self._model.trunk(
            tokens, where, self._pools, list(row.states), chunked=self._chunked and size > 1
        )
        if self._mtp_pool is not None and row.spec.speculative:
            self._write_slots(row, hidden, tokens, table)
        records = self._report(row, hidden, tokens)
        prompted, said = self._counted(row, chunk)
        after = PrefillRow(
            spec=row.spec,
            position=row.position + size,
            states=tuple(keep_all(trail) for trail in trails),
            carry=hidden[:, -1:],
            prompted=prompted,
            said=said,
        )
        return after, hidden[:, -1:], records

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

    def _report(self, row: PrefillRow, hidden: mx.array, tokens: mx.array) -> mx.array | None:
        """Records [n, …] of the chunk's tokens, each under the hidden before it."""
        if row.spec.prompt_logprobs is None:
            return None
        before, tokens = _shifted(row, hidden, tokens)
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
        self, row: PrefillRow, hidden: mx.array, tokens: mx.array, table: mx.array
    ) -> None:
        assert self._mtp_pool is not None
        first = row.position if row.carry is None else row.position - 1
        hidden, tokens = _shifted(row, hidden, tokens)
        if tokens.shape[1] == 0:
            return
        start = mx.array([first], mx.int32)
        where = slot_window(start, tokens.shape[1], table, self._page_size)
        self._model.mtp_exact(hidden, tokens, where, self._mtp_pool)

    def finish(self, row: PrefillRow, hidden: mx.array, guide: Guide | None = None) -> FirstToken:
        """Sample the first token from the prompt's last hidden [1, 1, H]."""
        logits = self._model.head(hidden)
        vocab = logits.shape[-1]
        statics = make_statics([row.spec], vocab)
        length = mx.array([row.position], mx.int32)
        budget = mx.array([row.spec.max_tokens], mx.int32)
        seen = np.zeros((1, 0), np.bool_) if row.prompted is None else row.prompted[None]
        said = np.zeros((1, 0), np.int32) if row.said is None else row.said[None]
        prompted, counts = mx.array(seen), mx.array(said)
        none = mx.zeros((1, 0), mx.int32)
        mask = None if guide is None else guide.verify_mask(none)
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
        spent = mx.array([row.spec.max_tokens <= 1]) & ~fault & ~stopped
        flags = stopped * FLAG_STOP + spent * FLAG_LENGTH + fault * FLAG_FAULT
        zero = mx.zeros_like(token)
        packed = mx.stack([token, count, zero, zero, flags.astype(mx.int32)], 1)
        if statics.logprobs is not None:
            records = record(logits, token[:, None], statics.logprobs)
            packed = mx.concatenate([packed, records[:, 0]], axis=1)
        if statics.rules.counting:
            counts = add_counts(counts, token[:, None], count[:, None])
        width = 0 if self._mtp_pool is None else 1
        rows = RowArrays(
            length=length,
            primary=token,
            remaining=budget - count,
            done=fault | stopped | spent,
            states=row.states,
            pending_hidden=hidden[:, :width],
            pending_tokens=token[:, None][:, :width],
            pending_count=mx.full((1,), width, mx.int32),
            counts=counts,
            prompted=prompted,
        )
        return FirstToken(rows=rows, packed=packed, logits=logits)


def _shifted(row: PrefillRow, hidden: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Hiddens paired with the token after each, the chunk before's last hidden first: [1, n, H] and
    [1, n]. A prompt's first token has no hidden before it."""
    if row.carry is None:
        return hidden[:, :-1], tokens[:, 1:]
    return mx.concatenate([row.carry, hidden[:, :-1]], axis=1), tokens
