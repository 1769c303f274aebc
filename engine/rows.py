"""What the device remembers about rows between steps, and how rows join and leave a batch.

The rows of the running cohort live stacked, so that a cycle with unchanged membership moves
nothing; a row outside it (just prefilled, paused, in another cohort) is parked as a stack of one.
All arrays are replaced, never written in place, so a restored or parked row shares no mutable
state with anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import mlx.core as mx

from engine.cache import RecurrentState
from engine.plan import RowSpec, SamplingParams
from engine.rules import LogitRules, make_rules, needs_counts
from engine.sampling import Shaper, coupled_keys, make_shaper, noise_keys

_NOBODY = -1
"""Place of the stack whose row is kept elsewhere."""

FIRST_PAD = -2
"""Rows with this id and lower stand in for nobody (`engine.padding`)."""


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Dynamic state of B rows."""

    length: mx.array
    """[B] int32: positions committed to the trunk's caches."""
    primary: mx.array
    """[B] int32: last emitted token, at position `length`, not yet in the caches."""
    remaining: mx.array
    """[B] int32: tokens the row may still emit."""
    done: mx.array
    """[B] bool: finished on the device."""
    states: tuple[RecurrentState, ...]
    """Recurrent rows, one per Gated-DeltaNet layer."""
    pending_hidden: mx.array
    """[B, Wp, H]: trunk hiddens whose MTP slots are not written yet, left-aligned; Wp is 0 without
    an MTP head."""
    pending_tokens: mx.array
    """[B, Wp] int32: the token after each of them."""
    pending_count: mx.array
    """[B] int32: how many are valid. MTP slots written so far: length - pending_count."""
    counts: mx.array
    """[B, Vc] int32: occurrences of each token in the row's output, that of before a preemption
    included (`RowSpec.output_start`); Vc is 0 where no row of the stack has a penalty, else V."""
    prompted: mx.array
    """[B, Vc] bool: the token occurs in the row's prompt."""

    def arrays(self) -> list[mx.array]:
        """Every array, for evaluation."""
        flat = [a for state in self.states for a in (state.conv, state.memory)]
        flat += [getattr(self, f.name) for f in fields(self) if f.name != "states"]
        return flat

    def take(self, rows: Sequence[int]) -> RowArrays:
        """Rows at these indices, in this order."""
        index = mx.array(list(rows), mx.int32)
        taken = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "states"}
        states = tuple(RecurrentState(s.conv[index], s.memory[index]) for s in self.states)
        return RowArrays(states=states, **taken)

    def last_hidden(self) -> mx.array:
        """The trunk's hidden at length - 1, [B, 1, H], of rows that no cycle has run since they
        ended; [B, 0, H] without an MTP head."""
        if self.pending_hidden.shape[1] <= 1:
            return self.pending_hidden
        last = (self.pending_count - 1)[:, None, None]
        return mx.take_along_axis(self.pending_hidden, last, axis=1)

    def widened(self, width: int) -> RowArrays:
        """The same rows with room for `width` pending entries."""
        missing = width - self.pending_tokens.shape[1]
        if missing <= 0:
            return self
        return replace(
            self,
            pending_hidden=mx.pad(self.pending_hidden, [(0, 0), (0, missing), (0, 0)]),
            pending_tokens=mx.pad(self.pending_tokens, [(0, 0), (0, missing)]),
        )

    def counting(self, vocab: int) -> RowArrays:
        """The same rows with counts of the whole vocabulary, or with 0 without."""
        missing = vocab - self.counts.shape[1]
        if missing == 0:
            return self
        if vocab == 0:  # new arrays: a slice might hold on to what it was cut from
            none = mx.zeros((self.counts.shape[0], 0), mx.int32)
            return replace(self, counts=none, prompted=none.astype(mx.bool_))
        pad = [(0, 0), (0, missing)]
        return replace(self, counts=mx.pad(self.counts, pad), prompted=mx.pad(self.prompted, pad))


def stack(parts: Sequence[RowArrays]) -> RowArrays:
    """All rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.pending_tokens.shape[1] for part in parts)
    counted = max(part.counts.shape[1] for part in parts)
    parts = [part.widened(width).counting(counted) for part in parts]
    joined = {
        f.name: mx.concatenate([getattr(part, f.name) for part in parts], axis=0)
        for f in fields(RowArrays)
        if f.name != "states"
    }
    states = tuple(
        RecurrentState(
            mx.concatenate([s.conv for s in layer], axis=0),
            mx.concatenate([s.memory for s in layer], axis=0),
        )
        for layer in zip(*(part.states for part in parts), strict=True)
    )
    return RowArrays(states=states, **joined)


@dataclass(frozen=True, slots=True)
class RowStatics:
    """What a batch's sampling parameters amount to on the device; changes with membership only."""

    target: Shaper
    draft: Shaper
    keys: mx.array
    """[B, 2] uint32 noise keys."""
    stops: mx.array
    """[B, S] int32 stop ids, padded with -1; S >= 1."""
    speculative: bool
    """Some row is drafted for, so MTP history must be kept."""
    rules: LogitRules
    coupled: mx.array | None
    """[B] bool: rows sampled in coupled mode; None when no row is."""
    coupled_keys: mx.array | None
    """[B, 2] uint32 keys of their noise."""
    rejects: bool
    """Some row is sampled, and not in coupled mode."""
    logprobs: int | None
    """Most alternatives any row reports; None when no row reports."""

    @property
    def greedy(self) -> bool:
        """No row needs noise: every draft and every target is an argmax."""
        return not self.rejects and self.coupled is None


def is_coupled(params: SamplingParams) -> bool:
    """Whether a row's tokens are drawn with coupled noise; greedy rows need none."""
    return params.coupled and params.temperature > 0.0


def make_statics(specs: Sequence[RowSpec], vocab: int) -> RowStatics:
    """Stack the rows' specifications."""
    sampling = [spec.sampling for spec in specs]
    size = max(1, *(len(spec.stop_ids) for spec in specs)) if specs else 1
    stops = [list(spec.stop_ids) + [-1] * (size - len(spec.stop_ids)) for spec in specs]
    coupled = [is_coupled(params) for params in sampling]
    sampled = [p.temperature > 0.0 or bool(p.draft_temperature) for p in sampling]
    reported = [spec.logprobs for spec in specs if spec.logprobs is not None]
    return RowStatics(
        target=make_shaper(sampling, vocab),
        draft=make_shaper(sampling, vocab, draft=True),
        keys=noise_keys(sampling),
        stops=mx.array(stops, mx.int32),
        speculative=any(spec.speculative for spec in specs),
        rules=make_rules(specs, vocab),
        coupled=mx.array(coupled) if any(coupled) else None,
        coupled_keys=coupled_keys(sampling) if any(coupled) else None,
        rejects=any(s and not c for s, c in zip(sampled, coupled, strict=True)),
        logprobs=max(reported, default=None),
    )


class RowTable:
    """All rows whose prompt is complete: one stacked cohort, the others parked."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._specs: dict[int, RowSpec] = {}
        self._parked: dict[int, RowArrays] = {}
        self._batch: tuple[int, ...] = ()
        self._arrays: RowArrays | None = None
        self._statics: RowStatics | None = None
        self._pad: RowArrays | None = None

    def __contains__(self, row: int) -> bool:
        return row in self._specs

    def __len__(self) -> int:
        return len(self.rows())

    def rows(self) -> set[int]:
        """Ids of all rows that can decode."""
        return {row for row in self._specs if row >= 0}

    @property
    def stacked(self) -> tuple[int, ...]:
        """Rows of the running cohort, in order."""
        return self._batch

    def specs(self, rows: Sequence[int]) -> tuple[RowSpec, ...]:
        """Of rows that can decode."""
        return tuple(self._specs[row] for row in rows)

    def add(self, row: int, spec: RowSpec, arrays: RowArrays) -> None:
        """Park a freshly prefilled row."""
        self._specs[row] = spec
        self._parked[row] = arrays

    def add_pads(self, specs: dict[int, RowSpec], arrays: RowArrays) -> None:
        """Let `batch` take these ids as rows that all look like `arrays`, whenever they join."""
        self._specs |= specs
        self._pad = arrays

    def release(self, rows: Iterable[int]) -> None:
        """Forget rows; unknown ids are ignored. A stacked row leaves at the next regrouping."""
        for row in rows:
            self._specs.pop(row, None)
            self._parked.pop(row, None)

    def batch(self, rows: tuple[int, ...]) -> tuple[RowArrays, RowStatics]:
        """The rows stacked in this order; every one must be known."""
        if rows != self._batch or self._arrays is None or self._statics is None:
            self._regroup(rows)
        assert self._arrays is not None
        assert self._statics is not None
        return self._arrays, self._statics

    def update(self, arrays: RowArrays) -> None:
        """Replace the stacked rows' state after a cycle."""
        self._arrays = arrays

    def spec(self, row: int) -> RowSpec:
        """What a row was started with; it must be known."""
        return self._specs[row]

    def one(self, row: int) -> RowArrays:
        """A row by itself; it must be known."""
        if row in self._parked:
            return self._parked[row]
        assert self._arrays is not None
        return self._own(row, self._arrays.take([self._batch.index(row)]))

    def replace(self, row: int, arrays: RowArrays) -> None:
        """Park a row with another state. A stacked row leaves its place; the others stay."""
        self._batch = tuple(_NOBODY if other == row else other for other in self._batch)
        self._parked[row] = arrays

    def arrays(self) -> list[mx.array]:
        """Every live array, for evaluation."""
        live = [] if self._arrays is None else self._arrays.arrays()
        return live + [a for parked in self._parked.values() for a in parked.arrays()]

    def _take_parked(self, row: int) -> RowArrays:
        if row <= FIRST_PAD and self._pad is not None:
            return self._pad
        return self._parked.pop(row)

    def _regroup(self, rows: tuple[int, ...]) -> None:
        old = {row: i for i, row in enumerate(self._batch)}
        for row, index in old.items():
            if row not in rows and row >= 0 and row in self._specs and self._arrays is not None:
                self._parked[row] = self._own(row, self._arrays.take([index]))
        staying = [row for row in rows if row in old]
        joining = [row for row in rows if row not in old]
        parts = [self._take_parked(row) for row in joining]
        if staying and self._arrays is not None:
            indices = [old[row] for row in staying]
            whole = indices == list(range(len(self._batch)))
            parts.insert(0, self._arrays if whole else self._arrays.take(indices))
        stacked = stack(parts)
        order = staying + joining
        if tuple(order) != rows:
            stacked = stacked.take([order.index(row) for row in rows])
        self._statics = make_statics([self._specs[row] for row in rows], self._vocab)
        if not self._statics.rules.counting:
            stacked = stacked.counting(0)
        self._batch, self._arrays = rows, stacked

    def _own(self, row: int, arrays: RowArrays) -> RowArrays:
        """A row without what it only had for a neighbour's sake."""
        return arrays if needs_counts(self._specs[row]) else arrays.counting(0)
