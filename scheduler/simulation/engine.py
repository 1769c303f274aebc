"""A device that computes nothing: it takes plans, and says what came of them and how long it took.

How long a row's text is comes with its request: `work_seed` puts the number of output tokens into
`SamplingParams.seed`, so that a row which was preempted, and comes back with what it had emitted as
the end of its prompt (`RowSpec.output_start`), ends where it would have. The tokens emitted are a
function of seed and position, so a conversation's next turn repeats what the machine has kept.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.plan import (
    DecodeBatch,
    EngineInfo,
    Finish,
    PrefillChunk,
    RowResult,
    RowSpec,
    StepPlan,
    StepResult,
)
from scheduler.simulation.costs import MachineSpec

STOP = 0
"""The end-of-sequence token."""
VOCABULARY = 1 << 30
"""Token ids. Many more than a model has, so that texts differ where they should."""
OUTPUT = 1 << 29
"""Emitted tokens are from here on, prompts' own below."""

LENGTH_BITS = 24
MOST_TOKENS = (1 << LENGTH_BITS) - 1


def work_seed(serial: int, output_tokens: int) -> int:
    """A seed that says how long the text is. Raises ValueError for a length that does not fit."""
    if not 1 <= output_tokens <= MOST_TOKENS:
        raise ValueError(f"output_tokens must be in 1 … {MOST_TOKENS}, not {output_tokens}")
    return serial << LENGTH_BITS | output_tokens


def output_tokens_of(seed: int) -> int:
    return seed & MOST_TOKENS


def first_token(seed: int) -> int:
    """Where the tokens of a text begin; they ascend by one."""
    return OUTPUT + (seed >> LENGTH_BITS) * 2_654_435_761 % (OUTPUT - MOST_TOKENS)


@dataclass(slots=True, eq=False)
class _Row:
    spec: RowSpec
    chances: tuple[float, ...]
    position: int = 0
    next_token: int = 0
    left: int = 0
    """Tokens it may still emit."""
    until_stop: int = 0
    """Tokens until its stop token, that one included; > left when it never comes."""
    done: bool = False


class SimulatedEngine:
    """One machine's device. `run` takes a step and gives its result with `device_s`."""

    def __init__(self, spec: MachineSpec, *, seed: int) -> None:
        self.info = engine_info(spec)
        self._costs = spec.costs
        self._acceptance = spec.acceptance
        self._random = random.Random(seed)
        self._rows: dict[int, _Row] = {}

    @property
    def rows(self) -> int:
        """Rows that hold device state."""
        return len(self._rows)

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result. Raises KeyError for a row that has no state."""
        for row in plan.release:
            self._rows.pop(row, None)
        results = []
        seconds = 0.0
        for chunk in plan.prefill:
            seconds += self._costs.chunk(len(chunk.tokens), chunk.start)
            if emitted := self._prefill(chunk):
                results.append(emitted)
        depth = 0
        for batch in (plan.decode, plan.guided):
            if batch is not None:
                depth = max(depth, batch.depth)
                seconds += self._decode(batch, results)
        if seconds and self._costs.noise:
            noise = self._costs.noise
            seconds *= self._random.lognormvariate(-noise * noise / 2, noise)
        return StepResult(
            step=plan.step,
            rows=tuple(results),
            depth=depth,
            device_s=seconds,
            gap_s=self._costs.gap_s,
        )

    def _prefill(self, chunk: PrefillChunk) -> RowResult | None:
        if chunk.spec is not None:
            self._rows[chunk.row] = _Row(chunk.spec, self._chances(chunk.spec))
        row = self._rows[chunk.row]
        row.position = chunk.start + len(chunk.tokens)
        if not chunk.last:
            return None
        spec, seed = row.spec, row.spec.sampling.seed
        before = 0 if spec.output_start is None else row.position - spec.output_start
        row.next_token = first_token(seed) + before
        row.left = spec.max_tokens
        row.until_stop = output_tokens_of(seed) - before if spec.stop_ids else row.left + 1
        return self._emit(chunk.row, row, 0, 0)

    def _chances(self, spec: RowSpec) -> tuple[float, ...]:
        """A request's own, the same whenever it comes."""
        if not self._acceptance.variation:
            return self._acceptance.rates
        return self._acceptance.of(random.Random(spec.sampling.seed).gauss(0, 1))

    def _decode(self, batch: DecodeBatch, results: list[RowResult]) -> float:
        """Appends the rows' results; returns seconds."""
        context, draw = 0, self._random.random
        for name, limit in zip(batch.rows, batch.limits, strict=True):
            row = self._rows[name]
            context += row.position
            if row.done:
                results.append(RowResult(row=name))
                continue
            drafted = min(limit, row.left - 1)
            accepted = 0
            for chance in row.chances[:drafted]:
                if draw() >= chance:
                    break
                accepted += 1
            results.append(self._emit(name, row, drafted, accepted))
        return self._costs.cycle(len(batch.rows), batch.depth, context)

    def _emit(self, name: int, row: _Row, drafted: int, accepted: int) -> RowResult:
        """Accepted drafts and one more token, cut at the row's stop token."""
        count = min(accepted + 1, row.until_stop)
        first = row.next_token
        tokens = tuple(range(first, first + count))
        finish = None
        if count == row.until_stop:
            tokens = (*tokens[:-1], row.spec.stop_ids[0])
            finish = Finish.STOP
        elif count == row.left:
            finish = Finish.LENGTH
        row.next_token += count
        row.position += count
        row.left -= count
        row.until_stop -= count
        row.done = finish is not None
        return RowResult(
            row=name,
            tokens=tokens,
            drafted=drafted,
            accepted=min(accepted, count),
            finish=finish,
        )


def engine_info(spec: MachineSpec) -> EngineInfo:
    """What a scheduler is told of such a machine."""
    return EngineInfo(
        model=spec.name,
        family="simulated",
        vocab_size=VOCABULARY,
        context_length=spec.context_length,
        layers=1,
        mtp_layers=1 if spec.max_depth else 0,
        max_depth=spec.max_depth,
        max_rows=spec.max_rows,
        pages=spec.pages,
        page_size=spec.page_size,
        page_bytes=1,
        row_bytes=1,
        weight_bytes=1,
        parameters=1,
        dtype="none",
        quantization="none",
        device="simulated",
        blas="none",
        prefill_chunk=spec.prefill_chunk,
        boundaries=spec.boundaries,
        boundary_bytes=1,
    )
