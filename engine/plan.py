"""The contract between the scheduler and the engine: plans and results are plain values.

A `StepPlan` says exactly what one engine step runs; a `StepResult` says what came of it. Neither
holds device arrays, so the scheduler, the simulator and the tests need no accelerator. The engine
obeys a plan without policy of its own; everything it must remember between steps (recurrent state,
last token, pending MTP window, sampling parameters) is keyed by `row`, an id the scheduler chooses
and never reuses.

Terms. *Position* is the index of a token in a row's sequence (prompt first). A *drafted* token is
proposed by the MTP head, an *accepted* one survived verification. A decode step at depth K drafts
K tokens, verifies K + 1 positions and emits between 1 and K + 1 tokens per row (0 for a row that
was already finished on the device: see `RowResult`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NULL_PAGE = 0
"""Page id that belongs to nobody: padding in page tables points here, and reads of it are masked.
Real pages are 1 … `EngineInfo.pages`."""

MAX_DEPTH = 8
"""Largest number of tokens drafted per cycle that any part of the service accepts."""

MAX_STOP_IDS = 64
"""Largest number of stop token ids per row, end-of-sequence ids included."""

MAX_LOGPROBS = 20
"""Largest number of alternatives reported per position."""

MAX_LOGIT_BIAS = 300
"""Largest number of biased tokens per row."""


class Finish(StrEnum):
    """Why the device ended a row. Text-level stops and cancellation are the host's business."""

    STOP = "stop"
    """A stop token was emitted; it is the last token of the result."""
    LENGTH = "length"
    """`RowSpec.max_tokens` tokens have been emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a row's tokens are drawn.

    The shaping order, the same for target and draft: constraint mask and minimum length → logit
    bias → repetition, frequency, presence penalty → temperature → top-k → top-p → min-p. A penalty
    at any position counts every token before it, drafts of the same cycle included.
    """

    temperature: float = 1.0
    """>= 0; 0 is greedy (argmax, lowest id on ties)."""
    top_k: int = 0
    """Keep the k most probable tokens (ties with the k-th are kept); 0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]: keep the smallest set of most probable tokens whose mass reaches this."""
    min_p: float = 0.0
    """In [0, 1): drop tokens less probable than this fraction of the most probable one."""
    seed: int = 0
    """uint64 key of the row's counter-based noise."""
    draft_temperature: float | None = None
    """Temperature of the draft distribution; None follows `temperature`. Never changes the law of
    what is emitted, only how many drafts are accepted. 0 drafts greedily."""
    repetition_penalty: float = 1.0
    """> 0; logits of tokens that occur in the prompt or the output are divided by this when
    positive and multiplied by it when not (Keskar et al. 2019, "CTRL", sec. 4.1)."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted from a token's logit once per occurrence in the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted once from the logit of every token that occurs in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, finite number added to its logit); tokens are distinct, at most `MAX_LOGIT_BIAS`."""
    coupled: bool = False
    """Draft and target are sampled with the same noise, a function of (seed, position, token), and
    what is emitted is the target's own sample: the same seed gives the same tokens at every depth.
    False verifies by rejection sampling."""


class Constraint(Protocol):
    """A form one row's output must have, as a set of allowed tokens after every prefix.

    Belongs to one row; the engine calls it on its own thread. A mask is uint32 [ceil(V / 32)]:
    token t is allowed iff bit t % 32 of word t // 32 is set. At least one token always is: an
    output that is complete allows the end tokens only, and one that may be complete allows them
    among others. It must not raise; a row whose constraint does, or breaks another promise of
    these, faults alone. `RowSpec.min_tokens` is 0 beside a constraint: the form says when to end.
    """

    def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32] | None:
        """Tokens allowed after what was advanced and then `drafted`; None when `drafted` itself is
        not allowed. Does not advance."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted: all of a step's, in order, a final stop token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """What the engine must know about a row before its first prefill chunk."""

    sampling: SamplingParams
    max_tokens: int
    """Tokens this row may still emit, >= 1. Counted on the device, so a burst never crosses it."""
    stop_ids: tuple[int, ...] = ()
    """Emitting one of these ends the row. At most `MAX_STOP_IDS`."""
    speculative: bool = True
    """False for a row that will never be drafted for: no MTP history is kept for it."""
    min_tokens: int = 0
    """No stop id is drawn before this many tokens were emitted; <= max_tokens. Not together with a
    `constraint`."""
    logprobs: int | None = None
    """Report each emitted token's log probability and those of this many most probable tokens,
    0 … `MAX_LOGPROBS`; None reports nothing. They are of the model's own distribution (log-softmax
    of its logits, before everything in `SamplingParams`)."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. Such a row's prompt starts at 0: a restored
    prefix has no logits."""
    output_start: int | None = None
    """Prompt tokens at this position and after it count as output: frequency and presence penalties
    count them (a row that was preempted goes on with what it had emitted as the end of its prompt).
    `max_tokens` and `min_tokens` are of what is still to come. None: the whole prompt is prompt."""
    constraint: Constraint | None = None
    """Rows with one decode in `StepPlan.guided`, the others in `StepPlan.decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A piece of one row's prompt. Chunks of a row come in order, without gaps, one per step.

    `tokens` (int32) occupy positions `start … start + len(tokens) - 1`; `pages` (int32) is the
    row's page table so far and must cover the last of them. The row's first chunk carries `spec`
    and starts at 0, or at the position of the boundary it restores. When `last`, the step also
    samples the row's first token.
    """

    row: int
    tokens: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    last: bool
    spec: RowSpec | None = None
    restore: int | None = None
    """First chunk only: continue from this boundary, whose position is `start`. `pages` then holds
    its first `start` positions: shared pages up to the last whole page, a copy of its last partly
    filled one (`StepPlan.copies`)."""
    prefix: NDArray[np.int32] | None = None
    """With `restore`: the tokens at 0 … start - 1 (a repetition penalty counts them)."""
    save: int | None = None
    """Keep the row's state after this chunk as the boundary of this new id, at position
    start + len(tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """One draft-verify-accept cycle for a cohort of rows whose prompt is complete.

    `pages` is int32 [len(rows), P], padded with `NULL_PAGE`; each row's table must cover every
    position the row can reach by the end of this step (host-known length, plus what steps still in
    flight may add, plus depth + 1). Positions the row cannot reach because `max_tokens` ends it
    earlier need no page. `limits[i]` in 0…depth is the most drafts row i may accept in this step.
    """

    rows: tuple[int, ...]
    pages: NDArray[np.int32]
    depth: int
    limits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRow:
    """Keep a decoding row's state as a boundary, at the position of its last emitted token (which
    is in no cache yet): prompt tokens + emitted tokens - 1. `pages` (int32) is its page table, as
    far as that position. No step in flight may name the row."""

    row: int
    boundary: int
    pages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One engine step, run in this order: keep, release, drop, copies, prefill, decode, guided.

    A *boundary* is a saved point of a sequence from which any row with the same tokens before it
    may go on: recurrent states and the trunk's last hidden state, in the engine under an id that
    the scheduler chooses and never reuses, and the sequence's pages, which the scheduler shares
    out. No row ever writes a position below a boundary that shares its page, so a page may be read
    by many and is written by one row only.
    """

    step: int
    keep: tuple[KeepRow, ...] = ()
    release: tuple[int, ...] = ()
    """Rows to forget. Unknown ids are ignored, so releasing is idempotent."""
    drop: tuple[int, ...] = ()
    """Boundaries to forget. Unknown ids are ignored."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to): pages to copy in every layer. No page is written twice, nor read and written."""
    prefill: tuple[PrefillChunk, ...] = ()
    decode: DecodeBatch | None = None
    guided: DecodeBatch | None = None
    """The cohort of rows with a `Constraint`. None of them may be in another step in flight: the
    host must know a row's tokens before it knows what may follow."""

    @property
    def is_empty(self) -> bool:
        return not (
            self.keep
            or self.release
            or self.drop
            or self.copies
            or self.prefill
            or self.decode
            or self.guided
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities at consecutive positions, natural logarithm."""

    chosen: tuple[float, ...]
    """Of the token that stands at each position."""
    top_ids: tuple[tuple[int, ...], ...]
    """The most probable tokens at each, most probable first; lowest id first on ties."""
    top: tuple[tuple[float, ...], ...]
    """Their log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What one row got out of one step.

    `tokens` are the tokens emitted, in order; the last of them may be a stop token. A row that had
    finished in an earlier step (which the host could not know yet when it planned this one) has no
    tokens, no drafts and `finish` None. With `fault` set the row emitted nothing in this step, is
    finished on the device and must be released.
    """

    row: int
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    """Drafts that were up for acceptance: min(depth, limit, what max_tokens left room for)."""
    accepted: int = 0
    """Drafts accepted and emitted, <= drafted."""
    finish: Finish | None = None
    fault: str | None = None
    logprobs: Logprobs | None = None
    """One position per emitted token, when the row asked."""
    prompt_logprobs: Logprobs | None = None
    """Of the chunk's own tokens, without the prompt's first, when the row asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of MLX's allocator, in the whole process."""

    active: int
    """In use."""
    peak: int
    """The most ever in use."""
    cache: int
    """Freed, and kept for the next allocation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a `StepPlan`, rows in plan order: prefill chunks (final ones, those of rows with
    `prompt_logprobs`, and those that faulted), then decode rows, then guided rows."""

    step: int
    rows: tuple[RowResult, ...] = ()
    depth: int = 0
    build_s: float = 0.0
    """Seconds the host took to build and submit the step's graph."""
    wait_s: float = 0.0
    """Seconds the host waited for the device when collecting."""
    device_s: float = 0.0
    """Seconds from when this step could begin until its result was there. It could begin when the
    previous one was done or, with nothing running, when building it began."""
    gap_s: float | None = None
    """Seconds the device sat idle between the end of the step before and this one's start, as the
    host sees it; None when the engine had been idle before, so that nothing was lost."""
    memory: MemoryUse | None = None
    """After the step; None where nothing is allocated."""


class MtpGate(StrEnum):
    """What the check of the MTP head at load found (`engine.gate`)."""

    NONE = "none"
    """There is no head."""
    PASSED = "passed"
    FAILED = "failed"
    """The head does not agree with its trunk; drafting is off."""
    UNMEASURED = "unmeasured"
    """It is used without a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded engine that do not change while it runs."""

    model: str
    family: str
    vocab_size: int
    context_length: int
    """Most positions a row may occupy: prompt plus emitted tokens."""
    layers: int
    mtp_layers: int
    max_depth: int
    """0 when the checkpoint has no usable MTP head."""
    max_rows: int
    """Rows that may hold device state at once."""
    pages: int
    page_size: int
    """Tokens per page."""
    page_bytes: int
    """Bytes one page takes over all layers, MTP included."""
    row_bytes: int
    """Bytes of recurrent and other per-row state."""
    weight_bytes: int
    parameters: int
    dtype: str
    quantization: str
    """'none' or e.g. 'affine 4-bit, group 64'; says 'dequantized at load' where it is."""
    device: str
    blas: str
    prefill_chunk: int = 256
    """Prompt tokens per step that this engine is sized for, and does well with."""
    boundaries: int = 0
    """Boundaries the engine has memory for, counted at the end of a plan, after its drops; 0 when
    it keeps none."""
    boundary_bytes: int = 0
    """Bytes of one boundary, its pages aside."""
    mtp_gate: MtpGate = MtpGate.NONE
    mtp_gate_acceptance: float | None = None
    """Share of first drafts accepted in the check, 0 … 1; None where nothing was measured."""
    notes: tuple[str, ...] = field(default=())
    """One line each: why something is off (no MTP tensors, gate failed, no OpenBLAS, …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPrefix:
    """What a file of one boundary says about itself (see `Engine.export_boundary`)."""

    tokens: tuple[int, ...]
    """The tokens before the boundary; its position is their number."""
    mtp: bool
    """Whether MTP history is in it."""
    metadata: dict[str, str]
    """As given at export."""


class ForeignFileError(Exception):
    """A boundary file is damaged, of another format version, or of another model or engine."""


class EngineFailedError(Exception):
    """The engine as a whole can no longer run; every row is lost."""


class Engine(Protocol):
    """What the scheduler drives. All calls come from one thread, the one that built the engine.

    `submit` queues a step on the device and returns at once; steps run in the order submitted.
    `collect` blocks until the oldest step not yet collected is done and returns its result. At
    most `max_in_flight` steps may be submitted and not collected. Both raise `EngineFailedError`
    when the engine is beyond use (an error while a step is evaluated leaves its state unknown), and
    ValueError when a plan breaks this contract (the plan then had no effect). A row for which there
    is no memory, or whose chunk cannot be built, gets a `RowResult.fault`; a boundary that it was
    to save may still be restored and dropped, and a row that restores it faults too.
    """

    max_in_flight: int

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def export_boundary(
        self, boundary: int, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        """Write a boundary and the pages of its prefix to a file. Nothing may be in flight.

        Raises ValueError for an unknown boundary and OSError as the file system does; a file is
        complete or absent.
        """

    def read_boundary(self, path: Path) -> SavedPrefix:
        """What a file holds. Raises ForeignFileError unless it is of this very model."""

    def import_boundary(self, boundary: int, pages: NDArray[np.int32], path: Path) -> None:
        """Load a file into `pages` and under a new boundary id. Nothing may be in flight.

        Raises ForeignFileError as `read_boundary` does, before anything is changed.
        """

    def close(self) -> None:
        """Release device memory; idempotent. No other call may follow."""


def pages_needed(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions occupy."""
    return -(-tokens // page_size)


def page_array(pages: Sequence[int]) -> NDArray[np.int32]:
    """A page table as the contract's dtype."""
    return np.asarray(pages, dtype=np.int32)
