"""State of one sequence, from the door to its last event.

The host knows a row's length one or two steps late. `reach` therefore counts what the host has seen
plus the most that steps in flight may add; page tables follow `reach`, so the device never writes
where no page is, whatever it accepts.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.plan import MAX_DEPTH, Logprobs, RowResult, RowSpec, pages_needed
from scheduler.request import FinishReason, GenerationRequest, Usage


def _histogram() -> list[int]:
    return [0] * (MAX_DEPTH + 1)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One accepted request. Counts are of tokens unless a name says otherwise."""

    request: GenerationRequest
    prompt: NDArray[np.int32]
    submitted_at: float
    depth_cap: int
    """Most drafts per cycle for this row; 0 when it is never drafted for."""

    row: int = -1
    """Engine row id, -1 while queued."""
    slot: int = -1
    """Slot of its page table, -1 while queued."""

    hashes: list[bytes] | None = None
    """Chained hashes of its prompt's whole pages, once somebody needed them."""
    cached: int = 0
    """Prompt tokens it took from a saved prefix."""
    origin: int = 0
    """Boundary it started from; 0 for none."""
    saves: tuple[int, ...] = ()
    """Positions in its prompt at which a boundary is to be saved, where a chunk must end."""

    cursor: int = 0
    """Prompt tokens handed to the engine so far, or taken from a saved prefix."""
    emitted: int = 0
    """Completion tokens handed to its stream."""
    output: list[int] = field(default_factory=list)
    """Tokens the device emitted, as far as the host has seen, those after its end included."""
    unread: int = 0
    """Completion tokens the reader has not taken yet."""

    tickets: int = 0
    """Steps in flight that name this row."""
    ceiling: int = 0
    """Most tokens those steps may still add."""
    floor: int = 0
    """Fewest tokens they will add, unless the row ends first."""

    cause: FinishReason | None = None
    """First cause of its end; a sequence with a cause emits nothing and is planned no more."""
    turn: int = 0
    """Its place in the order of ends."""
    spoiled: bool = False
    """The device reported a fault of this row: nothing it has left may be used."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    paused_at: float | None = None
    """Since when the stream has been full without a read; None while it is not full."""

    cycles: int = 0
    drafted: list[int] = field(default_factory=_histogram)
    """[d]: cycles in which d drafts were up for acceptance."""
    accepted: list[int] = field(default_factory=_histogram)
    """[a]: drafting cycles in which a drafts were accepted."""

    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Of the chunks seen so far, when the request asked."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def started(self) -> bool:
        return self.row >= 0

    @property
    def prefilling(self) -> bool:
        """Some of the prompt has not been handed to the engine."""
        return self.cursor < len(self.prompt)

    @property
    def speculative(self) -> bool:
        """It is drafted for, so it needs MTP history and leaves some."""
        return self.depth_cap > 0

    @property
    def guided(self) -> bool:
        return self.request.constraint is not None

    @property
    def restores(self) -> bool:
        """It may start from a saved prefix."""
        return self.request.reuse_prefix and self.request.prompt_logprobs is None

    @property
    def longest(self) -> int:
        """Positions this sequence can ever occupy."""
        return len(self.prompt) + self.request.max_tokens

    @property
    def can_decode(self) -> bool:
        """Its prompt is handed over, it has not ended, its reader keeps up, steps in flight do not
        already use up max_tokens, and none names it if the host must know its tokens first."""
        return (
            self.cause is None
            and self.paused_at is None
            and self.cursor == len(self.prompt)
            and self.emitted + self.floor < self.request.max_tokens
            and not (self.tickets and self.request.constraint is not None)
        )

    @property
    def streams(self) -> bool:
        """Its prompt is handed over, and a reader waits for what comes next."""
        return self.cause is None and self.paused_at is None and not self.prefilling

    def reach(self, depth: int) -> int:
        """Positions this row can occupy after one more decode step at `depth`."""
        known = len(self.prompt) + self.emitted
        return min(known + self.ceiling + depth + 1, self.longest)

    def pages_at_worst(self, page_size: int) -> int:
        return pages_needed(self.longest, page_size)

    def spec(self) -> RowSpec:
        """What the engine is told with the first chunk."""
        return RowSpec(
            sampling=self.request.sampling,
            max_tokens=self.request.max_tokens,
            stop_ids=self.request.stop_ids,
            speculative=self.speculative,
            min_tokens=self.request.min_tokens,
            logprobs=self.request.logprobs,
            prompt_logprobs=self.request.prompt_logprobs,
            constraint=self.request.constraint,
        )

    def record(self, result: RowResult, now: float) -> None:
        """Count tokens and drafts of a result that emitted something for its stream."""
        if self.first_token_at is None:
            self.first_token_at = now  # from the last prefill chunk: no cycle, no drafts
        else:
            self.cycles += 1
        self.last_token_at = now
        self.emitted += len(result.tokens)
        self.unread += len(result.tokens)
        if result.drafted:
            self.drafted[result.drafted] += 1
            self.accepted[result.accepted] += 1

    def usage(self, finished_at: float | None) -> Usage:
        drafted = per_position(self.drafted)
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            completion_tokens=self.emitted,
            cycles=self.cycles,
            draft_tokens=sum(count * n for n, count in enumerate(self.drafted)),
            accepted_tokens=sum(count * n for n, count in enumerate(self.accepted)),
            drafted_per_position=drafted,
            accepted_per_position=per_position(self.accepted, len(drafted)),
            submitted_at=self.submitted_at,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            finished_at=finished_at,
        )


def joined(parts: Values[Logprobs]) -> Logprobs:
    """Log probabilities of consecutive pieces as one."""
    return Logprobs(
        chosen=tuple(x for part in parts for x in part.chosen),
        top_ids=tuple(x for part in parts for x in part.top_ids),
        top=tuple(x for part in parts for x in part.top),
    )


def per_position(histogram: list[int], length: int = 0) -> tuple[int, ...]:
    """Turn [n]: cycles with exactly n into [j]: cycles with more than j. Trailing zeros are cut,
    down to `length`."""
    counts: list[int] = []
    more = 0
    for n in range(len(histogram) - 1, 0, -1):
        more += histogram[n]
        if more or n <= length:
            counts.append(more)
    return tuple(reversed(counts))
