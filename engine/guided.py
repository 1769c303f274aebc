"""Rows whose output must have a form: what their constraints allow, as masks on the device.

A constraint lives on the host, so a guided cycle is built step by step: before draft j of any row
is shaped, the drafts before it are read and each row's constraint says what may follow; the same
answers mask the verify rows. A stop token ends a form: positions after one decide nothing, nor do
positions past a row's limit, and the constraint is not asked there.

A constraint that raises, answers in another shape or allows nothing breaks its row, not the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.plan import Constraint

Words = NDArray[np.uint32]


@dataclass(slots=True)
class Form:
    """One row's constraint, and how far the row is as the host knows it."""

    constraint: Constraint
    stop_ids: frozenset[int]
    remaining: int
    """Tokens the row may still emit."""
    ended: bool = False
    fault: str | None = None

    def advance(self, tokens: Sequence[int], *, ended: bool) -> None:
        """The row emitted these."""
        self.remaining -= len(tokens)
        self.ended = self.ended or ended
        if tokens and self.fault is None:
            try:
                self.constraint.advance(tokens)
            except Exception as error:
                self.fault = f"its constraint failed: {type(error).__name__}: {error}"

    def allowed(self, drafted: tuple[int, ...], words: int) -> Words | None:
        """The constraint's mask after `drafted`; None when nothing is known to be allowed there.

        Sets `fault` when the constraint breaks its promises.
        """
        try:
            mask = self.constraint.mask(drafted)
        except Exception as error:
            self.fault = f"its constraint failed: {type(error).__name__}: {error}"
            return None
        if mask is None:
            if not drafted:
                self.fault = "its constraint does not accept what was emitted"
            return None
        if mask.dtype != np.uint32 or mask.shape != (words,):
            self.fault = (
                f"its constraint's mask is {mask.dtype} {mask.shape}, not uint32 ({words},)"
            )
            return None
        return mask


class Guide:
    """Masks for one cycle of a guided cohort."""

    def __init__(
        self,
        forms: Sequence[Form],
        *,
        vocab: int,
        limits: Sequence[int],
        before_reading: Callable[[mx.array], None] = mx.eval,
    ) -> None:
        """`limits[i]`: most drafts row i may accept. `before_reading` is called with drafts that
        are about to be read, and has them evaluated (the device may be busy with another cohort
        until then)."""
        self._forms = forms
        self._vocab = vocab
        self._words = -(-vocab // 32)
        self._reach = [
            min(limit, form.remaining - 1) for limit, form in zip(limits, forms, strict=True)
        ]
        self._known: list[dict[tuple[int, ...], Words]] = [{} for _ in forms]
        self._before_reading = before_reading

    @property
    def broken(self) -> mx.array:
        """[B] bool: rows whose constraint broke its promises in this cycle or before."""
        return mx.array([form.fault is not None for form in self._forms])

    def draft_mask(self, drafts: Sequence[mx.array]) -> mx.array:
        """What may follow these drafts ([B] each), bool [B, 1, V]. Reads the last of them."""
        prefixes = self._prefixes(mx.stack(list(drafts), axis=1) if drafts else None)
        place = len(drafts)
        lines = [
            self._line(i, prefix, wanted=place < self._reach[i])
            for i, prefix in enumerate(prefixes)
        ]
        return self._on_device([[line] for line in lines])

    def verify_mask(self, drafts: mx.array) -> mx.array:
        """What each verify row allows, bool [B, K + 1, V], drafts [B, K]. Reads the drafts."""
        depth = drafts.shape[1]
        prefixes = self._prefixes(drafts if depth else None)
        return self._on_device(
            [
                [
                    self._line(i, prefix[:place], wanted=place <= self._reach[i])
                    for place in range(depth + 1)
                ]
                for i, prefix in enumerate(prefixes)
            ]
        )

    def _prefixes(self, drafts: mx.array | None) -> list[tuple[int, ...]]:
        if drafts is None:
            return [()] * len(self._forms)
        self._before_reading(drafts)
        read: list[list[int]] = drafts.tolist()  # type: ignore[assignment]
        return [tuple(row) for row in read]

    def _line(self, row: int, prefix: tuple[int, ...], *, wanted: bool) -> Words:
        """The mask of one row after a prefix; everything where it decides nothing."""
        form, known = self._forms[row], self._known[row]
        everything = np.full(self._words, 0xFFFFFFFF, np.uint32)
        if not wanted or form.ended or form.fault or form.stop_ids.intersection(prefix):
            return everything
        if prefix not in known:
            mask = form.allowed(prefix, self._words)
            if mask is not None and not _allows(mask, self._vocab):
                form.fault = "its constraint allows no token"
            # A draft that is not allowed is refused where it stands; what follows is never used.
            known[prefix] = everything if mask is None else mask
        return known[prefix]

    def _on_device(self, lines: Sequence[Sequence[Words]]) -> mx.array:
        words = mx.array(np.asarray(lines))[..., None]
        bits = (words >> mx.arange(32, dtype=mx.uint32)) & 1
        return mx.flatten(bits, 2)[..., : self._vocab] > 0


def _allows(mask: Words, vocab: int) -> bool:
    """Whether some token of the vocabulary is allowed; bits past it count for nothing."""
    if mask[: vocab // 32].any():
        return True
    rest = vocab % 32
    return bool(rest and mask[vocab // 32] & np.uint32((1 << rest) - 1))
