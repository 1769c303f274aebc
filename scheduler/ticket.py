"""A step in flight: which rows it names, what it may add to each, and what it may not."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan import PrefillChunk, RowResult
from scheduler.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class Ticket:
    """Held from `plan` until the step's result is committed. A row's pages outlive its tickets."""

    step: int
    chunks: list[tuple[Sequence, PrefillChunk]] = field(default_factory=list)
    decode: list[tuple[Sequence, int]] = field(default_factory=list)
    """Each row of the cohort with the most tokens it may gain."""
    depth: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(chunk.tokens) for _, chunk in self.chunks)


def breach(sequence: Sequence, row: RowResult | None, most: int) -> str | None:
    """What is wrong with a result for a row that has not ended, if anything. `most`: tokens the
    step may have added."""
    if row is None:
        return "no result"
    if row.fault is not None:
        return None
    emitted = len(row.tokens)
    if not 1 <= emitted <= most:
        return f"{emitted} tokens from a step that emits 1 … {most}"
    total = sequence.emitted + emitted
    limit = sequence.request.max_tokens
    if total > limit or (total == limit and row.finish is None):
        return f"{total} tokens with finish {row.finish}; max_tokens is {limit}"
    if not 0 <= row.accepted <= row.drafted < most:
        return f"{row.accepted} of {row.drafted} drafts accepted; the limit is {most - 1}"
    return None
