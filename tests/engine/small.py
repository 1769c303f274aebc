"""Small random models with a boosted recurrence, engines over them, and a drafter that is right.

Random hybrids are nearly blind to recurrent faults: their states decay within a token or two. So
A_log sits near -4 (states remember for tens of tokens) and convolution weights are large.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from engine.cache import PagePool
from engine.choice import Noise
from engine.cycle import DecodeCycle, Drafts
from engine.guided import Guide
from engine.models.qwen3_5 import Qwen35Model
from engine.models.qwen3_5_config import Qwen35Config
from engine.ops import lay_out_for_cpu
from engine.plan import EngineInfo, RowSpec, SamplingParams
from engine.rows import RowArrays, RowStatics
from engine.runner import MLXEngine
from engine.sampling import one_hot

PAGE_SIZE = 8

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "mtp_num_hidden_layers": 1,
}


def small_model(seed: int = 0, *, vocab: int = 96, **changes: Any) -> Qwen35Model:
    """A random model, fused and evaluated; `changes` are to `CONFIG`."""
    config = Qwen35Config.from_dict(CONFIG | {"vocab_size": vocab} | changes)
    model = Qwen35Model(config, with_mtp=True)
    rng = np.random.default_rng(seed)
    parameters: Any = tree_flatten(model.parameters())
    weights = [
        (name, mx.array(_random(rng, name, tuple(array.shape)), mx.float32))
        for name, array in parameters
    ]
    model.load_weights(weights)
    model.fuse()
    lay_out_for_cpu(model)
    mx.eval(model.parameters())
    return model


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    noise = rng.standard_normal(shape)
    if name.endswith("A_log"):
        return -4.0 + 0.2 * noise
    if "conv1d" in name:
        return 0.8 * noise
    if "norm" in name:
        return 1.0 + 0.1 * noise
    scale = 6.0 if "embed" in name else 1.0
    scaled: NDArray[np.float64] = scale * noise / np.sqrt(shape[-1])
    return scaled


def engine_over(
    model: Qwen35Model,
    *,
    pages: int = 160,
    max_rows: int = 16,
    trace: bool = True,
    boundaries: int = 0,
    page_size: int = PAGE_SIZE,
    max_depth: int = 8,
    **options: Any,
) -> MLXEngine:
    """An engine with its own pools over a shared model; `options` are `MLXEngine`'s."""
    config = model.config

    def pool() -> PagePool:
        return PagePool(
            pages=pages,
            page_size=page_size,
            heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=mx.float32,
        )

    info = EngineInfo(
        model="small",
        family="qwen3_5",
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        mtp_layers=1,
        max_depth=max_depth,
        max_rows=max_rows,
        pages=pages,
        page_size=page_size,
        page_bytes=0,
        row_bytes=0,
        weight_bytes=0,
        parameters=0,
        dtype="float32",
        quantization="none",
        device="cpu",
        blas="mlx reference",
        boundaries=boundaries,
    )
    pools = [pool() for _ in range(model.attention_layers)]
    return MLXEngine(model=model, pools=pools, mtp_pool=pool(), info=info, trace=trace, **options)


def greedy(max_tokens: int, *, stop_ids: tuple[int, ...] = (), seed: int = 0) -> RowSpec:
    """A greedy row; the seed only names it (see `OracleCycle`)."""
    sampling = SamplingParams(temperature=0.0, seed=seed)
    return RowSpec(sampling=sampling, max_tokens=max_tokens, stop_ids=stop_ids)


def prompts(count: int, vocab: int = 96, seed: int = 3) -> list[list[int]]:
    """Random prompts of assorted lengths, the shortest of one token."""
    rng = np.random.default_rng(seed)
    lengths = [1, 5, 17, 33, 8, 2, 26, 11][:count]
    return [[int(t) for t in rng.integers(0, vocab, length)] for length in lengths]


class OracleCycle(DecodeCycle):
    """A cycle whose drafts are the known future, spoilt at chosen rates.

    Random weights never agree with themselves, so acceptance would go untested. Rows are told
    apart by their seeds: `script[seed]` is the row's whole sequence, prompt first.
    """

    script: mx.array
    keys: mx.array
    spoil: float
    rng: np.random.Generator

    @classmethod
    def install(
        cls, engine: MLXEngine, sequences: dict[int, list[int]], *, spoil: float, seed: int = 0
    ) -> None:
        """Turn the engine's cycle into an oracle over `sequences` by row seed."""
        from engine.noise import row_key

        cycle = engine._cycle
        cycle.__class__ = cls
        assert isinstance(cycle, OracleCycle)
        longest = max(map(len, sequences.values())) + 16
        padded = [row + [0] * (longest - len(row)) for row in sequences.values()]
        cycle.script = mx.array(padded, mx.int32)
        cycle.keys = mx.array([row_key(s)[0] for s in sequences], mx.uint32)
        cycle.spoil = spoil
        cycle.rng = np.random.default_rng(seed)

    def _draft(
        self,
        rows: RowArrays,
        statics: RowStatics,
        table: mx.array,
        depth: int,
        noise: Noise | None,
        guide: Guide | None,
    ) -> Drafts:
        super()._draft(rows, statics, table, depth, noise, guide)
        vocab = self._model.config.vocab_size
        which = mx.argmax(statics.keys[:, :1] == self.keys[None, :], axis=-1)
        ahead = rows.length[:, None] + mx.arange(1, depth + 1, dtype=mx.int32)[None, :]
        ahead = mx.minimum(ahead, self.script.shape[1] - 1)
        tokens = mx.take_along_axis(self.script[which], ahead, axis=1)
        wrong = mx.array(self.rng.random(tokens.shape) < self.spoil)
        tokens = mx.where(wrong, (tokens + 1) % vocab, tokens)
        return Drafts(tokens=tokens, q=one_hot(tokens, vocab) if statics.rejects else None)


def operations(arrays: Iterable[mx.array]) -> int:
    """Operations of the graph that these arrays wait for; 0 when all are evaluated."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("label")
