"""Write trained weights as an MLX checkpoint: names, layouts, quantisation, ``config.json``.

``python export.py --weights W --to MODEL`` needs ``mlx``. Every tensor goes below
``language_model.``. RMSNorm weights are absolute in training and stay so (the "+1 folded" form, in
trunk and MTP layer alike). Linear maps get 6-bit affine groups of 64, the shared embedding 8 bits;
``mtp.fc``, the four-row ``in_proj_a`` and ``in_proj_b``, convolutions and norms stay bf16,
``A_log`` fp32.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

GROUP: Final = 64
BITS: Final = 6
EMBEDDING_BITS: Final = 8
SHARD_BYTES: Final = 15_000_000
EMBEDDING: Final = "language_model.model.embed_tokens"
DENSE: Final = ("mtp.fc", "in_proj_a", "in_proj_b", "conv1d")


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Return every tensor of the training output, under its training name."""
    weights: dict[str, mx.array] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        loaded = mx.load(str(path))
        if not isinstance(loaded, dict):
            raise TypeError(f"{path} is not a safetensors file")
        weights |= loaded
    return weights


def converted(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the checkpoint's tensors under their MLX names, quantised where they should be."""
    tensors: dict[str, mx.array] = {}
    for name, value in weights.items():
        path = f"language_model.{name}"
        module = path.removesuffix(".weight")
        if name.endswith("conv1d.weight"):
            value = value.moveaxis(2, 1)
        if name.endswith("A_log"):
            tensors[path] = value.astype(mx.float32)
        elif value.ndim != 2 or module.endswith(DENSE):
            tensors[path] = value.astype(mx.bfloat16)
        else:
            bits = EMBEDDING_BITS if module == EMBEDDING else BITS
            packed, scales, biases = mx.quantize(value, group_size=GROUP, bits=bits)
            tensors |= {path: packed, f"{module}.scales": scales, f"{module}.biases": biases}
    return tensors


def shards_of(tensors: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    """Split tensors, in name order, into groups of at most ``SHARD_BYTES``."""
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name in sorted(tensors):
        if size + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].nbytes
    return shards


def config_of(shape: dict[str, Any], end_ids: list[int]) -> dict[str, Any]:
    """Return ``config.json`` for the training shape's ``text_config``."""
    quantization = {
        "group_size": GROUP,
        "bits": BITS,
        "mode": "affine",
        EMBEDDING: {"group_size": GROUP, "bits": EMBEDDING_BITS, "mode": "affine"},
        "language_model.mtp.fc": False,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "eos_token_id": end_ids,
        "tie_word_embeddings": True,
        "text_config": shape | {"dtype": "bfloat16", "eos_token_id": end_ids},
        "quantization": quantization,
        "quantization_config": quantization,
    }


def write_shards(tensors: dict[str, mx.array], target: Path) -> None:
    """Write ``model-N-of-M.safetensors`` and their index, replacing earlier ones."""
    for old in target.glob("model*.safetensors"):
        old.unlink()
    shards = shards_of(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        mx.save_safetensors(str(target / name), shard, metadata={"format": "mlx"})
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(target / "model.safetensors.index.json", index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--shape", type=Path, required=True, help="text_config written by train.py")
    parser.add_argument("--to", type=Path, required=True, help="folder that has the tokenizer")
    options = parser.parse_args()
    generation = json.loads((options.to / "generation_config.json").read_text(encoding="utf-8"))
    shape = json.loads(options.shape.read_text(encoding="utf-8"))
    write_shards(converted(read_weights(options.weights)), options.to)
    write_json(options.to / "config.json", config_of(shape, generation["eos_token_id"]))


if __name__ == "__main__":
    main()
