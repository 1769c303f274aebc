"""Bias, penalties, minimum length and reports at every position of a burst; planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import cycle as cycle_module
from engine import guided as guided_module
from engine import prefill as prefill_module
from engine import rows as rows_module
from engine import rules as rules_module
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import MAX_LOGPROBS, PrefillChunk, RowSpec, SamplingParams, StepPlan, page_array
from engine.prefill import Prefill
from engine.rules import History, LogitRules
from engine.solo import SoloResult, generate
from tests.engine.driver import Driver
from tests.engine.small import OracleCycle, engine_over, greedy, small_model
from tests.engine.test_slow import VOCAB, Request, judge_all

LENGTH = 14
EVERY_FIFTH = tuple(range(0, VOCAB, 5))


def request(seed: int, *, form: tuple[int, int | None] | None = None, **spec: Any) -> Request:
    """A row; keywords of `RowSpec` and `SamplingParams`."""
    rng = np.random.default_rng(seed)
    own = {name: spec.pop(name) for name in ("stop_ids", "min_tokens", "logprobs") if name in spec}
    prompt = spec.pop("prompt", [int(t) for t in rng.integers(0, VOCAB, 5)])
    asked = spec.pop("prompt_logprobs", None)
    sampling = SamplingParams(seed=seed, **({"temperature": 0.0} | spec))
    made = RowSpec(sampling=sampling, max_tokens=LENGTH, prompt_logprobs=asked, **own)
    return Request(prompt=prompt, spec=made, form=form)


# Logits of the small model spread over some tens.
ROWS = [
    request(1, repetition_penalty=3.0),
    request(2, frequency_penalty=2.0, presence_penalty=1.0, temperature=1.0, coupled=True),
    request(3, frequency_penalty=-2.0, logit_bias=((11, 47.5), (12, 47.0), (13, 47.2))),
    request(
        4,
        repetition_penalty=2.0,
        logit_bias=((21, 90.0), (22, 85.0), (23, 60.0), (24, 55.0)),
        prompt=[21, 22, 30],
    ),
    request(5, stop_ids=EVERY_FIFTH, min_tokens=9, logprobs=3, logit_bias=((10, 90.0), (20, 80.0))),
    request(6, logprobs=5, prompt_logprobs=2, temperature=1.0, coupled=True),
    request(7, form=(5, None), temperature=1.0, coupled=True),
    request(8, form=(7, 11), stop_ids=(7,), presence_penalty=2.0),
    request(9, stop_ids=(10,), min_tokens=4, logit_bias=((10, 90.0),)),
    request(10, stop_ids=(10,), min_tokens=3, logit_bias=((10, 90.0),)),
]
WITHOUT_A_RULE = 5


class Script:
    """The rows' tokens at depth 0, as drafts for everybody else."""

    def __init__(self, model: Qwen35Model) -> None:
        plain = generate(engine_over(model, trace=False), [row.ready() for row in ROWS])
        self.plain = [result.tokens for result in plain]
        self.whole = {
            row.spec.sampling.seed: row.prompt + tokens
            for row, tokens in zip(ROWS, self.plain, strict=True)
        }

    def run(self, model: Qwen35Model, depth: int, *, spoil: float = 0.1) -> list[SoloResult]:
        engine = engine_over(model, trace=False)
        OracleCycle.install(engine, self.whole, spoil=spoil, seed=depth)
        return generate(engine, [row.ready() for row in ROWS], depth=depth, chunk=2)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model(2)


@pytest.fixture(scope="module")
def script(model: Qwen35Model) -> Script:
    return Script(model)


@pytest.mark.parametrize("depth", range(9))
def test_tokens_are_the_slow_decoders_at_every_depth(
    model: Qwen35Model, script: Script, depth: int
) -> None:
    results = script.run(model, depth)
    assert [result.tokens for result in results] == script.plain
    verdicts = judge_all(model, ROWS, results)
    assert sum(verdict.compared for verdict in verdicts) > 0.9 * sum(map(len, script.plain))
    if depth >= 2:
        assert sum(sum(result.accepted) for result in results) > 30


def test_the_rules_change_what_is_said(model: Qwen35Model, script: Script) -> None:
    """Else nothing of this file would prove anything."""
    bare = [
        (
            row.prompt,
            RowSpec(
                sampling=SamplingParams(seed=row.spec.sampling.seed, temperature=t, coupled=t > 0),
                max_tokens=LENGTH,
            ),
        )
        for row in ROWS
        for t in [row.spec.sampling.temperature]
    ]
    for i, result in enumerate(generate(engine_over(model, trace=False), bare)):
        assert (result.tokens == script.plain[i]) is (i == WITHOUT_A_RULE)


def _drafts_do_not_count(start: History, drafts: mx.array, rules: LogitRules) -> History:
    right = rules_module.through(start, drafts, rules)
    return replace(right, counts=mx.broadcast_to(start.counts, right.counts.shape))


def _drafts_count_one_early(start: History, drafts: mx.array, rules: LogitRules) -> History:
    right = rules_module.through(start, drafts, rules)
    return replace(right, counts=mx.concatenate([right.counts[:, 1:], right.counts[:, -1:]], 1))


def _length_does_not_grow(start: History, drafts: mx.array, rules: LogitRules) -> History:
    right = rules_module.through(start, drafts, rules)
    return replace(right, remaining=mx.broadcast_to(start.remaining, right.remaining.shape))


def _nothing_counted(counts: mx.array, tokens: mx.array, times: mx.array) -> mx.array:
    return counts


def _rejected_drafts_counted(counts: mx.array, tokens: mx.array, times: mx.array) -> mx.array:
    return rules_module.add_counts(counts, tokens, mx.ones_like(times))


def _only_the_first_counted(counts: mx.array, tokens: mx.array, times: mx.array) -> mx.array:
    first = mx.arange(tokens.shape[1])[None, :] == 0
    return rules_module.add_counts(counts, tokens, times & first)


def _prompt_forgotten(self: Prefill, row: Any, chunk: Any) -> Any:
    return (np.zeros(VOCAB, np.bool_) if rules_module.needs_counts(row.spec) else None), None


def _last_chunk_only(self: Prefill, row: Any, chunk: PrefillChunk) -> Any:
    if not rules_module.needs_counts(row.spec):
        return None, None
    seen = np.zeros(VOCAB, np.bool_)
    seen[chunk.tokens] = True
    return seen, None


Rules = Callable[..., mx.array]


def _target_without(**fields: None) -> Rules:
    """Rules that leave something out when they shape a verify."""

    def apply(logits: mx.array, rules: LogitRules, *rest: Any) -> mx.array:
        if logits.shape[1] > 1:
            rules = replace(rules, **fields)
        return rules_module.apply_rules(logits, rules, *rest)

    return apply


def _penalties_before_bias(
    logits: mx.array, rules: LogitRules, history: History, mask: mx.array | None = None
) -> mx.array:
    logits = rules_module.apply_rules(logits, replace(rules, bias=None), history, mask)
    return logits if rules.bias is None else logits + rules.bias


def _minimum(by: int) -> Callable[..., LogitRules]:
    def make(specs: Any, vocab: int) -> LogitRules:
        rules = rules_module.make_rules(specs, vocab)
        moved = None if rules.stop_from is None else rules.stop_from + by
        return replace(rules, stop_from=moved)

    return make


def _a_neighbours_rules(specs: Any, vocab: int) -> LogitRules:
    return rules_module.make_rules([*specs[1:], specs[0]], vocab)


def _late(x: mx.array) -> mx.array:
    """Every position's values one position on."""
    return mx.concatenate([x[:, :1], x[:, :-1]], axis=1)


def _report_shifted(logits: mx.array, tokens: mx.array, top: int) -> mx.array:
    from engine.logprobs import record

    return record(_late(logits), tokens, top)


def _prompt_report_shifted(head: Any, hidden: mx.array, tokens: mx.array, top: int) -> mx.array:
    from engine.logprobs import prompt_records

    return prompt_records(head, _late(hidden), tokens, top)


def _first_verify_row_only(self: guided_module.Guide, drafts: mx.array) -> mx.array:
    mask = RIGHT_MASK(self, drafts)
    later = mx.arange(mask.shape[1])[None, :, None] > 0
    return mask | later


def _mask_one_late(self: guided_module.Guide, drafts: mx.array) -> mx.array:
    mask = RIGHT_MASK(self, drafts)
    return mx.concatenate([mask[:, :1], mask[:, :-1]], axis=1)


def _last_token_advanced_only(
    self: guided_module.Form, tokens: tuple[int, ...], *, ended: bool
) -> None:
    RIGHT_ADVANCE(self, tokens[-1:], ended=ended)


RIGHT_MASK = guided_module.Guide.verify_mask
RIGHT_ADVANCE = guided_module.Form.advance

FAULTS: list[tuple[object, str, object]] = [
    (cycle_module, "through", _drafts_do_not_count),
    (cycle_module, "through", _drafts_count_one_early),
    (cycle_module, "through", _length_does_not_grow),
    (cycle_module, "add_counts", _nothing_counted),
    (cycle_module, "add_counts", _rejected_drafts_counted),
    (cycle_module, "add_counts", _only_the_first_counted),
    (prefill_module, "add_counts", _nothing_counted),
    (Prefill, "_counted", _prompt_forgotten),
    (Prefill, "_counted", _last_chunk_only),
    (cycle_module, "apply_rules", _target_without(bias=None)),
    (cycle_module, "apply_rules", _target_without(repetition=None)),
    (cycle_module, "apply_rules", _target_without(frequency=None)),
    (cycle_module, "apply_rules", _target_without(presence=None)),
    (cycle_module, "apply_rules", _target_without(stops=None)),
    (cycle_module, "apply_rules", _penalties_before_bias),
    (rows_module, "make_rules", _minimum(1)),
    (rows_module, "make_rules", _minimum(-1)),
    (rows_module, "make_rules", _a_neighbours_rules),
    (cycle_module, "record", _report_shifted),
    (prefill_module, "prompt_records", _prompt_report_shifted),
    (guided_module.Guide, "verify_mask", _first_verify_row_only),
    (guided_module.Guide, "verify_mask", _mask_one_late),
    (guided_module.Form, "advance", _last_token_advanced_only),
]


@pytest.mark.parametrize(("where", "name", "fault"), FAULTS)
def test_planted_faults_are_seen(
    model: Qwen35Model,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    fault: object,
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        judge_all(model, ROWS, script.run(model, 4, spoil=0.3))


ORDERED = tuple((60 + i, 600.0 - 40.0 * i) for i in range(9))
DRAFTED = [
    # Each biased token wins once; a said one falls to a third. The stop token waits for its turn.
    request(31, repetition_penalty=3.0, logit_bias=ORDERED),
    request(32, stop_ids=(9,), min_tokens=12, logit_bias=((9, 99.0), (8, 60.0))),
]


def _accepted(model: Qwen35Model) -> tuple[int, int]:
    """Drafts of the model's own head that were accepted, and all of them."""
    requests = [
        (row.prompt, replace(row.spec, max_tokens=9 if i == 0 else LENGTH))
        for i, row in enumerate(DRAFTED)
    ]
    results = generate(engine_over(model, trace=False), requests, depth=4)
    assert results[0].tokens == [token for token, _ in ORDERED]
    assert results[1].tokens == [8] * 12 + [9]
    return sum(sum(r.accepted) for r in results), sum(sum(r.drafted) for r in results)


def test_drafts_obey_the_rules_of_their_positions(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules this strong leave draft and target one choice, so every draft must be accepted but
    those behind the stop. A draft law without them would be exact, and useless."""
    accepted, drafted = _accepted(model)
    assert accepted >= drafted - 4
    monkeypatch.setattr(History, "after", lambda self, token, rules: self)
    accepted, drafted = _accepted(model)
    assert accepted < 0.8 * drafted


def test_rows_without_rules_keep_their_bits_beside_rows_with_them(
    model: Qwen35Model, script: Script
) -> None:
    """And carry no counts once they are among themselves again."""
    neutral = [greedy(LENGTH, seed=100), replace(ROWS[5].spec, logprobs=None)]
    starts = [[3, 1, 4], ROWS[5].prompt]
    alone, beside = engine_over(model), engine_over(model)
    first = generate(alone, list(zip(starts, neutral, strict=True)), depth=3)
    driver = Driver(beside)
    for i, row in enumerate(ROWS[:5]):
        driver.join(i, *row.ready())
    for i, (prompt, spec) in enumerate(zip(starts, neutral, strict=True)):
        driver.join(10 + i, prompt, spec)
    for _ in range(3):
        driver.decode(driver.active, depth=3)
    arrays = beside._books.free._arrays
    assert arrays is not None
    assert arrays.counts.shape[1] == VOCAB
    driver.decode([10, 11], depth=3)
    arrays = beside._books.free._arrays
    assert arrays is not None
    assert arrays.counts.shape[1] == arrays.prompted.shape[1] == 0
    while driver.active:
        driver.decode(driver.active, depth=3)
    for i, result in enumerate(first):
        assert driver.results[10 + i].tokens == result.tokens
        kept = [
            np.concatenate([t.logits for t in engine.traces if t.row == row])
            for engine, row in ((alone, result.row), (beside, 10 + i))
        ]
        assert np.array_equal(kept[0], kept[1])


def test_counts_survive_joining_parking_and_changing_places(
    model: Qwen35Model, script: Script
) -> None:
    rng = np.random.default_rng(8)
    engine = engine_over(model, trace=False)
    OracleCycle.install(engine, script.whole, spoil=0.2, seed=1)
    driver = Driver(engine)
    waiting = list(range(len(ROWS)))
    while waiting or driver.active:
        if waiting and rng.random() < 0.5:
            row = waiting.pop(int(rng.integers(len(waiting))))
            driver.join(row, *ROWS[row].ready())
        rows = [row for row in driver.active if rng.random() < 0.7]
        rng.shuffle(rows)
        driver.decode(rows, depth=int(rng.integers(0, 6)))
    for row, tokens in enumerate(script.plain):
        assert driver.results[row].tokens == tokens


def test_a_restored_prefix_counts_as_prompt(model: Qwen35Model) -> None:
    engine = engine_over(model)
    prefill, spec = engine._prefill, ROWS[3].spec
    tokens = np.array([21, 22, 30, 5], np.int32)

    def chunk(first: int, last: int, **extra: Any) -> PrefillChunk:
        return PrefillChunk(
            row=0, tokens=tokens[first:last], start=first, pages=page_array([1]), last=True, **extra
        )

    (row,) = prefill.chunks([prefill.start(spec)], [chunk(0, 2)]).rows
    restored = replace(row, prompted=None)
    (whole,) = prefill.chunks([row], [chunk(2, 4)]).rows
    passed = prefill.chunks([restored], [chunk(2, 4, prefix=tokens[:2])])
    (again,) = passed.rows
    assert whole.prompted is not None
    assert again.prompted is not None
    assert np.flatnonzero(whole.prompted).tolist() == [5, 21, 22, 30]
    assert np.array_equal(whole.prompted, again.prompted)
    (first,) = prefill.finish([again], passed.hidden).rows
    assert mx.array_equal(first.prompted[0], mx.array(again.prompted))


BAD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("repetition_penalty", {"repetition_penalty": 0.0}, {}),
    ("repetition_penalty", {"repetition_penalty": float("inf")}, {}),
    ("frequency_penalty", {"frequency_penalty": 2.5}, {}),
    ("presence_penalty", {"presence_penalty": float("nan")}, {}),
    ("logit_bias", {"logit_bias": ((VOCAB, 1.0),)}, {}),
    ("logit_bias", {"logit_bias": ((1, 1.0), (1, 2.0))}, {}),
    ("logit_bias", {"logit_bias": ((1, float("nan")),)}, {}),
    ("min_tokens", {}, {"min_tokens": 5}),
    ("logprobs", {}, {"logprobs": MAX_LOGPROBS + 1}),
    ("prompt_logprobs", {}, {"prompt_logprobs": -1}),
    ("stop_ids", {}, {"stop_ids": (VOCAB,)}),
]


@pytest.mark.parametrize(("name", "sampling", "spec"), BAD)
def test_what_cannot_be_obeyed_is_refused_by_name(
    model: Qwen35Model, name: str, sampling: dict[str, Any], spec: dict[str, Any]
) -> None:
    chunk = PrefillChunk(
        row=0,
        tokens=np.array([1], np.int32),
        start=0,
        pages=page_array([1]),
        last=True,
        spec=RowSpec(sampling=SamplingParams(**sampling), max_tokens=4, **spec),
    )
    with pytest.raises(ValueError, match=name):
        engine_over(model).submit(StepPlan(step=0, prefill=(chunk,)))


def test_huge_rules_do_not_overflow(model: Qwen35Model) -> None:
    row = request(1, logit_bias=((4, 3e38),), repetition_penalty=1e-30, prompt=[4, 9])
    result = generate(engine_over(model), [row.ready()], depth=2)[0]
    assert result.tokens == [4] * LENGTH
