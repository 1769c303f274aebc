"""The one decode cycle: draft, verify, accept, commit, for any number of rows and any depth.

Notation as in the design: a row has L committed positions; `primary` is its last emitted token,
not yet in the caches. With depth K (W = K + 1):

1. Draft. The first MTP pass runs on the true hiddens of the positions committed last time (ragged,
   left-aligned, `pending_count` each) and writes their slots; its last output gives draft 1.
   K - 1 single-token passes then feed the head its own output; their slots are provisional and
   are never stored.
   Before each draft, rows with a constraint ask the host what may follow (`engine.guided`).
2. Verify. One trunk forward on [primary, d1 … dK], every row at its own offset.
3. Accept, on the device, for all rows at once; stop tokens and `remaining` end a burst inside it.
4. Commit. Lengths advance by the number of emitted tokens; recurrent layers go to the state after
   exactly that many tokens of the block.

Everything here only builds a lazy graph; nothing is evaluated but the drafts that constraints ask
about. Plain decoding is depth 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache import PagePool, RecurrentTrail, slot_window, window
from engine.choice import Noise, make_noise, sample
from engine.guided import Guide
from engine.logprobs import record
from engine.models.delta import keep_all, keep_prefix
from engine.models.qwen3_5 import DraftPast, Qwen35Model
from engine.noise import Purpose
from engine.rows import RowArrays, RowStatics
from engine.rules import add_counts, apply_rules, now, through
from engine.sampling import Acceptance, accept, accept_equal, race, shape

FLAG_STOP, FLAG_LENGTH, FLAG_FAULT, FLAG_IDLE = 1, 2, 4, 8
"""Bits of a packed result: ended by a stop token, by max_tokens, by non-finite logits or a broken
constraint; was already finished before this step."""

TAIL = 4
"""Columns after the tokens in a packed result: emitted, drafted, accepted, flags."""

PENDING_LIMIT = 8
"""MTP slots that depth-0 cycles may leave unwritten before they are written in one pass."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """K proposals per row."""

    tokens: mx.array
    """[B, K] int32."""
    q: mx.array | None
    """[B, K, V]: the distributions they were drawn from; None when no row is verified by rejection,
    so that nobody asks."""


@dataclass(frozen=True, slots=True)
class CycleOutput:
    """What a cycle leaves: the rows' next state, and one small array for the host."""

    rows: RowArrays
    packed: mx.array
    """[B, W + TAIL + W · R] int32; R words of log probabilities per position when some row reports
    (`engine.logprobs.record`), else 0."""
    logits: mx.array
    """[B, W, V] float32: the target's logits at every verified position."""


class DecodeCycle:
    """Builds cycles over one model and its page pools."""

    def __init__(
        self,
        *,
        model: Qwen35Model,
        pools: list[PagePool],
        mtp_pool: PagePool | None,
        page_size: int,
        keep_states: bool = True,
    ) -> None:
        """`keep_states`: a verify keeps the recurrent state after each token and the commit picks
        one; otherwise the commit replays the block. Same bits, memory against time."""
        self._model = model
        self._keep_states = keep_states
        self._pools = pools
        self._mtp_pool = mtp_pool
        self._page_size = page_size

    @property
    def mtp_pool(self) -> PagePool | None:
        """The MTP layer's pages, where drafts are made."""
        return self._mtp_pool

    def run(
        self,
        rows: RowArrays,
        statics: RowStatics,
        table: mx.array,
        depth: int,
        limits: mx.array,
        guide: Guide | None = None,
    ) -> CycleOutput:
        """Build one cycle. `table` is [B, P + 1] (see `page_table`), `limits` int32 [B]."""
        limits = mx.clip(mx.minimum(limits, rows.remaining - 1), 0, depth)
        limits = mx.where(rows.done, 0, limits)
        width = depth + 1
        positions = rows.length[:, None] + mx.arange(1, width + 1, dtype=mx.int32)[None, :]
        noise = make_noise(statics, positions, self._model.config.vocab_size)
        drafts = self._draft(rows, statics, table, depth, noise, guide) if depth else None
        tokens = rows.primary[:, None]
        proposed = tokens[:, :0] if drafts is None else drafts.tokens
        if drafts is not None:
            tokens = mx.concatenate([tokens, proposed], axis=1)
        where = window(rows.length, width, table, self._page_size)
        hidden, trails = self._model.trunk(
            tokens, where, self._pools, list(rows.states), keep=depth > 0 and self._keep_states
        )
        logits = self._model.head(hidden)
        history = now(rows.remaining, rows.counts, rows.prompted, statics.rules)
        if history is not None:
            history = through(history, proposed, statics.rules)
        mask = None if guide is None else guide.verify_mask(proposed)
        ruled = apply_rules(logits, statics.rules, history, mask)
        decided = self._decide(rows, drafts, proposed, ruled, statics, noise, limits)
        broken = None if guide is None else guide.broken
        return self._commit(rows, statics, table, decided, limits, logits, hidden, trails, broken)

    def _draft(
        self,
        rows: RowArrays,
        statics: RowStatics,
        table: mx.array,
        depth: int,
        noise: Noise | None,
        guide: Guide | None,
    ) -> Drafts:
        """Propose `depth` tokens per row; writes the pending MTP slots."""
        assert self._mtp_pool is not None
        hidden = self.write_pending(rows, table)
        last = mx.maximum(rows.pending_count - 1, 0)[:, None, None]
        hidden = mx.take_along_axis(hidden, last, axis=1)
        past = DraftPast(self._mtp_pool, table, rows.length) if depth > 1 else None
        history = now(rows.remaining, rows.counts, rows.prompted, statics.rules)
        tokens: list[mx.array] = []
        laws: list[mx.array] = []
        for step in range(depth):
            logits = self._model.head(hidden)
            mask = None if guide is None else guide.draft_mask(tokens)
            logits = apply_rules(logits, statics.rules, history, mask)
            if noise is None:
                token = mx.argmax(logits[:, 0], axis=-1).astype(mx.int32)
            else:
                law = shape(logits, statics.draft)[:, 0]
                token = sample(law, statics, noise, step, Purpose.DRAFT)
                laws.append(law)
            tokens.append(token)
            if history is not None:
                history = history.after(token, statics.rules)
            if past is not None and step + 1 < depth:
                hidden = self._model.mtp_draft(hidden, token[:, None], past)
        q = mx.stack(laws, axis=1) if statics.rejects else None
        return Drafts(tokens=mx.stack(tokens, axis=1), q=q)

    def settled(self, rows: RowArrays, table: mx.array) -> RowArrays:
        """The same rows with every MTP slot below their length written, and only the last pending.

        For rows that no cycle has run since they ended. The slot left lies at position `length`:
        whatever a row writes from here on does.
        """
        self.write_pending(rows, table)
        return replace(
            rows,
            pending_hidden=rows.last_hidden(),
            pending_tokens=rows.primary[:, None],
            pending_count=mx.ones_like(rows.pending_count),
        )

    def write_pending(self, rows: RowArrays, table: mx.array) -> mx.array:
        """First MTP pass over the pending slots; returns its output [B, Wp, H]."""
        assert self._mtp_pool is not None
        width = rows.pending_tokens.shape[1]
        start = rows.length - rows.pending_count
        where = slot_window(start, width, table, self._page_size)
        return self._model.mtp_exact(
            rows.pending_hidden, rows.pending_tokens, where, self._mtp_pool
        )

    def _decide(
        self,
        rows: RowArrays,
        drafts: Drafts | None,
        tokens: mx.array,
        logits: mx.array,
        statics: RowStatics,
        noise: Noise | None,
        limits: mx.array,
    ) -> Acceptance:
        """Acceptance of the drafts, `tokens` [B, K], under the target's logits [B, W, V], rules
        applied. `rows` is for whoever overrules this."""
        return _decide(drafts, tokens, logits, statics, noise, limits)

    def _commit(
        self,
        rows: RowArrays,
        statics: RowStatics,
        table: mx.array,
        decided: Acceptance,
        limits: mx.array,
        logits: mx.array,
        hidden: mx.array,
        trails: list[RecurrentTrail],
        broken: mx.array | None,
    ) -> CycleOutput:
        width = decided.tokens.shape[1]
        fault = ~mx.isfinite(logits.sum(axis=-1)).all(axis=-1)
        if broken is not None:
            fault = fault | broken
        alive = ~(rows.done | fault)
        count, stopped = _burst(decided, statics.stops)
        count = mx.where(alive, count, 0)
        stopped = stopped & alive
        remaining = rows.remaining - count
        spent = alive & ~stopped & (remaining <= 0)
        last = mx.maximum(count - 1, 0)[:, None]
        primary = mx.take_along_axis(decided.tokens, last, axis=1)[:, 0]
        keep = keep_all if width == 1 else lambda trail: keep_prefix(trail, count)
        flags = (
            stopped * FLAG_STOP
            + spent * FLAG_LENGTH
            + (fault & ~rows.done) * FLAG_FAULT
            + rows.done * FLAG_IDLE
        )
        facts = [
            count,
            mx.where(alive, limits, 0),
            mx.where(alive, mx.minimum(decided.accepted, count), 0),
            flags,
        ]
        columns = [decided.tokens, *(fact.astype(mx.int32)[:, None] for fact in facts)]
        if statics.logprobs is not None:
            columns.append(mx.flatten(record(logits, decided.tokens, statics.logprobs), 1))
        counts = rows.counts
        if statics.rules.counting:
            place = mx.arange(width, dtype=mx.int32)[None, :]
            counts = add_counts(counts, decided.tokens, place < count[:, None])
        pending = self._pending(rows, statics, table, hidden, decided.tokens, count)
        new = RowArrays(
            length=rows.length + count,
            primary=mx.where(count > 0, primary, rows.primary),
            remaining=remaining,
            done=rows.done | fault | stopped | spent,
            states=tuple(keep(trail) for trail in trails),
            pending_hidden=pending[0],
            pending_tokens=pending[1],
            pending_count=pending[2],
            counts=counts,
            prompted=rows.prompted,
        )
        packed = mx.concatenate(columns, axis=1)
        return CycleOutput(rows=new, packed=packed, logits=logits)

    def _pending(
        self,
        rows: RowArrays,
        statics: RowStatics,
        table: mx.array,
        hidden: mx.array,
        tokens: mx.array,
        count: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """MTP slots to write next time: this block's, or one more behind those still waiting."""
        if self._mtp_pool is None:
            return rows.pending_hidden, rows.pending_tokens, rows.pending_count
        if tokens.shape[1] > 1 or not statics.speculative:
            return hidden, tokens, count
        if rows.pending_tokens.shape[1] >= PENDING_LIMIT:
            # The pass is run for the slots it writes; its output is not needed.
            self.write_pending(rows, table)
            return hidden, tokens, count
        wide = rows.widened(rows.pending_tokens.shape[1] + 1)
        slot = mx.arange(wide.pending_tokens.shape[1], dtype=mx.int32)[None, :]
        here = slot == rows.pending_count[:, None]
        return (
            mx.where(here[..., None], hidden, wide.pending_hidden),
            mx.where(here, tokens, wide.pending_tokens),
            rows.pending_count + count,
        )


def _decide(
    drafts: Drafts | None,
    tokens: mx.array,
    logits: mx.array,
    statics: RowStatics,
    noise: Noise | None,
    limits: mx.array,
) -> Acceptance:
    """Acceptance of the drafts, `tokens` [B, K], under the target's logits [B, W, V], rules
    applied."""
    if noise is None:
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        return accept_equal(tokens, best, limits)
    p = shape(logits, statics.target)
    if drafts is None:
        token = sample(p[:, 0], statics, noise, 0, Purpose.TARGET)
        return Acceptance(tokens=token[:, None], accepted=mx.zeros_like(token))
    rejection = None
    if noise.uniform is not None:
        assert drafts.q is not None
        rejection = accept(tokens, drafts.q, p, noise.uniform, limits)
    if noise.exponential is None or statics.coupled is None:
        assert rejection is not None
        return rejection
    coupling = accept_equal(tokens, race(p, noise.exponential), limits)
    if rejection is None:
        return coupling
    return Acceptance(
        tokens=mx.where(statics.coupled[:, None], coupling.tokens, rejection.tokens),
        accepted=mx.where(statics.coupled, coupling.accepted, rejection.accepted),
    )


def _burst(decided: Acceptance, stops: mx.array) -> tuple[mx.array, mx.array]:
    """Tokens to emit [B] and whether a stop token is the last of them [B]."""
    place = mx.arange(decided.tokens.shape[1], dtype=mx.int32)[None, :]
    hit = (decided.tokens[..., None] == stops[:, None, :]).any(axis=-1)
    hit = hit & (place <= decided.accepted[:, None])
    stopped = hit.any(axis=-1)
    first = mx.argmax(hit, axis=-1).astype(mx.int32)
    return mx.where(stopped, first + 1, decided.accepted + 1), stopped


def unpack(packed: list[int], width: int) -> tuple[tuple[int, ...], int, int, int]:
    """Tokens emitted, drafted, accepted, flags of one row of a packed result of that width."""
    count, drafted, accepted, flags = packed[width : width + TAIL]
    return tuple(packed[:count]), drafted, accepted, flags
