"""Tiny random checkpoints of the dense Qwen3.5 layout, written from a seed, with references.

    folder = write_checkpoint(tmp_path, "hf")      # config.json + safetensors in tmp_path / "hf"
    expected = reference("hf")                     # arrays computed by other people's code

Weights are made from the raw words of PCG64 by exact arithmetic, the same on every machine and
NumPy (whose normal distribution promises less), so only the reference outputs are committed:
`fixtures/<variant>.npz`, made by `make_fixtures.py`, each with the digest of its weights. The
recurrence is boosted (A_log near -4, convolution ×30): random tiny hybrids are otherwise nearly
blind to recurrent faults. Norms carry random deltas, so that a forgotten +1 is far outside any
tolerance.

Variants (all: 2 key / 4 value linear heads, 4 / 2 attention heads, an MTP head, float32):

- `hf`: Hugging Face layout, text config, one file, untied, head_dim 32 with 1/4 rotated.
- `hf_tied`: head_dim 16 with 1/2 rotated, wider linear keys, tied embedding, irregular
  `layer_types`.
- `hf_sharded`: wrapper config and prefixes (`model.language_model.`, `mtp.`), three shards with an
  index, vision tensors beside them; weights and references of `hf`.
- `mlx`: MLX layout (norms folded, convolutions moved), the head raw in a sidecar `mtp.safetensors`;
  weights and references of `hf`.
- `mlx_4bit`: MLX layout, 4-bit affine group 32 with two overrides: the embedding in 8 bits, one
  module dense (`false`); the MTP head is packed too, its `fc` dense.

`reference(variant)` holds float32 arrays unless said otherwise, T = 24 prompt tokens:

- `prompt` int32 [T]; `trunk_hidden` [T, H] after the final norm; `trunk_logits` [T, V].
- `next_token` int32 []: argmax of the last trunk logits.
- `mtp1_hidden` [T, H], `mtp1_logits` [T, V]: the head at slots 0…T-1, fed the trunk's hiddens and
  the prompt shifted left with `next_token` behind it. Hiddens are after `mtp.norm`.
- `mtp2_hidden`, `mtp3_hidden` [H], `mtp2_logits`, `mtp3_logits` [V]: slots T and T+1, each fed the
  head's previous hidden and draft. `drafts` int32 [3]: argmax at depths 1, 2, 3.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]

VARIANTS = ("hf", "hf_tied", "hf_sharded", "mlx", "mlx_4bit")
FIXTURES = Path(__file__).parent / "fixtures"
PROMPT_TOKENS = 24
GROUP = 32
DENSE_MODULE = "model.layers.1.linear_attn.in_proj_a"
"""The module `mlx_4bit` leaves dense by an explicit `false`."""

_SHARED = {"hf_sharded": "hf", "mlx": "hf"}
"""Variants that hold another's weights in another layout."""
_SEEDS = {"hf": 21, "hf_tied": 22, "mlx_4bit": 23}
_NORM_SUFFIXES = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
_DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8", "int32": "I32"}


def text_config(variant: str) -> dict[str, Any]:
    """The language model's config, as in a text-only repo."""
    tied = variant == "hf_tied"
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 160,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if tied else 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32 if tied else 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7 if not tied else 1e4,
            "partial_rotary_factor": 0.5 if tied else 0.25,
            # Sections of the multimodal rotation sum to half the rotated dimensions.
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    if tied:
        # Not the pattern of an interval: the list must be obeyed.
        linear, full = "linear_attention", "full_attention"
        config["layer_types"] = [linear, full, linear, linear, full]
        config["num_hidden_layers"] = 5
    else:
        config["full_attention_interval"] = 4
    return config


def base_weights(variant: str) -> Tensors:
    """Weights in Hugging Face's text layout (norms as deltas), float32: `model.…`, `mtp.…`."""
    variant = _SHARED.get(variant, variant)
    config = text_config(variant)
    rng = np.random.PCG64(_SEEDS[variant])
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head = 3 * _root(hidden)  # logits with a standard deviation near 3
    scale = head if config["tie_word_embeddings"] else 1.0
    tensors: Tensors = {"model.embed_tokens.weight": _normal(rng, (vocab, hidden), scale)}
    for i in range(config["num_hidden_layers"]):
        mixer = _attention if is_full(config, i) else _linear_attention
        tensors |= _prefixed(f"model.layers.{i}.", _block(rng, config) | mixer(rng, config))
    tensors["model.norm.weight"] = _delta(rng, hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _normal(rng, (vocab, hidden), head)
    tensors["mtp.fc.weight"] = _linear(rng, hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = _delta(rng, hidden)
    tensors |= _prefixed("mtp.layers.0.", _block(rng, config) | _attention(rng, config))
    return tensors


def is_full(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer is full attention."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "full_attention")
    return (layer + 1) % int(config["full_attention_interval"]) == 0


def write_checkpoint(directory: Path, variant: str) -> Path:
    """Write one variant into `directory / variant` (created) and return that folder."""
    folder = directory / variant
    folder.mkdir(parents=True)
    config, tensors = text_config(variant), base_weights(variant)
    if variant in ("hf", "hf_tied"):
        write_safetensors(folder / "model.safetensors", tensors)
    elif variant == "hf_sharded":
        config = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": config,
        }
        _write_shards(folder, _wrapped(tensors))
    elif variant == "mlx":
        trunk, head = _split(tensors)
        write_safetensors(folder / "model.safetensors", _mlx_names(to_mlx(trunk)))
        write_safetensors(folder / "mtp.safetensors", head)
    elif variant == "mlx_4bit":
        packed, block = quantize(to_mlx(tensors))
        config["quantization"] = config["quantization_config"] = block
        write_safetensors(folder / "model.safetensors", _mlx_names(packed))
    else:
        raise ValueError(f"unknown variant {variant!r}")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def reference(variant: str) -> dict[str, Array]:
    """Outputs to compare with; see the module's docstring for names and shapes."""
    name = _SHARED.get(variant, variant)
    with np.load(FIXTURES / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def prompt(variant: str) -> Array:
    """The variant's prompt, int32 [T]."""
    variant = _SHARED.get(variant, variant)
    words = np.random.PCG64(1000 + _SEEDS[variant]).random_raw(PROMPT_TOKENS)
    return (words % np.uint64(text_config(variant)["vocab_size"])).astype(np.int32)


def digest(variant: str) -> str:
    """SHA-256 of a variant's weights: tells a changed generator from a changed model."""
    total = hashlib.sha256()
    for name, value in base_weights(variant).items():
        total.update(name.encode())
        total.update(value.tobytes())
    return total.hexdigest()


def to_mlx(tensors: Tensors) -> Tensors:
    """Hugging Face → MLX: convolutions [C, 1, K] → [C, K, 1], zero-centred norms folded."""
    moved = {}
    for name, value in tensors.items():
        if name.endswith("conv1d.weight"):
            value = np.ascontiguousarray(np.moveaxis(value, 2, 1))
        elif is_delta(name):
            value = value + np.float32(1)
        moved[name] = value
    return moved


def is_delta(name: str) -> bool:
    """Whether Hugging Face stores this tensor as γ - 1."""
    final = ("model.norm.weight", "mtp.norm.weight")
    return name.endswith(_NORM_SUFFIXES) or name in final or ".pre_fc_norm_" in name


def quantize(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Affine 4-bit (embedding: 8-bit) packing in MLX's format, and the config block for it."""
    block: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    block["language_model.model.embed_tokens"] = {"group_size": GROUP, "bits": 8}
    block[f"language_model.{DENSE_MODULE}"] = False
    packed: Tensors = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim != 2 or module in (DENSE_MODULE, "mtp.fc"):
            packed[name] = value
            continue
        words, scales, biases = pack(value, bits=8 if module.endswith("embed_tokens") else 4)
        packed[name] = words
        packed[f"{module}.scales"], packed[f"{module}.biases"] = scales, biases
    return packed, block


def pack(weight: Array, *, bits: int) -> tuple[Array, Array, Array]:
    """[out, in] → words uint32 [out, in·bits/32], scales and biases float32 [out, in/32].

    Element j of a word sits at bit j·bits, lowest first (mx.quantize's documented order)."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    biases = groups.min(-1)
    scales = ((groups.max(-1) - biases) / np.float32(2**bits - 1)).astype(np.float32)
    codes = np.rint((groups - biases[..., None]) / scales[..., None]).astype(np.uint32)
    codes = codes.reshape(rows, columns * bits // 32, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(codes << shifts, axis=-1)
    return words.astype(np.uint32), scales, biases


def unpack(words: Array, scales: Array, biases: Array, *, bits: int) -> Array:
    """Inverse of `pack` up to quantisation: float32 [out, in]."""
    rows = words.shape[0]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    groups = codes.reshape(rows, -1, GROUP).astype(np.float32)
    dense = groups * scales[..., None] + biases[..., None]
    return dense.reshape(rows, -1)


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """Minimal writer, so that tests need no package the service does not."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, parts = 0, []
    for name, value in tensors.items():
        data = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": _DTYPES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def read_safetensors(file: Path) -> Tensors:
    """Everything `write_safetensors` wrote, for tests that change one thing."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {short: name for name, short in _DTYPES.items()}
    tensors: Tensors = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        values: Array = np.frombuffer(data[start:end], kinds[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def _write_shards(folder: Path, tensors: Tensors, count: int = 3) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = names[i::count]
        write_safetensors(folder / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _wrapped(tensors: Tensors) -> Tensors:
    """Names of a multimodal repo, with a vision tensor that a text engine must skip."""
    renamed = {
        f"model.language_{name}" if name.startswith("model.") else name: value
        for name, value in tensors.items()
    }
    renamed["model.visual.patch_embed.proj.weight"] = np.zeros((4, 3), np.float32)
    return renamed


def _mlx_names(tensors: Tensors) -> Tensors:
    return _prefixed("language_model.", tensors)


def _split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    head = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    return {name: value for name, value in tensors.items() if name not in head}, head


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: value for name, value in tensors.items()}


def _normal(rng: np.random.PCG64, shape: tuple[int, ...], scale: float) -> Array:
    """Nearly normal: the sum of four uniform 16-bit integers, exact until the last product."""
    words = rng.random_raw(math.prod(shape))
    sixteen = np.uint64(0xFFFF)
    total = sum((words >> np.uint64(16 * k)) & sixteen for k in range(4))
    centred = (np.asarray(total).astype(np.float64) - 2 * 0xFFFF) / 0x10000
    values: Array = (centred * (np.sqrt(3.0) * scale)).astype(np.float32)
    return values.reshape(shape)


def _root(size: int) -> float:
    """1/sqrt(size): both operations are correctly rounded everywhere, unlike a power."""
    return float(1.0 / np.sqrt(size))


def _linear(rng: np.random.PCG64, rows: int, columns: int) -> Array:
    return _normal(rng, (rows, columns), _root(columns))


def _delta(rng: np.random.PCG64, size: int) -> Array:
    return _normal(rng, (size,), 0.3)


def _block(rng: np.random.PCG64, config: Mapping[str, Any]) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "input_layernorm.weight": _delta(rng, hidden),
        "post_attention_layernorm.weight": _delta(rng, hidden),
        "mlp.gate_proj.weight": _linear(rng, inner, hidden),
        "mlp.up_proj.weight": _linear(rng, inner, hidden),
        "mlp.down_proj.weight": _linear(rng, hidden, inner),
    }


def _attention(rng: np.random.PCG64, config: Mapping[str, Any]) -> Tensors:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": _linear(rng, 2 * queries, hidden),
        "self_attn.k_proj.weight": _linear(rng, keys, hidden),
        "self_attn.v_proj.weight": _linear(rng, keys, hidden),
        "self_attn.o_proj.weight": _linear(rng, hidden, queries),
        "self_attn.q_norm.weight": _delta(rng, dim),
        "self_attn.k_norm.weight": _delta(rng, dim),
    }


def _linear_attention(rng: np.random.PCG64, config: Mapping[str, Any]) -> Tensors:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels, width = 2 * keys + values, config["linear_conv_kernel_dim"]
    return {
        "linear_attn.in_proj_qkv.weight": _linear(rng, channels, hidden),
        "linear_attn.in_proj_z.weight": _linear(rng, values, hidden),
        "linear_attn.in_proj_b.weight": _linear(rng, heads, hidden),
        "linear_attn.in_proj_a.weight": _linear(rng, heads, hidden),
        "linear_attn.conv1d.weight": _normal(rng, (channels, 1, width), 30 * 0.02),
        "linear_attn.A_log": (-4.0 + _normal(rng, (heads,), 0.3)).astype(np.float32),
        "linear_attn.dt_bias": _normal(rng, (heads,), 0.5),
        "linear_attn.norm.weight": (1.0 + _normal(rng, (config["linear_value_head_dim"],), 0.2)),
        "linear_attn.out_proj.weight": _linear(rng, hidden, values),
    }
