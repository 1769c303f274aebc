"""The same guarantees where bits differ: on a GPU, or with a BLAS that chooses kernels by shape.

There the logits of a row depend in their last bits on what shares its batch, so two runs may part
at a near-tie: a position where the two best tokens are closer than the numbers are sure. What must
hold on any device: logits agree within `ALLOWANCE`, and tokens agree up to the first near-tie of
the reference, closer than 2 · `ALLOWANCE`. `LEAST` says how much of the text must have been
compared, so that near-ties cannot excuse a fault; planted faults show that they do not.

These tests run on the default device with whatever BLAS the process has; the bitwise ones are in
`test_cycle`.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import cycle as cycle_module
from engine import prefill as prefill_module
from engine.blocks import Block
from engine.cache import RecurrentState, RecurrentTrail
from engine.models import delta, delta_block
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import RowSpec, SamplingParams
from engine.runner import MLXEngine
from engine.solo import SoloResult, generate
from tests.engine.host import Host
from tests.engine.small import OracleCycle, engine_over, greedy, prompts, small_model

ALLOWANCE = 0.1
"""Nats. On an H200, whose float32 products are TF32, two batch sizes differed by up to 0.024 in the
small model's logits token by token and by up to 0.053 as one block; they span some 30."""
LEAST = 0.7
TOKENS = 32
ROWS = 5

Logits = NDArray[np.float32]
Text = tuple[list[int], Logits]


@pytest.fixture(scope="module", params=[False, True], ids=["by token", "as one block"])
def model(request: pytest.FixtureRequest) -> Qwen35Model:
    model = small_model()
    if request.param:
        model.run_in_blocks()
    return model


def text_of(engine: MLXEngine, result: SoloResult) -> Text:
    logits = np.concatenate([t.logits for t in engine.traces if t.row == result.row])
    return result.tokens, logits


def compared(reference: Text, other: Text) -> int:
    """Positions that could be compared; AssertionError at the first that differs beyond reason."""
    tokens, logits = reference
    for i, token in enumerate(tokens):
        assert np.abs(logits[i] - other[1][i]).max() <= ALLOWANCE, f"logits at {i}"
        second, first = np.sort(logits[i])[-2:]
        if first - second < 2 * ALLOWANCE:
            return i
        assert other[0][i] == token, f"token at {i}"
    return len(tokens)


class Reference:
    """Each prompt by itself at depth 0."""

    def __init__(self, model: Qwen35Model) -> None:
        self.model = model
        self.prompts = prompts(ROWS)
        self.requests = [(p, greedy(TOKENS, seed=i)) for i, p in enumerate(self.prompts)]
        self.texts: list[Text] = []
        for request in self.requests:
            engine = engine_over(model)
            self.texts.append(text_of(engine, generate(engine, [request])[0]))

    def check(
        self,
        depth: int | Callable[[int], int],
        *,
        chunk: int | None = None,
        prepare: Callable[[MLXEngine], None] = lambda engine: None,
    ) -> None:
        engine = engine_over(self.model)
        whole = {
            i: p + t for i, (p, (t, _)) in enumerate(zip(self.prompts, self.texts, strict=True))
        }
        OracleCycle.install(engine, whole, spoil=0.25, seed=1)
        prepare(engine)
        results = generate(engine, self.requests, depth=depth, chunk=chunk)
        counts = [
            compared(text, text_of(engine, result))
            for text, result in zip(self.texts, results, strict=True)
        ]
        assert sum(counts) >= LEAST * ROWS * TOKENS


@pytest.fixture(scope="module")
def reference(model: Qwen35Model) -> Reference:
    return Reference(model)


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
def test_greedy_text_is_the_same_at_every_depth_in_a_batch(
    reference: Reference, depth: int
) -> None:
    reference.check(depth)


def test_greedy_text_is_the_same_when_the_depth_changes(reference: Reference) -> None:
    reference.check(lambda cycle: (0, 3, 1, 5)[cycle % 4])


def test_greedy_text_is_the_same_with_the_prompt_in_pieces(reference: Reference) -> None:
    reference.check(2, chunk=7)


def check_one_pass(reference: Reference) -> None:
    """All prompts, of 1 to 33 tokens, in one pass as a GPU runs it."""
    host = Host(engine_over(reference.model, buckets=True, chunked_prefill=True))
    pieces = [host.pieces(i, *request) for i, request in enumerate(reference.requests)]
    host.prefill(*(piece for (piece,) in pieces))
    host.finish(*range(ROWS), depth=2)
    counts = [
        compared(text, text_of(host.engine, host.results[i]))
        for i, text in enumerate(reference.texts)
    ]
    assert sum(counts) >= LEAST * ROWS * TOKENS


def test_greedy_text_is_the_same_with_all_prompts_in_one_pass(reference: Reference) -> None:
    check_one_pass(reference)


def _conv_tail_of_the_longest(trail: RecurrentTrail, block: Block) -> RecurrentState:
    return delta.keep_all(trail)


def _next_rows_state(trail: RecurrentTrail, block: Block) -> RecurrentState:
    kept = delta.keep_all(trail, block)
    memory = mx.concatenate([kept.memory[1:], kept.memory[:1]], axis=0)
    return RecurrentState(conv=kept.conv, memory=memory)


@pytest.mark.parametrize("fault", [_conv_tail_of_the_longest, _next_rows_state])
def test_allowances_hide_no_fault_of_a_shared_pass(
    reference: Reference, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "keep_all", fault)
    with pytest.raises(AssertionError):
        check_one_pass(reference)


def _kept_one_short(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    return delta.keep_prefix(trail, mx.maximum(count - 1, 0))


def _conv_never_rolled_back(trail: RecurrentTrail, count: mx.array) -> RecurrentState:
    right = delta.keep_prefix(trail, count)
    return RecurrentState(conv=delta.keep_all(trail).conv, memory=right.memory)


@pytest.mark.parametrize("fault", [_kept_one_short, _conv_never_rolled_back])
def test_allowances_hide_no_fault(
    reference: Reference, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle_module, "keep_prefix", fault)
    with pytest.raises(AssertionError):
        reference.check(3)


def test_a_missing_decay_is_seen(
    model: Qwen35Model, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever form the recurrence runs."""

    def constant(x: mx.array) -> mx.array:
        return mx.ones_like(x)

    if model.model.layers[0].linear_attn.blocks:
        right = delta_block.keep_block
        monkeypatch.setattr(
            delta,
            "keep_block",
            lambda writes, memory, count: right(
                delta_block.BlockWrites(writes.keys, writes.updates, mx.zeros_like(writes.decayed)),
                memory,
                count,
            ),
        )
    else:
        right_rule = delta.delta_rule
        monkeypatch.setattr(
            "engine.models.qwen3_5.delta_rule",
            lambda q, k, v, decay, beta, memory: right_rule(q, k, v, constant(decay), beta, memory),
        )
    with pytest.raises(AssertionError):
        reference.check(3)


def test_coupled_text_is_the_same_at_every_depth(model: Qwen35Model) -> None:
    """Noise depends on nothing but seed, position and token, so coupled rows part at near-ties of
    their own races only: most texts agree whole, all agree in their beginnings."""
    sampling = [SamplingParams(temperature=0.8, top_k=20, seed=s, coupled=True) for s in range(8)]
    prompt = prompts(3)[2]
    requests = [(prompt, RowSpec(sampling=s, max_tokens=16)) for s in sampling]
    plain = generate(engine_over(model), requests, depth=0)
    drafted = generate(engine_over(model), requests, depth=3)
    same = [
        next((i for i, (a, b) in enumerate(zip(x.tokens, y.tokens, strict=True)) if a != b), 16)
        for x, y in zip(plain, drafted, strict=True)
    ]
    assert sum(same) >= LEAST * 8 * 16
