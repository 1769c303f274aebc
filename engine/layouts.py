"""Names and shapes a dense Qwen3.5 checkpoint must have, and how stored names map to them.

Canonical names are mlx-lm's module paths without the leading `language_model.`. Shapes are
[out, in] for linear layers, in Hugging Face and MLX alike; the only tensor stored differently is
the convolution (see `conv_shapes`). Source: modeling_qwen3_5.py of transformers 5.24, qwen3_5.py of
mlx-lm 0.32.2, vLLM's qwen3_5_mtp.py for the MTP part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.errors import CheckpointError
from engine.models.qwen3_5_config import Qwen35Config

FAMILIES = {"qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5"}
"""`model_type` → family this engine runs."""

MTP_PREFIX = "mtp."
SHOWN = 8
"""Names listed in one error before it says how many more."""

_PREFIXES: tuple[tuple[str, str | None], ...] = (
    ("model.visual.", None),
    ("vision_tower.", None),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.mtp.", "mtp."),
    ("model.", "model."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)
"""Stored prefix → canonical one, first match wins; None: not part of the language model."""


class Kind(StrEnum):
    """What a tensor is, as far as loading cares."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NORM = "norm"
    """Zero-centred in Hugging Face files: 1 is added to make a plain RMSNorm weight."""
    PLAIN = "plain"
    """Taken as stored. `linear_attn.norm` is one: its weight is not zero-centred."""
    CONV = "conv"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Canonical shape (dense, MLX layout) and kind of one tensor."""

    shape: tuple[int, ...]
    kind: Kind

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def quantizable(self) -> bool:
        return self.kind in (Kind.LINEAR, Kind.EMBEDDING)


Schema = dict[str, TensorSpec]


def family_of(config: Mapping[str, Any], where: object) -> str:
    """Family of a checkpoint's config. Raises CheckpointError that lists what is supported."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        what = f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        raise CheckpointError(where, f"{what} (dense only)")
    return family


def canonical_name(stored: str) -> str | None:
    """Canonical name of a stored tensor (or module path); None for the vision part.

    Names without a known prefix come back unchanged, so that they are reported as extra.
    """
    for prefix, replacement in _PREFIXES:
        if stored.startswith(prefix):
            return None if replacement is None else replacement + stored[len(prefix) :]
    return stored


def sidecar_name(stored: str) -> str | None:
    """Like `canonical_name`, for a file that holds only an MTP head: bare names are its own."""
    known = any(stored.startswith(prefix) for prefix, _ in _PREFIXES)
    return canonical_name(stored) if known else MTP_PREFIX + stored


def trunk_schema(arch: Qwen35Config) -> Schema:
    """Every trunk tensor; without `lm_head.weight` when the embedding is tied."""
    wide = (arch.vocab_size, arch.hidden_size)
    schema = {
        "model.embed_tokens.weight": TensorSpec(wide, Kind.EMBEDDING),
        "model.norm.weight": TensorSpec((arch.hidden_size,), Kind.NORM),
    }
    if not arch.tie_word_embeddings:
        schema["lm_head.weight"] = TensorSpec(wide, Kind.LINEAR)
    for i in range(arch.num_hidden_layers):
        mixer = _attention(arch) if arch.is_full_attention(i) else _linear_attention(arch)
        for name, spec in (_block(arch) | mixer).items():
            schema[f"model.layers.{i}.{name}"] = spec
    return schema


def mtp_schema(arch: Qwen35Config) -> Schema:
    """Every tensor of the one MTP layer: it shares the trunk's embedding and head."""
    hidden = arch.hidden_size
    schema = {
        "mtp.fc.weight": TensorSpec((hidden, 2 * hidden), Kind.LINEAR),
        "mtp.pre_fc_norm_embedding.weight": TensorSpec((hidden,), Kind.NORM),
        "mtp.pre_fc_norm_hidden.weight": TensorSpec((hidden,), Kind.NORM),
        "mtp.norm.weight": TensorSpec((hidden,), Kind.NORM),
    }
    for name, spec in (_block(arch) | _attention(arch)).items():
        schema[f"mtp.layers.0.{name}"] = spec
    return schema


def conv_shapes(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(Hugging Face [C, 1, K], MLX [C, K, 1]) for a convolution whose canonical shape is MLX's."""
    channels, width, _ = spec.shape
    return (channels, 1, width), spec.shape


def listed(names: Iterable[str]) -> str:
    """Names for an error message, at most `SHOWN` of them."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def _block(arch: Qwen35Config) -> Schema:
    """What every decoder layer has, whichever mixer it uses."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    return {
        "input_layernorm.weight": TensorSpec((hidden,), Kind.NORM),
        "post_attention_layernorm.weight": TensorSpec((hidden,), Kind.NORM),
        "mlp.gate_proj.weight": TensorSpec((inner, hidden), Kind.LINEAR),
        "mlp.up_proj.weight": TensorSpec((inner, hidden), Kind.LINEAR),
        "mlp.down_proj.weight": TensorSpec((hidden, inner), Kind.LINEAR),
    }


def _attention(arch: Qwen35Config) -> Schema:
    """Gated full attention. Rows of q_proj: per head, head_dim of query then head_dim of gate."""
    hidden, dim = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * dim, arch.num_key_value_heads * dim
    return {
        "self_attn.q_proj.weight": TensorSpec((2 * queries, hidden), Kind.LINEAR),
        "self_attn.k_proj.weight": TensorSpec((keys, hidden), Kind.LINEAR),
        "self_attn.v_proj.weight": TensorSpec((keys, hidden), Kind.LINEAR),
        "self_attn.o_proj.weight": TensorSpec((hidden, queries), Kind.LINEAR),
        "self_attn.q_norm.weight": TensorSpec((dim,), Kind.NORM),
        "self_attn.k_norm.weight": TensorSpec((dim,), Kind.NORM),
    }


def _linear_attention(arch: Qwen35Config) -> Schema:
    """Gated DeltaNet. Rows of in_proj_qkv: all q, all k, all v."""
    hidden, heads = arch.hidden_size, arch.linear_num_value_heads
    conv = (arch.conv_dim, arch.linear_conv_kernel_dim, 1)
    return {
        "linear_attn.in_proj_qkv.weight": TensorSpec((arch.conv_dim, hidden), Kind.LINEAR),
        "linear_attn.in_proj_z.weight": TensorSpec((arch.value_dim, hidden), Kind.LINEAR),
        "linear_attn.in_proj_b.weight": TensorSpec((heads, hidden), Kind.LINEAR),
        "linear_attn.in_proj_a.weight": TensorSpec((heads, hidden), Kind.LINEAR),
        "linear_attn.conv1d.weight": TensorSpec(conv, Kind.CONV),
        "linear_attn.A_log": TensorSpec((heads,), Kind.PLAIN),
        "linear_attn.dt_bias": TensorSpec((heads,), Kind.PLAIN),
        "linear_attn.norm.weight": TensorSpec((arch.linear_value_head_dim,), Kind.PLAIN),
        "linear_attn.out_proj.weight": TensorSpec((hidden, arch.value_dim), Kind.LINEAR),
    }
