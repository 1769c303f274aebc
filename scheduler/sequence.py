"""State of one sequence, from the door to its last event.

The host knows a row's length one or two steps late. `reach` therefore counts what the host has seen
plus the most that steps in flight may add; page tables follow `reach`, so the device never writes
where no page is, whatever it accepts.

A sequence may be preempted: it gives up its row, and what it has emitted becomes the end of its
`prompt`, to be computed again when it has a row once more. Everything that a client sees counts on.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.plan import MAX_DEPTH, Logprobs, RowResult, RowSpec
from scheduler.request import FinishReason, GenerationRequest, Priority, Usage


def _histogram() -> list[int]:
    return [0] * (MAX_DEPTH + 1)


class Preempted(StrEnum):
    """Why a row is given up."""

    PAGES = "pages"
    """A row that goes first had no page to grow into."""
    PRIORITY = "priority"
    """A request of a higher class waited for its row or its pages."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One accepted request. Counts are of tokens unless a name says otherwise."""

    request: GenerationRequest
    prompt: NDArray[np.int32]
    """What is prefilled: the request's prompt and, after a preemption, the output until then."""
    submitted_at: float
    depth_cap: int
    """Most drafts per cycle for this row; 0 when it is never drafted for."""

    arrival: int = -1
    """Its number in the order of arrival."""
    priority: Priority = Priority.DEFAULT
    """The class it came with, as far as its tenant may. It says who is preempted for whom: waiting
    does not lift it."""
    level: Priority = Priority.DEFAULT
    """The class it waits in, ageing included; once started, the class it is charged in."""
    work: int = 0
    """Tokens of its prompt that it should have to prefill, as far as was known when it came."""
    charged: bool = False
    """Its tenant has paid for the prompt."""
    returned: bool = False
    """It has had a row before: it waits again, and not at the door."""
    asked_tokens: int = field(init=False)
    """Length of the request's own prompt."""
    queued_at: float = field(init=False)
    """Since when it has waited in the queue, the last time."""

    row: int = -1
    """Engine row id, -1 while queued."""
    order: int = 0
    """Its first row id: rows that started earlier are older, whatever happened to them since."""
    slot: int = -1
    """Slot of its page table, -1 while queued."""

    hashes: list[bytes] | None = None
    """Chained hashes of its prompt's whole pages, once somebody needed them."""
    cached: int = 0
    """Prompt tokens it took from a saved prefix when it last started."""
    cached_at_first: int | None = None
    """The same when it first started; None before."""
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

    leaving: Preempted | None = None
    """It gives up its row once no step in flight names it, and is planned no more until then."""
    preemptions: int = 0
    displaced: int = 0
    """Preemptions for the sake of a higher class."""
    computed: int = 0
    """Most positions that were computed in a row it has given up."""
    left: int = 0
    """Boundary of the point at which it was preempted; 0 for none."""

    cycles: int = 0
    drafted: list[int] = field(default_factory=_histogram)
    """[d]: cycles in which d drafts were up for acceptance."""
    accepted: list[int] = field(default_factory=_histogram)
    """[a]: drafting cycles in which a drafts were accepted."""

    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Of the chunks seen so far, when the request asked."""

    def __post_init__(self) -> None:
        self.asked_tokens = len(self.prompt)
        self.queued_at = self.submitted_at

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def asked(self) -> NDArray[np.int32]:
        """The request's own prompt."""
        return self.prompt[: self.asked_tokens]

    @property
    def resumes(self) -> bool:
        """Some of its output is in `prompt`."""
        return len(self.prompt) > self.asked_tokens

    @property
    def produced(self) -> int:
        """Tokens the device emitted since it last started."""
        return len(self.output) - (len(self.prompt) - self.asked_tokens)

    @property
    def started(self) -> bool:
        return self.row >= 0

    @property
    def prefilling(self) -> bool:
        """Some of the prompt has not been handed to the engine, and is going to be."""
        return self.cursor < len(self.prompt) and self.leaving is None

    @property
    def is_gone(self) -> bool:
        """It has ended or was preempted: its row goes when no step in flight names it."""
        return self.cause is not None or self.leaving is not None

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
        return self.request.reuse_prefix and self.prompt_logprobs_asked is None

    @property
    def prompt_logprobs_asked(self) -> int | None:
        """As in the request, until they have been delivered."""
        return None if self.emitted else self.request.prompt_logprobs

    @property
    def longest(self) -> int:
        """Positions this sequence can ever occupy."""
        return self.asked_tokens + self.request.max_tokens

    @property
    def can_decode(self) -> bool:
        """Its prompt is handed over, it has neither ended nor been preempted, its reader keeps up,
        steps in flight do not already use up max_tokens, and none names it if the host must know
        its tokens first."""
        return (
            self.cause is None
            and self.leaving is None
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
        known = self.asked_tokens + self.emitted
        return min(known + self.ceiling + depth + 1, self.longest)

    def spec(self) -> RowSpec:
        """What the engine is told with the first chunk."""
        return RowSpec(
            sampling=self.request.sampling,
            max_tokens=self.request.max_tokens - self.emitted,
            stop_ids=self.request.stop_ids,
            speculative=self.speculative,
            min_tokens=max(0, self.request.min_tokens - self.emitted),
            logprobs=self.request.logprobs,
            prompt_logprobs=self.prompt_logprobs_asked,
            output_start=self.asked_tokens if self.resumes else None,
            constraint=self.request.constraint,
        )

    def computed_tokens(self) -> NDArray[np.int32]:
        """Tokens before the point that a decoding row has reached: all but the last it emitted."""
        new = self.output[len(self.output) - self.produced : -1]
        return np.concatenate([self.prompt, np.array(new, np.int32)])

    def suspend(self, now: float) -> None:
        """Its row is gone; what it has emitted is to be computed again."""
        self.computed = max(self.computed, self.cursor + max(0, self.produced - 1))
        new = self.output[len(self.output) - self.produced :]
        self.prompt = np.concatenate([self.prompt, np.array(new, np.int32)])
        self.displaced += self.leaving is Preempted.PRIORITY
        self.preemptions += 1
        self.leaving = None
        self.row = self.slot = -1
        self.cached = self.cursor = self.origin = 0
        self.saves = ()
        self.prompt_logprobs.clear()
        self.queued_at = now

    def record(self, result: RowResult, now: float) -> None:
        """Count tokens and drafts of a result that emitted something for its stream."""
        if self.first_token_at is None:
            self.first_token_at = now
        # The first token after each start is from the last prefill chunk: no cycle, no drafts.
        self.cycles += self.produced > len(result.tokens)
        self.last_token_at = now
        self.emitted += len(result.tokens)
        self.unread += len(result.tokens)
        if result.drafted:
            self.drafted[result.drafted] += 1
            self.accepted[result.accepted] += 1

    def usage(self, finished_at: float | None) -> Usage:
        drafted = per_position(self.drafted)
        return Usage(
            prompt_tokens=self.asked_tokens,
            cached_tokens=self.cached_at_first or 0,
            completion_tokens=self.emitted,
            cycles=self.cycles,
            draft_tokens=sum(count * n for n, count in enumerate(self.drafted)),
            accepted_tokens=sum(count * n for n, count in enumerate(self.accepted)),
            drafted_per_position=drafted,
            accepted_per_position=per_position(self.accepted, len(drafted)),
            preemptions=self.preemptions,
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
