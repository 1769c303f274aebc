"""The bundled model: an ordinary checkpoint whose head drafts well, and sampling on it is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import cycle as cycle_module
from engine import gate
from engine.choice import Noise, sample
from engine.config import EngineConfig
from engine.gate import validate_mtp_support
from engine.inspect import inspect_model
from engine.load import load_engine
from engine.models import qwen3_5
from engine.plan import RowSpec, SamplingParams
from engine.rows import RowStatics
from engine.runner import MLXEngine
from engine.solo import generate
from engine.tiny import MODEL_DIR
from tests.engine import twin

BEGINS = 4093
"""`<|endoftext|>`: every document starts after one."""


@pytest.fixture(scope="module")
def engine() -> Iterator[MLXEngine]:
    config = EngineConfig(
        model=MODEL_DIR, blas="reference", mtp_gate="off", max_rows=8, kv_memory=1 << 25
    )
    made = load_engine(config, trace=True, inline=True)  # some tests change its weights
    yield made
    made.close()


def test_the_folder_is_small_and_can_run() -> None:
    weights = sum(file.stat().st_size for file in MODEL_DIR.rglob("*") if file.is_file())
    assert weights < 24e6
    found = inspect_model(MODEL_DIR)
    assert found.runnable
    assert not found.mtp_missing
    assert found.max_depth == 8


def test_its_proportions_are_a_real_models(engine: MLXEngine) -> None:
    """A draft pass (MTP layer and head) multiplies at most 12 % of what a trunk pass does."""
    model = engine._cycle._model
    head = _products(model.model.embed_tokens)
    trunk = sum(_products(layer) for layer in model.model.layers) + head
    draft = _products(model.mtp) + head
    assert 20e6 < engine.info.parameters < 30e6
    assert draft / trunk < 0.12


def _products(module: object) -> int:
    """Elements of the matrices below a module: multiplications per token."""
    from mlx.utils import tree_flatten

    arrays: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # type: ignore
    return sum(array.size for _, array in arrays if array.ndim == 2)


def test_the_gate_passes_it(engine: MLXEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_TOKENS", 16)
    verdict = validate_mtp_support(engine, BEGINS)
    assert verdict.passed
    assert verdict.rate > 0.5
    assert verdict.drafted > 15


def _swapped_concat(engine: MLXEngine, patch: pytest.MonkeyPatch) -> None:
    def combine(self: qwen3_5.MtpHead, embedding: mx.array, hidden: mx.array) -> mx.array:
        parts = [self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embedding)]
        out: mx.array = self.fc(mx.concatenate(parts, axis=-1))
        return out

    patch.setattr(qwen3_5.MtpHead, "combine", combine)


def _norms_off_by_one(engine: MLXEngine, patch: pytest.MonkeyPatch) -> None:
    mtp = engine._cycle._model.mtp
    layer = mtp.layers[0]
    for norm in (
        mtp.norm,
        mtp.pre_fc_norm_embedding,
        mtp.pre_fc_norm_hidden,
        layer.input_layernorm,
        layer.post_attention_layernorm,
    ):
        patch.setitem(norm, "weight", norm.weight - 1)


def _tokens_unshifted(engine: MLXEngine, patch: pytest.MonkeyPatch) -> None:
    """Slot p fed the token at p instead of the one at p + 1."""
    right = qwen3_5.Qwen35Model.mtp_exact

    def wrong(
        self: qwen3_5.Qwen35Model, hidden: mx.array, tokens: mx.array, *rest: object
    ) -> mx.array:
        late = mx.concatenate([mx.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)
        return right(self, hidden, late, *rest)  # type: ignore[arg-type]

    patch.setattr(qwen3_5.Qwen35Model, "mtp_exact", wrong)


@pytest.mark.parametrize("fault", [_swapped_concat, _norms_off_by_one, _tokens_unshifted])
def test_the_gate_stops_a_head_that_is_wired_wrongly(
    engine: MLXEngine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[MLXEngine, pytest.MonkeyPatch], None],
) -> None:
    monkeypatch.setattr(gate, "_TOKENS", 8)
    fault(engine, monkeypatch)
    verdict = validate_mtp_support(engine, BEGINS)
    assert not verdict.passed
    assert "drafting is off" in str(verdict)


@pytest.mark.parametrize("depth", [0, 3])
def test_every_token_follows_the_traced_law(engine: MLXEngine, depth: int) -> None:
    """Each emitted token is a draw from the target's law behind it.

    Ordered by probability, the law's distribution function at the token (randomised within its
    step) is uniform if and only if tokens are drawn from the law; too many likely or unlikely
    tokens bend it. Pooled over all tokens of all rows.
    """
    params = SamplingParams(temperature=0.8, top_p=0.95)
    rng = np.random.default_rng(11)
    engine.traces.clear()
    values: list[float] = []
    for first in (20, 28):
        requests = [
            (
                [BEGINS, 300 + 41 * seed],
                RowSpec(
                    sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=seed), max_tokens=20
                ),
            )
            for seed in range(first, first + 8)
        ]
        results = generate(engine, requests, depth=depth)
        if depth:
            assert sum(sum(r.accepted) for r in results) > 40
    for trace in engine.traces:
        for token, logits in zip(trace.tokens, trace.logits, strict=True):
            law = twin.shape(logits.astype(np.float64), params, params.temperature)
            assert law[token] > 0
            above = law[law > law[token]].sum()
            ties = law[law == law[token]].sum()
            values.append(float(above + rng.random() * ties))
    assert len(values) == 16 * 20
    counts = np.histogram(values, bins=10, range=(0, 1))[0]
    mean = len(values) / 10
    chi2 = float(((counts - mean) ** 2 / mean).sum())
    assert chi2 < 27.9  # 99.9 % quantile, 9 degrees of freedom


def test_greedy_text_does_not_depend_on_depth_or_company(engine: MLXEngine) -> None:
    requests = [
        ([BEGINS, 350 + seed], RowSpec(sampling=SamplingParams(temperature=0.0), max_tokens=16))
        for seed in range(3)
    ]
    together = [r.tokens for r in generate(engine, requests, depth=3)]
    assert together == [generate(engine, [request])[0].tokens for request in requests]


def _coupled(engine: MLXEngine, depth: int) -> tuple[list[list[int]], float]:
    """Tokens of eight coupled rows, and how many a cycle emitted."""
    requests = [
        (
            [BEGINS, 310 + 37 * seed],
            RowSpec(
                sampling=SamplingParams(temperature=0.8, top_k=20, seed=seed, coupled=True),
                max_tokens=18,
            ),
        )
        for seed in range(8)
    ]
    results = generate(engine, requests, depth=depth)
    decoded = sum(len(result.tokens) - 1 for result in results)
    return [r.tokens for r in results], decoded / sum(r.cycles for r in results)


def test_coupled_text_does_not_depend_on_depth_and_its_drafts_are_accepted(
    engine: MLXEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts drawn with noise of their own would leave every token as it is and cost most of the
    acceptance: only a number sees it."""
    plain, _ = _coupled(engine, 0)
    tokens, rate = _coupled(engine, 3)
    assert tokens == plain
    assert rate > 1.75

    def own_noise(law: mx.array, statics: RowStatics, noise: Noise, *where: Any) -> mx.array:
        assert noise.exponential is not None
        other = Noise(uniform=None, exponential=noise.exponential[..., ::-1])
        return sample(law, statics, other, *where)

    monkeypatch.setattr(cycle_module, "sample", own_noise)
    tokens, apart = _coupled(engine, 3)
    assert tokens == plain
    assert apart < 0.88 * rate
