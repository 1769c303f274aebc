"""Shape of a dense Qwen3.5 / 3.6 / 3.8 model, read from its `config.json`.

Source of keys and rules: configuration_qwen3_5.py of transformers 5.24 and qwen3_5.py of mlx-lm
0.32.2. What this engine does not implement is refused here, with the reason, so that no unknown
variation reaches the model code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

_WHERE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config:
    """Dimensions and constants of one model. Build with `from_dict`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dims: int
    """Leading dimensions of each head that are rotated; the rest pass."""
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layer_types: tuple[str, ...]
    """Per layer "linear_attention" or "full_attention"."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_layers: int
    """What the config advertises, 0 or 1; whether the tensors exist is the checkpoint's to say."""

    def is_full_attention(self, layer: int) -> bool:
        return self.layer_types[layer] == "full_attention"

    @property
    def full_attention_layers(self) -> int:
        return sum(self.is_full_attention(i) for i in range(self.num_hidden_layers))

    @property
    def linear_layers(self) -> int:
        return self.num_hidden_layers - self.full_attention_layers

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        keys = 2 * self.linear_num_key_heads * self.linear_key_head_dim
        return keys + self.value_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Parse a `config.json` (wrapper with `text_config`, or text only).

        Raises ConfigError naming the key that is missing, invalid, or asks for something this
        engine does not implement.
        """
        keys = _Keys(config)
        _refuse_unsupported(keys)
        rope_theta, rotary_dims = _rope(keys)
        layers = keys.integer("num_hidden_layers")
        parsed = cls(
            model_type=str(config.get("model_type", "")),
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            num_hidden_layers=layers,
            intermediate_size=keys.integer("intermediate_size"),
            num_attention_heads=keys.integer("num_attention_heads"),
            num_key_value_heads=keys.integer("num_key_value_heads"),
            head_dim=keys.integer("head_dim"),
            rms_norm_eps=keys.positive("rms_norm_eps"),
            rope_theta=rope_theta,
            rotary_dims=rotary_dims,
            linear_num_key_heads=keys.integer("linear_num_key_heads"),
            linear_num_value_heads=keys.integer("linear_num_value_heads"),
            linear_key_head_dim=keys.integer("linear_key_head_dim"),
            linear_value_head_dim=keys.integer("linear_value_head_dim"),
            linear_conv_kernel_dim=keys.integer("linear_conv_kernel_dim", low=2),
            layer_types=_layer_types(keys, layers),
            tie_word_embeddings=keys.tied(),
            max_position_embeddings=keys.integer("max_position_embeddings", low=2),
            mtp_layers=_mtp_layers(keys),
        )
        _check_multiple(keys, "num_attention_heads", "num_key_value_heads")
        _check_multiple(keys, "linear_num_value_heads", "linear_num_key_heads")
        return parsed


class _Keys:
    """Typed access to the text part of a config, with errors that name the key's full path."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise ConfigError("text_config", "must be an object", where=_WHERE)
        self.root = config
        self.text: Mapping[str, Any] = config if nested is None else nested
        self.prefix = "" if nested is None else "text_config."

    def error(self, key: str, limit: str) -> ConfigError:
        return ConfigError(self.prefix + key, limit, where=_WHERE)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.text.get(key)
        return default if value is None else value

    def integer(self, key: str, *, low: int = 1) -> int:
        value = self.get(key)
        if value is None:
            raise self.error(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"must be an integer of at least {low}, not {value!r}")
        return value

    def positive(self, key: str) -> float:
        value = self.get(key)
        if value is None:
            raise self.error(key, "missing")
        return self.positive_value(key, value)

    def positive_value(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, f"must be a number above 0, not {value!r}")
        return float(value)

    def tied(self) -> bool:
        """transformers obeys the outermost `tie_word_embeddings`; some have only the inner."""
        for source in (self.root, self.text):
            value = source.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    raise ConfigError(
                        "tie_word_embeddings", f"must be true or false, not {value!r}", where=_WHERE
                    )
                return value
        return False


def _refuse_unsupported(keys: _Keys) -> None:
    """Variations that would need other model code than ours."""
    for key, wanted, reason in (
        ("attn_output_gate", True, "attention without the output gate is not implemented"),
        ("attention_bias", False, "biased attention projections are not implemented"),
        (
            "mtp_use_dedicated_embeddings",
            False,
            "an MTP head with its own embedding is not implemented (it is bound to the trunk's)",
        ),
    ):
        if keys.get(key, wanted) is not wanted:
            raise keys.error(key, f"{keys.get(key)!r} is refused: {reason}")
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", f"must be 'silu', not {keys.get('hidden_act')!r}")
    if keys.get("num_experts", 0):
        raise keys.error("num_experts", "mixture-of-experts models are not implemented")


def _mtp_layers(keys: _Keys) -> int:
    for source in (keys.text, keys.root):
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            value = source.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise keys.error(key, f"must be an integer of at least 0, not {value!r}")
            if value > 1:
                reason = "engines disagree on how several MTP layers are wired, none is verified"
                raise keys.error(key, f"{value} is refused: {reason}")
            return value
    return 0


def _rope(keys: _Keys) -> tuple[float, int]:
    """(theta, rotated dimensions). Older files keep both keys beside the others."""
    rope = keys.get("rope_parameters")
    if rope is None:
        if keys.get("rope_scaling"):
            raise keys.error("rope_scaling", "scaled rotary embeddings are not implemented")
        rope, path = keys.text, ""
    elif isinstance(rope, Mapping):
        path = "rope_parameters."
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise keys.error(f"{path}rope_type", f"must be 'default', not {kind!r}")
    else:
        raise keys.error("rope_parameters", "must be an object")
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None:
            raise keys.error(path + key, "missing")
    theta = keys.positive_value(f"{path}rope_theta", rope["rope_theta"])
    factor = keys.positive_value(f"{path}partial_rotary_factor", rope["partial_rotary_factor"])
    head_dim = keys.integer("head_dim")
    dims = int(head_dim * factor)
    if factor > 1 or dims < 2 or dims % 2:
        raise keys.error(
            f"{path}partial_rotary_factor",
            f"must rotate an even number of the {head_dim} head dims, not {head_dim * factor}",
        )
    return theta, dims


def _layer_types(keys: _Keys, layers: int) -> tuple[str, ...]:
    kinds = keys.get("layer_types")
    if kinds is None:
        interval = keys.integer("full_attention_interval")
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        )
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.error("layer_types", f"must list {layers} layers (num_hidden_layers)")
    for i, kind in enumerate(kinds):
        if kind not in ("linear_attention", "full_attention"):
            raise keys.error(f"layer_types[{i}]", f"unknown kind {kind!r}")
    return tuple(kinds)


def _check_multiple(keys: _Keys, many: str, few: str) -> None:
    if keys.integer(many) % keys.integer(few):
        raise keys.error(many, f"must be a multiple of {few} ({keys.integer(few)})")
