"""Model configs: every key that is missing, invalid or unsupported is named with its full path."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.models.qwen3_5_config import Qwen35Config
from tests.engine.tiny_checkpoints import text_config

CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"hidden_size": None}, "hidden_size: missing"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads: must be an integer of at least 1"),
    "text": ({"vocab_size": "160"}, "vocab_size: must be an integer"),
    "boolean": ({"vocab_size": True}, "vocab_size: must be an integer"),
    "not positive": ({"rms_norm_eps": 0.0}, "rms_norm_eps: must be a number above 0"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads: must be a multiple"),
    "linear heads": ({"linear_num_key_heads": 3}, "linear_num_value_heads: must be a multiple"),
    "two heads": ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: 2 is refused: engines"),
    "own embedding": ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings: True"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate: False is refused"),
    "bias": ({"attention_bias": True}, "attention_bias: True is refused"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: must be 'silu'"),
    "experts": ({"num_experts": 8}, "num_experts: mixture-of-experts"),
    "tying": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
    "no interval": ({"full_attention_interval": None}, "full_attention_interval: missing"),
    "layer count": ({"layer_types": ["full_attention"]}, "layer_types: must list 4 layers"),
    "layer kind": (
        {"layer_types": ["full_attention"] * 3 + ["sliding"]},
        r"layer_types\[3\]: unknown kind 'sliding'",
    ),
    "no rope": ({"rope_parameters": None}, "rope_theta: missing"),
    "rope kind": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            }
        },
        r"rope_parameters\.rope_type: must be 'default', not 'yarn'",
    ),
    "rope factor": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
        r"rope_parameters\.partial_rotary_factor: must rotate an even number",
    ),
    "rope theta": ({"rope_parameters": {"partial_rotary_factor": 1}}, r"rope_theta: missing"),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_faults_name_the_key(fault: str, wrapped: bool) -> None:
    changes, message = CONFIG_FAULTS[fault]
    config = text_config("hf") | changes
    prefix = ""
    if wrapped:
        config = {"model_type": "qwen3_5", "text_config": config}
        prefix = "" if "tie" in message else r"text_config\."
    with pytest.raises(ConfigError, match=rf"config\.json: {prefix}.*{message}"):
        Qwen35Config.from_dict(config)


def test_old_style_rope_keys_are_read() -> None:
    config = text_config("hf")
    del config["rope_parameters"]
    config |= {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    arch = Qwen35Config.from_dict(config)
    assert (arch.rope_theta, arch.rotary_dims) == (1e6, 16)
    with pytest.raises(ConfigError, match="rope_scaling"):
        Qwen35Config.from_dict(config | {"rope_scaling": {"type": "linear", "factor": 2}})


def test_the_outer_tying_wins() -> None:
    inner = text_config("hf") | {"tie_word_embeddings": True}
    wrapper = {"model_type": "qwen3_5", "text_config": inner}
    assert Qwen35Config.from_dict(wrapper).tie_word_embeddings
    assert not Qwen35Config.from_dict(wrapper | {"tie_word_embeddings": False}).tie_word_embeddings
