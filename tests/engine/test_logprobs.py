"""Log probabilities: right numbers and order, at every chunk edge, within bounded memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine import logprobs as logprobs_module
from engine.logprobs import read, record
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import Logprobs, PrefillChunk, RowResult, RowSpec, StepPlan, page_array
from engine.solo import generate
from tests.engine import slow
from tests.engine.small import engine_over, greedy, prompts, small_model


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def test_ties_go_to_the_lowest_ids_in_the_set_and_in_the_order() -> None:
    logits = mx.array([[[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]]])
    ranked = (1, 3, 2, 4, 5, 0, 6)
    for top in (0, 1, 3, 4, 7, 9):
        found = read(np.array(record(logits, mx.array([[5]]), top))[0], top)
        assert found.top_ids == (ranked[:top],)
        slow.check_logprobs(found, [np.array(logits)[0, 0].astype(np.float64)], [5], top)


def test_a_row_reads_fewer_than_the_cohort_made() -> None:
    logits = mx.random.normal((1, 4, 50), key=mx.random.key(1))
    tokens = mx.array([[3, 4, 5, 6]])
    records = np.array(record(logits, tokens, 20))[0]
    rows = [row.astype(np.float64) for row in np.array(logits)[0]]
    for top in (0, 1, 7, 20):
        slow.check_logprobs(read(records, top), rows, [3, 4, 5, 6], top)


def _chunked(model: Qwen35Model, prompt: list[int], size: int) -> list[RowResult]:
    """Results of a prompt's chunks, one step each."""
    engine = engine_over(model)
    results: list[RowResult] = []
    for start in range(0, len(prompt), size):
        chunk = PrefillChunk(
            row=1,
            tokens=np.array(prompt[start : start + size], np.int32),
            start=start,
            pages=page_array([1, 2, 3, 4, 5]),
            last=start + size >= len(prompt),
            spec=replace(greedy(4), prompt_logprobs=3) if start == 0 else None,
        )
        engine.submit(StepPlan(step=start, prefill=(chunk,)))
        results.extend(engine.collect().rows)
    return results


@pytest.mark.parametrize("size", [1, 2, 5, 17, 33])
def test_every_chunk_reports_its_own_tokens(model: Qwen35Model, size: int) -> None:
    prompt = prompts(4)[3]
    results = _chunked(model, prompt, size)
    assert len(results) == -(-len(prompt) // size)
    assert [len(result.tokens) for result in results] == [0] * (len(results) - 1) + [1]
    reports = [result.prompt_logprobs for result in results]
    lengths = [len(report.chosen) for report in reports if report]
    assert lengths[0] == min(size, len(prompt)) - 1
    assert sum(lengths) == len(prompt) - 1
    whole = Logprobs(
        chosen=tuple(v for r in reports if r for v in r.chosen),
        top_ids=tuple(v for r in reports if r for v in r.top_ids),
        top=tuple(v for r in reports if r for v in r.top),
    )
    trunk = slow.Trunk(model, len(prompt))
    slow.check_logprobs(whole, [trunk.feed(token) for token in prompt[:-1]], prompt[1:], 3)


def test_rows_that_do_not_ask_get_nothing_beside_one_that_does(model: Qwen35Model) -> None:
    requests = [
        ([1, 2, 3], greedy(6)),
        ([4, 5], replace(greedy(6), logprobs=2)),
        ([6], replace(greedy(6), logprobs=0, prompt_logprobs=4)),
    ]
    quiet, two, none = generate(engine_over(model), requests, depth=3)
    assert quiet.logprobs is None
    assert quiet.prompt_logprobs is None
    assert two.logprobs is not None
    assert [len(ids) for ids in two.logprobs.top_ids] == [2] * 6
    assert none.logprobs is not None
    assert len(none.logprobs.chosen) == 6
    assert none.logprobs.top_ids == ((),) * 6
    assert none.prompt_logprobs == Logprobs(chosen=(), top_ids=(), top=())
    bare = [(prompt, greedy(6)) for prompt, _ in requests]
    plain = generate(engine_over(model), bare, depth=3)
    assert [r.tokens for r in (quiet, two, none)] == [r.tokens for r in plain]


def test_a_row_with_bad_numbers_reports_none() -> None:
    model = small_model()
    model.model.embed_tokens.weight[77] = float("nan")
    spec = replace(greedy(4), logprobs=2, prompt_logprobs=2)
    result = generate(engine_over(model), [([3, 77, 4], spec)])[0]
    assert result.fault is not None
    assert result.logprobs is None
    assert result.prompt_logprobs is None


def _peak(model: Qwen35Model, length: int) -> int:
    """Bytes that reporting a prompt in one chunk takes beyond running it."""
    prompt = [t % 90 for t in range(length)]
    peaks = []
    for asked in (None, 5):
        spec = RowSpec(
            sampling=greedy(1).sampling, max_tokens=1, speculative=False, prompt_logprobs=asked
        )
        engine = engine_over(model, trace=False)
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        generate(engine, [(prompt, spec)])
        peaks.append(mx.get_peak_memory() - before)
    return peaks[1] - peaks[0]


def test_the_logits_of_a_prompt_exist_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next slice may begin while the one before is being let go, so two are the most."""
    model = small_model(vocab=16384)
    monkeypatch.setattr(logprobs_module, "SLICE", 32)
    two, eight = _peak(model, 65), _peak(model, 241)
    assert eight < 1.3 * two
    monkeypatch.setattr(logprobs_module, "SLICE", 10**6)
    assert _peak(model, 241) > 2.5 * two
