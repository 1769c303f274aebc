"""A step in flight: which rows it names, what it may add to each, and what it may not."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan import PrefillChunk, RowResult
from scheduler.pace import Load
from scheduler.prefix import Entry
from scheduler.sequence import Sequence


@dataclass(slots=True)
class Cohort:
    """Rows that decode together in one step."""

    depth: int = 0
    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    """Each with the most tokens it may gain."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """Held from `plan` until the step's result is committed. A row's pages outlive its tickets."""

    step: int
    chunks: list[tuple[Sequence, PrefillChunk]] = field(default_factory=list)
    saves: list[tuple[Sequence, Entry]] = field(default_factory=list)
    """Entries that chunks of this step save."""
    decode: Cohort = field(default_factory=Cohort)
    guided: Cohort = field(default_factory=Cohort)
    load: Load | None = None
    """What it is estimated to take, when that is to be compared."""

    @property
    def decodes(self) -> bool:
        return bool(self.decode.rows or self.guided.rows)

    @property
    def alone(self) -> bool:
        """It runs no chunk, and one cohort at the most."""
        return not (self.chunks or (self.decode.rows and self.guided.rows))

    @property
    def shapes(self) -> list[tuple[str, int, int]]:
        """What an engine may compile for."""
        cohorts = (("decode", self.decode), ("guided", self.guided))
        found = [(kind, len(c.rows), c.depth) for kind, c in cohorts if c.rows]
        return found + [("chunk", len(chunk.tokens), 0) for _, chunk in self.chunks]

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
    if sequence.request.logprobs is not None and (
        row.logprobs is None or len(row.logprobs.chosen) != emitted
    ):
        return "log probabilities are not of the tokens"
    total = sequence.emitted + emitted
    limit = sequence.request.max_tokens
    if total > limit or (total == limit and row.finish is None):
        return f"{total} tokens with finish {row.finish}; max_tokens is {limit}"
    if not 0 <= row.accepted <= row.drafted < most:
        return f"{row.accepted} of {row.drafted} drafts accepted; the limit is {most - 1}"
    return None


def chunk_breach(sequence: Sequence, chunk: PrefillChunk, row: RowResult | None) -> str | None:
    """What is wrong with a chunk's prompt log probabilities, if anything; with the whole result
    when the chunk is not the last."""
    if row is not None and row.fault is not None:
        return None
    if not chunk.last and row is not None and (row.tokens or row.finish is not None):
        return "tokens from a chunk that is not the last"
    given = 0
    if row is not None and row.prompt_logprobs is not None:
        given = len(row.prompt_logprobs.chosen)
    wanted = len(chunk.tokens) - (chunk.start == 0)
    if sequence.prompt_logprobs_asked is not None and given != wanted:
        return f"{given} prompt log probabilities for {wanted} positions"
    return None
