"""Decide whether stored RMSNorm weights are deltas (γ - 1, Hugging Face's form) or folded (γ).

A wrong verdict loads without complaint: on the MTP head it costs all acceptance and shows nowhere
else, on the trunk it spoils every token. So the verdict is given per part (trunk, MTP), for the
whole set and never per tensor, by an explicit declaration where there is one, else by two
statistics over the set, else by the file's layout; and it is always reported.

The statistics, with their sources: (a) MTPLX `compressed_tensors.py`: deltas have
max(mean q_norm, mean k_norm) < 1.25 and min(mean of the layer norms) < 0.5 (measured 0.73-0.75 and
0.30-0.39, against >= 1.73 and >= 0.87 folded); the final norm overlaps and is left out. (b)
mlx-serve `mtp.zig`: folded weights are positive, more than 5 % negative entries in input_layernorm,
q_norm or the final norm mean deltas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DELTA_WORDS = ("delta", "delta_plus_one", "mlx_delta")
_FOLDED_WORDS = ("absolute", "gamma", "mlx_gamma", "folded")
_HEAD_LIMIT, _LAYER_LIMIT, _NEGATIVE_LIMIT = 1.25, 0.5, 0.05

Values = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormVerdict:
    """`delta`: 1 must be added. `why` and `doubts` are one line each, for logs."""

    delta: bool
    why: str
    doubts: tuple[str, ...] = ()

    @property
    def convention(self) -> str:
        return "delta (+1 added)" if self.delta else "folded"


def decide(part: str, values: Values, *, declared: str | None, raw_layout: bool) -> NormVerdict:
    """Verdict for one part, "trunk" or "mtp".

    `values` are its zero-centrable norms by canonical name, `declared` what the checkpoint says of
    them (None: nothing), `raw_layout` whether the trunk has Hugging Face's convolution layout.
    """
    small_means, negatives = _small_means(values), _has_negatives(values)
    agreed = small_means if small_means == negatives else None
    doubts = _doubts(values)
    word = (declared or "").strip().lower()
    if word in _DELTA_WORDS + _FOLDED_WORDS:
        delta = word in _DELTA_WORDS
        if agreed is not None and agreed != delta:
            doubts += (f"declared {word!r}, but the weights look {_word(agreed)}",)
        return NormVerdict(delta=delta, why=f"declared {word!r}", doubts=doubts)
    if word:
        doubts += (f"unknown declaration {word!r} ignored",)
    if agreed is not None:
        # An untouched head beside a converted trunk is common, a trunk at odds with itself is not.
        if part == "trunk" and agreed != raw_layout:
            layout = "Hugging Face" if raw_layout else "MLX"
            doubts += (f"{_word(agreed)} norms are unusual in the trunk's {layout} layout",)
        return NormVerdict(delta=agreed, why="statistics", doubts=doubts)
    doubts += (f"statistics disagree: means say {_word(small_means)}, signs {_word(negatives)}",)
    return NormVerdict(delta=raw_layout, why="layout of the trunk", doubts=doubts)


def declared_encoding(config: Mapping[str, Any]) -> str | None:
    """What MTPLX writes about the MTP head's norms into a config, None when it says nothing."""
    block = config.get("mtplx_mtp_quantization")
    nested = block if isinstance(block, Mapping) else {}
    for value in (
        config.get("mtplx_mtp_norm_encoding"),
        config.get("mtp_norm_encoding"),
        nested.get("norm_encoding"),
        nested.get("norm_weight_encoding"),
    ):
        if isinstance(value, str):
            return value
    return None


def _small_means(values: Values) -> bool:
    """Statistic (a): the means are those of deltas."""
    heads = [_mean(values, suffix) for suffix in (".q_norm.weight", ".k_norm.weight")]
    layers = [
        _mean(values, suffix)
        for suffix in (
            ".input_layernorm.weight",
            ".post_attention_layernorm.weight",
            ".pre_fc_norm_embedding.weight",
            ".pre_fc_norm_hidden.weight",
        )
    ]
    # np.fmax/fmin skip the NaN of a kind that this part does not have.
    head, layer = np.fmax.reduce(heads), np.fmin.reduce(layers)
    return bool((np.isnan(head) or head < _HEAD_LIMIT) and layer < _LAYER_LIMIT)


def _has_negatives(values: Values) -> bool:
    """Statistic (b): the signs are those of deltas."""
    worst = 0.0
    for suffix in (
        ".input_layernorm.weight",
        ".q_norm.weight",
        "model.norm.weight",
        "mtp.norm.weight",
    ):
        kind = _concatenated(values, suffix)
        if kind.size:
            worst = max(worst, float(np.mean(kind < 0)))
    return worst > _NEGATIVE_LIMIT


def _doubts(values: Values) -> tuple[str, ...]:
    inputs = _concatenated(values, ".input_layernorm.weight")
    # A third or more of a true γ lies below 1; none at all means that somebody added 1 once more.
    if inputs.size and float(inputs.min()) > 1.0:
        return ("every input_layernorm weight is above 1: was 1 added twice?",)
    return ()


def _concatenated(values: Values, suffix: str) -> NDArray[np.float32]:
    parts = [value.ravel() for name, value in values.items() if name.endswith(suffix)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _mean(values: Values, suffix: str) -> float:
    kind = _concatenated(values, suffix)
    return float(np.mean(kind)) if kind.size else float("nan")


def _word(delta: bool) -> str:
    return "delta" if delta else "folded"
