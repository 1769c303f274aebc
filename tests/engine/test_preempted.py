"""A row that gives up its memory and is computed again goes on as if nothing had happened.

Preempted after its prompt and after every cycle, resumed with its output as the end of its prompt,
cold or from a kept boundary: the same tokens, log probabilities and draft history, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.prefill import Prefill
from engine.rules import check_spec, needs_counts
from engine.solo import SoloResult
from tests.engine import slow
from tests.engine.host import Host, bits
from tests.engine.small import engine_over, small_model
from tests.engine.test_boundaries import text

END = 7
MOST = 11
PROMPT = text(11, 3)
FAVOURED = tuple((token, 60.0) for token in sorted({*PROMPT[:3], 60, 61, 62, 63}))
"""Few tokens, so that they come again and their counts matter."""
HOT = SamplingParams(temperature=7.0, seed=23, coupled=True, logit_bias=FAVOURED)
PENALTIES = replace(HOT, repetition_penalty=1.3, frequency_penalty=2.0, presence_penalty=0.5)
LOW = tuple(range(48))
"""Half of the vocabulary: as stop ids, one of them would soon end the row."""

PLAIN = RowSpec(sampling=HOT, max_tokens=MOST, logprobs=3)
MAKERS: dict[str, Callable[[], RowSpec]] = {
    "penalties": lambda: replace(PLAIN, sampling=PENALTIES),
    "presence": lambda: replace(PLAIN, sampling=replace(HOT, presence_penalty=2.0)),
    "greedy, frequency": lambda: replace(
        PLAIN,
        sampling=SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=FAVOURED),
    ),
    "bias and minimum": lambda: replace(
        PLAIN,
        sampling=replace(PENALTIES, logit_bias=((3, 4.0), (60, 29.0), (61, 29.0), (END, -1.0))),
        stop_ids=LOW,
        min_tokens=5,
    ),
    "guided": lambda: guided(HOT, None),
    "guided to its end, penalties": lambda: guided(PENALTIES, 6),
}


def guided(sampling: SamplingParams, length: int | None) -> RowSpec:
    form = slow.Pattern(96, 3, length, END)
    return replace(PLAIN, sampling=sampling, stop_ids=(END,), constraint=form)


@dataclass(frozen=True)
class Stream:
    """All that a client gets of a row, and the draft history it leaves."""

    result: SoloResult
    mtp: NDArray[np.float32]

    def check(self, other: Stream) -> None:
        assert self.result.tokens == other.result.tokens
        assert self.result.finish == other.result.finish
        assert self.result.logprobs == other.result.logprobs
        assert np.array_equal(self.mtp, other.mtp)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def new_host(model: Qwen35Model) -> Host:
    return Host(engine_over(model, boundaries=2, pages=60))


def undisturbed(model: Qwen35Model, spec: RowSpec) -> Stream:
    host = new_host(model)
    host.start(1, PROMPT, spec)
    host.finish(1, depth=0)
    return Stream(host.results[1], bits(host, 1).mtp)


def resumed(spec: RowSpec, emitted: int) -> RowSpec:
    """What `engine.plan.RowSpec` says a preempted row goes on with."""
    return replace(
        spec,
        max_tokens=spec.max_tokens - emitted,
        min_tokens=max(0, spec.min_tokens - emitted),
        output_start=len(PROMPT),
    )


def check_counts(host: Host, row: int, spec: RowSpec) -> None:
    """What the row's penalties count is its output, that of before included."""
    books = host.engine._books
    counts = np.array(books.table(row).one(row).counts)[0]
    if needs_counts(spec):
        assert (
            counts.tolist() == np.bincount(host.tokens[row][len(PROMPT) :], minlength=96).tolist()
        )
    else:
        assert counts.size == 0


def preempted(
    host: Host, row: int, spec: RowSpec, cycles: int, depth: int, *, keep: bool
) -> tuple[Stream, bool]:
    """A row preempted after so many cycles, as its client sees it; True when it had ended."""
    host.start(row, PROMPT, spec, chunk=4)
    for _ in range(cycles):
        host.decode(row, depth=depth)
    first, again = host.results[row], row + 1
    if first.ended:
        host.release(row)
        return Stream(first, np.zeros(0, np.float32)), True
    tokens = host.tokens[row]
    if keep:
        host.keep(row, row)
    else:
        host.release(row)
    host.start(
        again,
        tokens,
        resumed(spec, len(first.tokens)),
        restore=row if keep else None,
        chunk=4,
    )
    check_counts(host, again, spec)
    host.finish(again, depth=depth)
    second = host.results[again]
    assert first.logprobs is not None
    assert second.logprobs is not None
    result = SoloResult(
        row=row,
        tokens=first.tokens + second.tokens,
        finish=second.finish,
        logprobs=replace(
            first.logprobs,
            chosen=first.logprobs.chosen + second.logprobs.chosen,
            top_ids=first.logprobs.top_ids + second.logprobs.top_ids,
            top=first.logprobs.top + second.logprobs.top,
        ),
    )
    stream = Stream(result, bits(host, again).mtp)
    host.release(again)
    if keep:
        host.drop(row)
    return stream, False


def check(model: Qwen35Model, name: str, depth: int, *, keep: bool) -> None:
    alone = undisturbed(model, MAKERS[name]())
    host, points = new_host(model), 0
    for cycles in range(MOST):
        row = 1 + 2 * cycles
        stream, ended = preempted(host, row, MAKERS[name](), cycles, depth, keep=keep)
        if ended:
            assert stream.result.tokens == alone.result.tokens
            break
        stream.check(alone)
        points += 1
    assert points > 2


@pytest.mark.parametrize("keep", [False, True], ids=["cold", "kept"])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_a_preempted_row_goes_on(model: Qwen35Model, name: str, depth: int, keep: bool) -> None:
    check(model, name, depth, keep=keep)


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_what_the_slow_decoder_emits(model: Qwen35Model, name: str) -> None:
    spec = MAKERS[name]()
    stream, ended = preempted(new_host(model), 1, spec, 2, 2, keep=False)
    assert not ended
    fresh = MAKERS[name]()
    verdict = slow.judge(model, PROMPT, fresh, stream.result, fresh.constraint)
    assert verdict.compared > 3


def _with_spec(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    start = Prefill.start
    patch.setattr(
        Prefill,
        "start",
        lambda self, spec, boundary=None: start(
            self, replace(spec, **changes) if spec.output_start is not None else spec, boundary
        ),
    )


def _output_counts_as_prompt(patch: pytest.MonkeyPatch) -> None:
    _with_spec(patch, output_start=None)


def _all_counts_as_output(patch: pytest.MonkeyPatch) -> None:
    _with_spec(patch, output_start=0)


def _each_chunk_starts_anew(patch: pytest.MonkeyPatch) -> None:
    count = Prefill._counted
    patch.setattr(
        Prefill, "_counted", lambda self, row, chunk: count(self, replace(row, said=None), chunk)
    )


def _a_prefix_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = Prefill._counted
    patch.setattr(
        Prefill, "_counted", lambda self, row, chunk: count(self, row, replace(chunk, prefix=None))
    )


def _the_minimum_starts_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "tests.engine.test_preempted.resumed",
        lambda spec, emitted: replace(
            spec,
            max_tokens=spec.max_tokens - emitted,
            min_tokens=min(spec.min_tokens, spec.max_tokens - emitted),
            output_start=len(PROMPT),
        ),
    )


@pytest.mark.parametrize(
    ("fault", "name", "keep"),
    [
        (_output_counts_as_prompt, "presence", False),
        (_output_counts_as_prompt, "greedy, frequency", True),
        (_all_counts_as_output, "presence", False),
        (_each_chunk_starts_anew, "presence", False),
        (_a_prefix_is_not_counted, "penalties", True),
        (_the_minimum_starts_anew, "bias and minimum", False),
    ],
)
def test_planted_faults_are_seen(
    model: Qwen35Model,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    name: str,
    keep: bool,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(model, name, 0, keep=keep)


def test_output_start_is_a_position() -> None:
    check_spec(1, replace(PLAIN, output_start=0), 96)
    with pytest.raises(ValueError, match="row 1: output_start must be >= 0"):
        check_spec(1, replace(PLAIN, output_start=-1), 96)
