"""An engine without a model: strict about the contract, deterministic about tokens.

`FakeEngine` implements `engine.plan.Engine`. Which token a row emits is a pure function of its
prompt, its seed and the index of the token, so it does not depend on depth, batch or neighbours;
how many drafts stand is pseudo-random. Rows end on the "device" at once, so a pipelined scheduler
meets rows that finished in a step it has not read.

Every plan is checked against the contract, and a little beyond it (a row that a step in flight
names must not be released, page tables only grow, steps are numbered without gaps). A breach raises
`PlanError`, a ValueError.

    engine = FakeEngine(max_rows=4, pages=32)                     # in a test of the scheduler
    Scheduler(engine_factory=lambda: FakeEngine(step_s=0.005))    # behind a service test
    FakeEngine(token=lambda prompt, index: ord("selfdraft "[index % 10]))   # scripted text
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    MAX_STOP_IDS,
    NULL_PAGE,
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    Finish,
    ForeignFileError,
    PrefillChunk,
    RowResult,
    RowSpec,
    SavedPrefix,
    StepPlan,
    StepResult,
    pages_needed,
)

TokenFunction = Callable[[tuple[int, ...], int], int]
"""(prompt, index of the completion token) -> token id."""


class PlanError(ValueError):
    """A plan broke the contract."""


@dataclass(slots=True, eq=False)
class _Row:
    spec: RowSpec
    prompt: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    complete: bool = False
    """The last prompt chunk has been submitted."""
    emitted: int = 0
    """On the device."""
    known: int = 0
    """In results already collected: what the host can know."""
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, most tokens it may emit, tokens it did emit), not collected."""
    done: bool = False
    key: tuple[int, ...] = ()
    """The prompt as a tuple, once complete."""

    @property
    def reach(self) -> int:
        """Positions the host must assume taken."""
        return len(self.prompt) + self.known + sum(most for _, most, _ in self.in_flight)

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.spec.max_tokens


class FakeEngine:
    """See the module docstring. Options:

    - `vocab_size`, `context_length`, `max_rows`, `pages`, `page_size`, `max_depth`: as in
      `EngineInfo`.
    - `token`: which tokens come out; default pseudo-random over the vocabulary.
    - `acceptance`: probability that a draft stands, given that the ones before it did.
    - `step_s`: seconds `collect` sleeps per step that runs rows (0: none).
    - `cost`: (rows, depth) -> `StepResult.device_s`, without sleeping.
    - `faults`: prompt -> completion tokens after which that row faults (0: at its last chunk).
    - `dies_at`: number of the step whose `collect` raises `EngineFailedError`.
    - `before_collect`: called on the engine's thread before a result is handed out.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        context_length: int = 4096,
        max_rows: int = 8,
        pages: int = 1024,
        page_size: int = 16,
        max_depth: int = 4,
        max_in_flight: int = 2,
        token: TokenFunction | None = None,
        acceptance: float = 0.7,
        step_s: float = 0.0,
        cost: Callable[[int, int], float] | None = None,
        faults: Mapping[tuple[int, ...], int] | None = None,
        dies_at: int | None = None,
        before_collect: Callable[[StepResult], None] | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.acceptance = acceptance
        self.closed = False
        self.imported: dict[int, SavedPrefix] = {}
        """Boundaries that came from files."""
        self.plans: list[StepPlan] = []
        """The newest 1,000 plans."""
        self._token = token
        self._step_s = step_s
        self._cost = cost or (lambda rows, depth: step_s)
        self._faults = dict(faults or {})
        self._dies_at = dies_at
        self._before_collect = before_collect
        self._rows: dict[int, _Row] = {}
        self._newest_row = 0
        self._page_owner: dict[int, int] = {}
        self._results: deque[StepResult] = deque()
        self._next_step = 0
        self._info = EngineInfo(
            model="fake",
            family="fake",
            vocab_size=vocab_size,
            context_length=context_length,
            layers=1,
            mtp_layers=1 if max_depth else 0,
            max_depth=max_depth,
            max_rows=max_rows,
            pages=pages,
            page_size=page_size,
            page_bytes=1024,
            row_bytes=1024,
            weight_bytes=1024,
            parameters=1024,
            dtype="float32",
            quantization="none",
            device="none",
            blas="none",
        )

    # --- Engine ----------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def rows(self) -> int:
        """Rows that hold device state."""
        return len(self._rows)

    def submit(self, plan: StepPlan) -> None:
        _require(not self.closed, "submit after close")
        _require(len(self._results) < self.max_in_flight, "too many steps in flight")
        _require(plan.step == self._next_step, f"step {plan.step} is not {self._next_step}")
        _require(not plan.is_empty, "an empty plan")
        self._next_step += 1
        self.plans = [*self.plans[-999:], plan]
        for row in plan.release:
            self._release(row)
        before = {row for row, state in self._rows.items() if state.complete}
        results = [r for chunk in plan.prefill if (r := self._prefill(plan.step, chunk))]
        _require(len({c.row for c in plan.prefill}) == len(plan.prefill), "two chunks of one row")
        _require(len(self._rows) <= self.info.max_rows, "more rows than max_rows")
        size, depth = 0, 0
        if plan.decode is not None:
            size, depth = len(plan.decode.rows), plan.decode.depth
            results += self._decode(plan.step, plan.decode, before)
        seconds = self._cost(size, depth) if size or plan.prefill else 0.0
        self._results.append(
            StepResult(step=plan.step, rows=tuple(results), depth=depth, device_s=seconds)
        )

    def collect(self) -> StepResult:
        _require(not self.closed, "collect after close")
        _require(bool(self._results), "nothing to collect")
        result = self._results.popleft()
        if self._before_collect is not None:
            self._before_collect(result)
        if self._step_s and result.device_s:
            time.sleep(self._step_s)
        if result.step == self._dies_at:
            raise EngineFailedError("scripted death")
        for state in self._rows.values():
            state.known += sum(did for step, _, did in state.in_flight if step == result.step)
            state.in_flight = [entry for entry in state.in_flight if entry[0] != result.step]
        return result

    def close(self) -> None:
        self.closed = True

    # --- checks and effects ----------------------------------------------------------------------

    def _release(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is None:
            return
        _require(not state.in_flight, f"row {row} is released while a step in flight names it")
        for page in state.pages:
            del self._page_owner[page]

    def _take_pages(self, row: int, state: _Row, table: NDArray[np.int32], positions: int) -> None:
        """The table covers `positions`, extends the one before, and shares no page."""
        _require(table.dtype == np.int32 and table.ndim == 1, "page tables are int32")
        pages = table.tolist()
        needed = pages_needed(positions, self.info.page_size)
        _require(len(pages) >= needed, f"row {row}: {len(pages)} pages for {positions} positions")
        _require(pages[: len(state.pages)] == state.pages, f"row {row}: its table changed")
        for page in pages[len(state.pages) :]:
            _require(NULL_PAGE < page <= self.info.pages, f"row {row}: page {page}")
            owner = self._page_owner.setdefault(page, row)
            _require(owner == row, f"row {row}: page {page} belongs to row {owner}")
        _require(len(set(pages)) == len(pages), f"row {row}: a page twice")
        state.pages = pages

    def _prefill(self, step: int, chunk: PrefillChunk) -> RowResult | None:
        row, size = chunk.row, len(chunk.tokens)
        if chunk.start == 0:
            _require(row > self._newest_row, f"row id {row} is not new")
            _require(chunk.spec is not None, f"row {row}: no spec with the first chunk")
            assert chunk.spec is not None
            _require(len(chunk.spec.stop_ids) <= MAX_STOP_IDS, f"row {row}: too many stop ids")
            _require(chunk.spec.max_tokens >= 1, f"row {row}: max_tokens")
            self._newest_row = row
            self._rows[row] = _Row(chunk.spec)
        _require(row in self._rows, f"row {row} is not known")
        state = self._rows[row]
        _require(not state.complete, f"row {row}: a chunk after the last")
        _require(chunk.start == len(state.prompt), f"row {row}: chunks out of order")
        _require(chunk.tokens.dtype == np.int32 and size > 0, f"row {row}: chunk tokens")
        state.prompt += chunk.tokens.tolist()
        self._take_pages(row, state, chunk.pages, len(state.prompt))
        if not chunk.last:
            state.in_flight.append((step, 0, 0))
            return None
        state.complete, state.key = True, tuple(state.prompt)
        _require(state.longest <= self.info.context_length, f"row {row} exceeds the context")
        return self._emit(step, row, state, drafted=0, most=1)

    def _decode(self, step: int, batch: DecodeBatch, complete: set[int]) -> list[RowResult]:
        size = len(batch.rows)
        _require(size > 0 and len(set(batch.rows)) == size, "an empty cohort, or a row twice")
        _require(len(batch.limits) == size == len(batch.pages), "rows, limits, pages differ")
        _require(0 <= batch.depth <= self.info.max_depth, f"depth {batch.depth}")
        results = []
        for row, limit, table in zip(batch.rows, batch.limits, batch.pages, strict=True):
            _require(row in complete, f"row {row} is not known or its prompt is not complete")
            state = self._rows[row]
            _require(0 <= limit <= batch.depth, f"row {row}: limit {limit}")
            _require(state.spec.speculative or limit == 0, f"row {row} is never drafted for")
            pages = table[: np.count_nonzero(table)]
            _require(not table[len(pages) :].any(), f"row {row}: a hole in its table")
            reach = min(state.reach + batch.depth + 1, state.longest)
            self._take_pages(row, state, pages, reach)
            room = state.spec.max_tokens - state.emitted - 1
            results.append(
                self._emit(step, row, state, drafted=max(min(limit, room), 0), most=limit + 1)
            )
        return results

    def _emit(self, step: int, row: int, state: _Row, *, drafted: int, most: int) -> RowResult:
        """Up to `drafted` + 1 tokens, ending at a stop token, max_tokens or a scripted fault."""
        state.in_flight.append((step, most, 0))
        if state.done:
            return RowResult(row=row)
        fault_at = self._faults.get(state.key)
        if fault_at is not None and state.emitted >= fault_at:
            state.done = True
            return RowResult(row=row, fault="scripted fault")
        accepted = 0
        while accepted < drafted and self._stands(state, state.emitted + accepted):
            accepted += 1
        tokens: list[int] = []
        finish = None
        while len(tokens) < accepted + 1 and finish is None:
            token = self._token_of(state, state.emitted)
            tokens.append(token)
            state.emitted += 1
            if token in state.spec.stop_ids:
                finish = Finish.STOP
            elif state.emitted == state.spec.max_tokens:
                finish = Finish.LENGTH
        state.done = finish is not None
        state.in_flight[-1] = (step, most, len(tokens))
        return RowResult(
            row=row,
            tokens=tuple(tokens),
            drafted=drafted,
            accepted=min(accepted, len(tokens)),
            finish=finish,
        )

    def _token_of(self, state: _Row, index: int) -> int:
        if self._token is not None:
            return self._token(state.key, index)
        return pseudo_token(state.key, state.spec.sampling.seed, index, self.info.vocab_size)

    def _stands(self, state: _Row, index: int) -> bool:
        return _mix(zlib.crc32(repr(state.key).encode()), index, 77) / 2**32 < self.acceptance

    # --- files of boundaries ---------------------------------------------------------------------

    def export_boundary(
        self, boundary: int, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        """A small JSON file instead of arrays. What a boundary holds is not this class's matter."""
        _require(not self._results, "export while a step is in flight")
        _require(len(pages) >= pages_needed(len(saved.tokens), self.info.page_size), "pages")
        whole = path.with_name(f".{path.name}.part")
        whole.write_text(json.dumps({"fake": self.info.vocab_size} | asdict(saved)))
        whole.replace(path)

    def read_boundary(self, path: Path) -> SavedPrefix:
        try:
            entries = json.loads(path.read_text())
            if entries.pop("fake") != self.info.vocab_size:
                raise ForeignFileError(f"{path}: of another model")
            return SavedPrefix(**entries | {"tokens": tuple(entries["tokens"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ForeignFileError(f"{path}: {error}") from error

    def import_boundary(self, boundary: int, pages: NDArray[np.int32], path: Path) -> None:
        _require(not self._results, "import while a step is in flight")
        saved = self.read_boundary(path)
        _require(len(pages) >= pages_needed(len(saved.tokens), self.info.page_size), "pages")
        self.imported[boundary] = saved


def pseudo_token(prompt: tuple[int, ...], seed: int, index: int, vocab_size: int) -> int:
    """What `FakeEngine` emits by default as completion token `index`."""
    return _mix(zlib.crc32(np.array(prompt, dtype=np.int64).tobytes()), seed, index) % vocab_size


def expected_tokens(
    prompt: tuple[int, ...],
    *,
    seed: int,
    max_tokens: int,
    stop_ids: tuple[int, ...] = (),
    vocab_size: int = 1000,
) -> list[int]:
    """All tokens a request gets from a default `FakeEngine` when nothing interferes."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(pseudo_token(prompt, seed, len(tokens), vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens


def _mix(*parts: int) -> int:
    """32 well-mixed bits."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ part) * 0xBF58476D1CE4E5B9 % 2**64
        state ^= state >> 31
    return state >> 32


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PlanError(message)
