"""An engine without a model: strict about the contract, deterministic about tokens.

`FakeEngine` implements `engine.plan.Engine`. Which token a row emits is a pure function of the
tokens before it and its seed, so it does not depend on depth, batch or neighbours; how many drafts
stand is pseudo-random. The tokens before it are those that the row *reads* through its page table
(`FakeCache`), and again those its recurrent state has seen, so a wrong page, a missing copy or
somebody else's boundary gives other tokens. Rows end on the "device" at once, so a pipelined
scheduler meets rows that finished in a step it has not read.

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
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    MAX_STOP_IDS,
    DecodeBatch,
    EngineFailedError,
    EngineInfo,
    Finish,
    ForeignFileError,
    KeepRow,
    Logprobs,
    PrefillChunk,
    RowResult,
    RowSpec,
    SavedPrefix,
    StepPlan,
    StepResult,
)
from tests.scheduler.fake_cache import Boundary, FakeCache, PlanError, digest
from tests.scheduler.fake_cache import require as _require
from tests.scheduler.fake_tokens import expected_tokens, fake_logprobs, mix, pseudo_token, shaped

__all__ = ["FakeEngine", "PlanError", "expected_tokens", "fake_logprobs"]

TokenFunction = Callable[[tuple[int, ...], int], int]
"""(prompt, index of the completion token) -> token id."""


@dataclass(slots=True, eq=False)
class _Row:
    spec: RowSpec
    position: int = 0
    """Tokens in the caches and in `state`."""
    state: int = 0
    """Digest of these tokens: what a recurrent layer remembers."""
    prompt: int = 0
    """Length of the prompt, once complete."""
    primary: int = 0
    """Last token emitted, at `position`, in no cache yet."""
    emitted: int = 0
    """On the device."""
    known: int = 0
    """In results already collected: what the host can know."""
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, most tokens it may emit, tokens it did emit), not collected."""
    done: bool = False
    key: tuple[int, ...] = ()
    """The prompt as it was read back, once complete."""

    @property
    def complete(self) -> bool:
        """The last prompt chunk has been submitted."""
        return self.prompt > 0

    @property
    def reach(self) -> int:
        """Positions the host must assume taken."""
        return self.prompt + self.known + sum(most for _, most, _ in self.in_flight)

    @property
    def longest(self) -> int:
        return self.prompt + self.spec.max_tokens


class FakeEngine:
    """See the module docstring. Options:

    - `vocab_size`, `context_length`, `max_rows`, `pages`, `page_size`, `max_depth`, `boundaries`:
      as in `EngineInfo`.
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
        boundaries: int = 0,
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
        self.cache = FakeCache(pages=pages, page_size=page_size, boundaries=boundaries)
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
            boundaries=boundaries,
            boundary_bytes=1024,
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
        for keep in plan.keep:
            self._keep(keep)
        for row in plan.release:
            self._release(row)
        for boundary in plan.drop:
            self.cache.drop(boundary)
        self.cache.copy(plan.copies)
        before = {row for row, state in self._rows.items() if state.complete}
        copies = set(plan.copies)
        results = [r for chunk in plan.prefill if (r := self._prefill(plan.step, chunk, copies))]
        _require(not copies, f"copies for nobody: {copies}")
        _require(len({c.row for c in plan.prefill}) == len(plan.prefill), "two chunks of one row")
        _require(len(self._rows) <= self.info.max_rows, "more rows than max_rows")
        self.cache.check_count()
        size, depth = 0, 0
        for batch, guided in ((plan.decode, False), (plan.guided, True)):
            if batch is not None:
                results += self._decode(plan.step, batch, before, guided=guided)
                size, depth = size + len(batch.rows), max(depth, batch.depth)
        seconds = self._cost(size, depth) if size or plan.prefill else 0.0
        self._results.append(
            StepResult(
                step=plan.step,
                rows=tuple(results),
                depth=depth,
                device_s=seconds,
                gap_s=0.0 if self._results else None,
            )
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

    def export_boundary(
        self, boundary: int, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        _require(not self._results, "export with a step in flight")
        kept = self.cache.boundaries.get(boundary)
        if kept is None:
            raise ValueError(f"boundary {boundary} is unknown")
        _require(tuple(pages.tolist()) == kept.pages, "the pages are not the boundary's")
        _require(digest(saved.tokens) == kept.state, "the tokens are not the boundary's")
        _require(saved.mtp == kept.mtp, "MTP history is not as said")
        content = self.cache.content[pages].reshape(-1)[: kept.position].tolist()
        whole = {
            "model": self.info.model,
            "tokens": saved.tokens,
            "mtp": saved.mtp,
            "metadata": saved.metadata,
            "state": kept.state,
            "content": content,
        }
        path.write_text(json.dumps(whole), encoding="utf-8")

    def read_boundary(self, path: Path) -> SavedPrefix:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            if whole["model"] != self.info.model:
                raise ForeignFileError(f"{path.name} is of another model")
            return SavedPrefix(
                tokens=tuple(whole["tokens"]), mtp=whole["mtp"], metadata=whole["metadata"]
            )
        except (json.JSONDecodeError, KeyError) as error:
            raise ForeignFileError(f"{path.name} is damaged") from error

    def import_boundary(self, boundary: int, pages: NDArray[np.int32], path: Path) -> None:
        _require(not self._results, "import with a step in flight")
        saved = self.read_boundary(path)
        whole = json.loads(path.read_text(encoding="utf-8"))
        table = f"import of boundary {boundary}"
        self.cache.begin(-1)
        self.cache.extend(-1, pages, len(saved.tokens))
        self.cache.write(-1, 0, whole["content"], to=0)
        self.cache.release(-1)
        _require(len(pages) * self.info.page_size - len(saved.tokens) < self.info.page_size, table)
        kept = Boundary(
            position=len(saved.tokens),
            state=whole["state"],
            mtp=saved.mtp,
            pages=tuple(pages.tolist()),
        )
        self.cache.save(boundary, kept)
        self.cache.check_count()

    def close(self) -> None:
        self.closed = True

    # --- checks and effects ----------------------------------------------------------------------

    def _keep(self, keep: KeepRow) -> None:
        state = self._rows.get(keep.row)
        _require(state is not None and state.complete, f"row {keep.row} cannot be kept")
        assert state is not None
        _require(not state.in_flight, f"row {keep.row} is kept while a step in flight names it")
        needed = -(-state.position // self.info.page_size)
        own = self.cache.tables[keep.row][:needed]
        _require(keep.pages.tolist()[:needed] == own, f"row {keep.row}: pages")
        self._save(keep.row, state, keep.boundary)

    def _save(self, row: int, state: _Row, boundary: int) -> None:
        needed = -(-state.position // self.info.page_size)
        self.cache.save(
            boundary,
            Boundary(
                position=state.position,
                state=state.state,
                mtp=state.spec.speculative,
                pages=tuple(self.cache.tables[row][:needed]),
            ),
        )

    def _release(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is None:
            return
        _require(not state.in_flight, f"row {row} is released while a step in flight names it")
        self.cache.release(row)

    def _begin(self, chunk: PrefillChunk, copies: set[tuple[int, int]]) -> None:
        """A row's first chunk, with or without a prefix."""
        row, spec = chunk.row, chunk.spec
        _require(row > self._newest_row, f"row id {row} is not new")
        _require(spec is not None, f"row {row}: no spec with the first chunk")
        assert spec is not None
        _require(len(spec.stop_ids) <= MAX_STOP_IDS, f"row {row}: too many stop ids")
        _require(spec.max_tokens >= 1, f"row {row}: max_tokens")
        self._newest_row = row
        state = self._rows[row] = _Row(spec)
        self.cache.begin(row)
        if chunk.restore is None:
            _require(chunk.start == 0 and chunk.prefix is None, f"row {row} starts in the middle")
            return
        saved = self.cache.restore(row, chunk.restore, chunk.pages, copies)
        _require(chunk.start == saved.position, f"row {row}: not where its boundary is")
        _require(chunk.prefix is not None and chunk.prefix.dtype == np.int32, f"row {row}: prefix")
        assert chunk.prefix is not None
        own = len(chunk.prefix) == saved.position and digest(chunk.prefix) == saved.state
        _require(own, f"row {row}: its prefix is not that of its boundary")
        _require(saved.mtp or not spec.speculative, f"row {row}: no MTP history to go on from")
        _require(spec.prompt_logprobs is None, f"row {row}: a restored prefix has no logits")
        state.position, state.state = saved.position, saved.state

    def _prefill(
        self, step: int, chunk: PrefillChunk, copies: set[tuple[int, int]]
    ) -> RowResult | None:
        row, tokens = chunk.row, chunk.tokens.tolist()
        if row not in self._rows:
            self._begin(chunk, copies)
        else:
            again = chunk.spec or chunk.restore or chunk.prefix is not None
            _require(not again, f"row {row}: a first chunk again")
        state = self._rows[row]
        _require(not state.complete, f"row {row}: a chunk after the last")
        _require(chunk.start == state.position, f"row {row}: chunks out of order")
        _require(chunk.tokens.dtype == np.int32 and len(tokens) > 0, f"row {row}: chunk tokens")
        end = chunk.start + len(tokens)
        self.cache.extend(row, chunk.pages, end)
        self.cache.write(row, chunk.start, tokens, to=end)
        state.position, state.state = end, digest(tokens, state.state)
        if chunk.save is not None:
            self._save(row, state, chunk.save)
        logprobs = self._prompt_logprobs(state, tokens if chunk.start else tokens[1:])
        if not chunk.last:
            state.in_flight.append((step, 0, 0))
            return None if logprobs is None else RowResult(row=row, prompt_logprobs=logprobs)
        state.prompt = end
        state.key = tuple(self.cache.read(row, end).tolist())
        _require(state.longest <= self.info.context_length, f"row {row} exceeds the context")
        result = self._emit(step, row, state, drafted=0, most=1)
        return result if logprobs is None else replace(result, prompt_logprobs=logprobs)

    def _prompt_logprobs(self, state: _Row, tokens: list[int]) -> Logprobs | None:
        count = state.spec.prompt_logprobs
        return None if count is None else fake_logprobs(tokens, count)

    def _decode(
        self, step: int, batch: DecodeBatch, complete: set[int], *, guided: bool
    ) -> list[RowResult]:
        size = len(batch.rows)
        _require(size > 0 and len(set(batch.rows)) == size, "an empty cohort, or a row twice")
        _require(len(batch.limits) == size == len(batch.pages), "rows, limits, pages differ")
        _require(0 <= batch.depth <= self.info.max_depth, f"depth {batch.depth}")
        results = []
        for row, limit, table in zip(batch.rows, batch.limits, batch.pages, strict=True):
            _require(row in complete, f"row {row} is not known or its prompt is not complete")
            state = self._rows[row]
            _require((state.spec.constraint is not None) == guided, f"row {row}: wrong cohort")
            named = guided and state.in_flight
            _require(not named, f"row {row} is guided and a step in flight names it")
            _require(0 <= limit <= batch.depth, f"row {row}: limit {limit}")
            _require(state.spec.speculative or limit == 0, f"row {row} is never drafted for")
            pages = table[: np.count_nonzero(table)]
            _require(not table[len(pages) :].any(), f"row {row}: a hole in its table")
            reach = min(state.reach + batch.depth + 1, state.longest)
            self.cache.extend(row, pages, reach)
            room = state.spec.max_tokens - state.emitted - 1
            if not state.done:
                self._commit(row, state, state.primary)
            at = state.position
            drafted = max(min(limit, room), 0)
            results.append(self._emit(step, row, state, drafted=drafted, most=limit + 1))
            # What was drafted and did not stand, and what a finished row still computes.
            self.cache.write(row, state.position, (), to=at + batch.depth)
        return results

    def _commit(self, row: int, state: _Row, token: int) -> None:
        """A token goes into the caches."""
        self.cache.write(row, state.position, [token], to=0)
        state.state = digest([token], state.state)
        state.position += 1

    def _emit(self, step: int, row: int, state: _Row, *, drafted: int, most: int) -> RowResult:
        """Up to `drafted` + 1 tokens, ending at a stop token, max_tokens or a scripted fault."""
        state.in_flight.append((step, most, 0))
        if state.done:
            return RowResult(row=row)
        fault_at = self._faults.get(state.key)
        if fault_at is not None and state.emitted >= fault_at:
            state.done = True
            return RowResult(row=row, fault="scripted fault")
        tokens: list[int] = []
        finish = None
        read = digest(self.cache.read(row, state.position).tolist())
        while finish is None and (not tokens or self._stands(state, len(tokens), drafted)):
            if tokens:  # it was drafted and stands
                self._commit(row, state, tokens[-1])
                read = digest(tokens[-1:], read)
            token = self._token_of(state, row, read, tokens)
            tokens.append(token)
            state.emitted += 1
            if token in state.spec.stop_ids:
                finish = Finish.STOP
            elif state.emitted == state.spec.max_tokens:
                finish = Finish.LENGTH
        state.primary = tokens[-1]
        if state.spec.constraint is not None:
            state.spec.constraint.advance(tokens)
        state.done = finish is not None
        state.in_flight[-1] = (step, most, len(tokens))
        count = state.spec.logprobs
        accepted = len(tokens) - 1
        if finish is not None and accepted < drafted and self._stands(state, len(tokens), drafted):
            accepted += 1  # the token that ended it was a draft
        return RowResult(
            row=row,
            tokens=tuple(tokens),
            drafted=drafted,
            accepted=accepted,
            finish=finish,
            logprobs=None if count is None else fake_logprobs(tokens, count),
        )

    def _token_of(self, state: _Row, row: int, read: int, burst: list[int]) -> int:
        spec, vocab_size = state.spec, self.info.vocab_size
        if self._token is not None:
            prompt = tuple(self.cache.read(row, state.prompt).tolist())
            token = self._token(prompt, state.emitted)
        else:
            token = pseudo_token(read, state.state, spec.sampling.seed, vocab_size)
        barred = spec.stop_ids if state.emitted < spec.min_tokens else ()
        return shaped(token, barred, spec.constraint, burst, vocab_size)

    def _stands(self, state: _Row, accepted: int, drafted: int) -> bool:
        """Whether the draft after `accepted` ones stands."""
        chance = mix(state.state, state.position, 77) / 2**32
        return accepted <= drafted and chance < self.acceptance
