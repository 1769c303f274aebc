"""Saved points of sequences: the states from which a row with the same tokens before it goes on.

A boundary at position L holds what is true after L tokens and lies in no page: the recurrent
states, and the trunk's hidden at L - 1 from which MTP slot L - 1 will be written. Its pages are the
scheduler's. Its arrays are its own (copied out of whatever batch they stood in) and, like all row
arrays, are replaced and never written, so any number of rows may start from one boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from engine.cache import RecurrentState
from engine.plan import PrefillChunk


@dataclass(frozen=True, slots=True)
class Boundary:
    """One saved point."""

    position: int
    """Tokens before it."""
    states: tuple[RecurrentState, ...]
    """Recurrent rows of one, one per Gated-DeltaNet layer."""
    carry: mx.array
    """[1, 1, H]: the trunk's hidden at position - 1; [1, 0, H] where nothing needs it."""
    mtp: bool
    """Whether MTP slots 0 … position - 2 are in its pages."""

    def arrays(self) -> list[mx.array]:
        return [*(a for s in self.states for a in (s.conv, s.memory)), self.carry]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def boundary_of(
    *, position: int, states: Iterable[RecurrentState], carry: mx.array, mtp: bool, index: int = 0
) -> Boundary:
    """The boundary of row `index` of stacked states [B, …] and carry [B, 1, H]."""
    row = mx.array([index], mx.int32)

    def own(stacked: mx.array) -> mx.array:
        """A copy: a slice would hold on to the whole batch, or to a whole chunk's activations."""
        return mx.take(stacked, row, axis=0)

    return Boundary(
        position=position,
        states=tuple(RecurrentState(own(s.conv), own(s.memory)) for s in states),
        carry=own(carry),
        mtp=mtp,
    )


class BoundaryStore:
    """All boundaries of an engine, at most `limit`, by the scheduler's ids."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._boundaries: dict[int, Boundary] = {}
        self._lost: dict[int, tuple[int, bool]] = {}

    def __len__(self) -> int:
        return len(self._boundaries)

    def __getitem__(self, boundary: int) -> Boundary:
        """Raises LostBoundaryError, and KeyError for an id that was never given."""
        if boundary in self._lost:
            raise LostBoundaryError("the row that was to compute this row's prefix failed")
        return self._boundaries[boundary]

    def facts(self) -> dict[int, tuple[int, bool]]:
        """(position, mtp) of every boundary, lost ones included."""
        return {key: (b.position, b.mtp) for key, b in self._boundaries.items()} | self._lost

    def add(self, boundary: int, saved: Boundary) -> None:
        self._boundaries[boundary] = saved

    def lose(self, boundary: int, position: int) -> None:
        """Note a boundary that a plan named and that could not be made. The scheduler may go on to
        restore it before it learns of that; whoever does, fails alone."""
        self._lost[boundary] = position, True

    def drop(self, boundaries: Iterable[int]) -> None:
        """Forget boundaries; unknown ids are ignored."""
        for boundary in boundaries:
            self._boundaries.pop(boundary, None)
            self._lost.pop(boundary, None)


class LostBoundaryError(Exception):
    """The row that was to save a boundary failed before it could."""


class PlannedBoundaries:
    """Which boundaries there will be while a plan runs, to check the plan before anything is built.

    Every method raises ValueError when the plan breaks the contract.
    """

    def __init__(self, facts: dict[int, tuple[int, bool]], *, limit: int, drafts: bool) -> None:
        """`drafts`: the engine keeps MTP history."""
        self._facts = facts
        self._limit = limit
        self._drafts = drafts

    def add(self, boundary: int, position: int, *, mtp: bool) -> None:
        """A row is kept or saved at `position`."""
        if boundary in self._facts:
            raise ValueError(f"boundary {boundary} exists already")
        self._facts[boundary] = position, mtp and self._drafts

    def drop(self, boundaries: Iterable[int]) -> None:
        """They are forgotten."""
        for boundary in boundaries:
            self._facts.pop(boundary, None)

    def restore(self, chunk: PrefillChunk) -> None:
        """A row's first chunk continues from `chunk.restore`."""
        row, spec, boundary = chunk.row, chunk.spec, chunk.restore
        if boundary not in self._facts:
            raise ValueError(f"row {row}: boundary {boundary} is unknown")
        position, mtp = self._facts[boundary]
        if chunk.start != position:
            raise ValueError(f"row {row}: starts at {chunk.start}, boundary {boundary} {position}")
        if chunk.prefix is None or len(chunk.prefix) != position:
            raise ValueError(f"row {row}: prefix must be the {position} tokens before the boundary")
        if spec is not None and spec.speculative and self._drafts and not mtp:
            raise ValueError(f"row {row}: speculative, but boundary {boundary} has no MTP history")
        if spec is not None and spec.prompt_logprobs is not None:
            raise ValueError(f"row {row}: prompt_logprobs and restore exclude each other")

    def finish(self) -> None:
        """All of the plan's boundaries must fit."""
        if len(self._facts) > self._limit:
            raise ValueError(f"{len(self._facts)} boundaries, the engine holds {self._limit}")
