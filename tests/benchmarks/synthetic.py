"""A checkpoint with random weights and the geometry of a published model, for speed only.

    python -m tests.benchmarks.synthetic DIR [--geometry 4b] [--bits 4]

Written in MLX layout with packed weights (random bits, scales of about 0.02 · √3 / 7.5), so a model
of 2.4 GB takes seconds and no real weights. It says nothing about quality: its drafts agree with
nothing, so speed under speculation needs a scripted acceptance (`load_engine(scripted=…)`). One
tensor file per layer; the heads of both trunk and MTP are the tied embedding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

GROUP = 64

GEOMETRIES: dict[str, dict[str, Any]] = {
    # Text part of Qwen3.5-4B.
    "4b": {
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    # Small enough for a test of the script itself.
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def text_config(geometry: str) -> dict[str, Any]:
    """The `text_config` of a geometry."""
    return GEOMETRIES[geometry] | {
        "model_type": "qwen3_5_text",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, *, geometry: str = "4b", bits: int = 4) -> None:
    """Write config and tensors to `folder`, unless it holds a config already."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").exists():
        return
    text = text_config(geometry)
    mx.random.seed(0)
    where: dict[str, str] = {}
    for index, part in enumerate(_parts(text, bits)):
        name = f"model-{index + 1:05}.safetensors"
        tensors = {f"language_model.{key}": value for key, value in part.items()}
        mx.eval(list(tensors.values()))
        mx.save_safetensors(str(folder / name), tensors, metadata={"format": "mlx"})
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    quantization = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "text_config": text,
        "quantization": quantization,
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _parts(c: dict[str, Any], bits: int) -> Any:
    """Dictionaries of tensors, one per file."""
    hidden = c["hidden_size"]
    top = _packed("model.embed_tokens", c["vocab_size"], hidden, bits)
    yield top | _ones({"model.norm": hidden})
    for layer in range(c["num_hidden_layers"]):
        full = (layer + 1) % c["full_attention_interval"] == 0
        yield _layer(f"model.layers.{layer}", c, bits, full=full)
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    yield (
        _layer("mtp.layers.0", c, bits, full=True)
        | _ones(dict.fromkeys(norms, hidden))
        | _packed("mtp.fc", hidden, 2 * hidden, bits)
    )


def _layer(name: str, c: dict[str, Any], bits: int, *, full: bool) -> dict[str, Any]:
    hidden, wide = c["hidden_size"], c["intermediate_size"]
    norms = {f"{name}.input_layernorm": hidden, f"{name}.post_attention_layernorm": hidden}
    tensors = _ones(norms)
    tensors |= _attention(name, c, bits) if full else _recurrence(name, c, bits)
    for part, rows, columns in (
        ("gate_proj", wide, hidden),
        ("up_proj", wide, hidden),
        ("down_proj", hidden, wide),
    ):
        tensors |= _packed(f"{name}.mlp.{part}", rows, columns, bits)
    return tensors


def _attention(name: str, c: dict[str, Any], bits: int) -> dict[str, Any]:
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    prefix = f"{name}.self_attn"
    tensors = _ones({f"{prefix}.q_norm": dim, f"{prefix}.k_norm": dim})
    for part, rows, columns in (
        ("q_proj", 2 * heads * dim, c["hidden_size"]),
        ("k_proj", kv_heads * dim, c["hidden_size"]),
        ("v_proj", kv_heads * dim, c["hidden_size"]),
        ("o_proj", c["hidden_size"], heads * dim),
    ):
        tensors |= _packed(f"{prefix}.{part}", rows, columns, bits)
    return tensors


def _recurrence(name: str, c: dict[str, Any], bits: int) -> dict[str, Any]:
    import mlx.core as mx

    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    prefix = f"{name}.linear_attn"
    channels = 2 * keys + values
    tensors = _ones({f"{prefix}.norm": c["linear_value_head_dim"]}) | {
        f"{prefix}.A_log": mx.full((heads,), -4.0, mx.float32),
        f"{prefix}.dt_bias": mx.zeros((heads,), mx.bfloat16),
        f"{prefix}.conv1d.weight": _normal((channels, c["linear_conv_kernel_dim"], 1), 0.3),
    }
    for part, rows, columns in (
        ("in_proj_qkv", channels, c["hidden_size"]),
        ("in_proj_z", values, c["hidden_size"]),
        ("in_proj_b", heads, c["hidden_size"]),
        ("in_proj_a", heads, c["hidden_size"]),
        ("out_proj", c["hidden_size"], values),
    ):
        tensors |= _packed(f"{prefix}.{part}", rows, columns, bits)
    return tensors


def _packed(name: str, rows: int, columns: int, bits: int) -> dict[str, Any]:
    """A random affine-packed matrix whose entries have deviation 1/√columns."""
    import mlx.core as mx

    levels = 2**bits - 1
    scale = math.sqrt(12.0 / columns) / levels
    halves = [mx.random.randint(0, 1 << 16, (rows, columns * bits // 32)) for _ in range(2)]
    words = (halves[0].astype(mx.uint32) << 16) | halves[1].astype(mx.uint32)
    # No two rows alike: a little noise on the scales.
    scales = scale * (1.0 + 0.05 * mx.random.normal((rows, columns // GROUP)))
    return {
        f"{name}.weight": words,
        f"{name}.scales": scales.astype(mx.bfloat16),
        f"{name}.biases": (-scales * levels / 2).astype(mx.bfloat16),
    }


def _normal(shape: tuple[int, ...], deviation: float) -> Any:
    import mlx.core as mx

    return (deviation * mx.random.normal(shape)).astype(mx.bfloat16)


def _ones(names: dict[str, int]) -> dict[str, Any]:
    import mlx.core as mx

    return {f"{name}.weight": mx.ones((size,), mx.bfloat16) for name, size in names.items()}


def main(
    folder: Path,
    geometry: Annotated[str, typer.Option(help=", ".join(GEOMETRIES))] = "4b",
    bits: Annotated[int, typer.Option(help="Bits per weight: 4 or 8.")] = 4,
) -> None:
    """Write the checkpoint."""
    write_checkpoint(folder, geometry=geometry, bits=bits)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    typer.run(main)
