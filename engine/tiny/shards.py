"""Read and write the trained weights as a few bf16 safetensors files."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 15_500_000


def save_shards(weights: dict[str, Tensor], folder: Path) -> None:
    """Write ``weights-NN.safetensors`` files of at most 15.5 MB; ``A_log`` stays fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in sorted(weights.items()):
        kept = tensor.detach().float() if name.endswith("A_log") else tensor.detach().bfloat16()
        size = kept.numel() * kept.element_size()
        if size > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = kept.cpu().contiguous()
        room -= size
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"weights-{index:02}.safetensors")


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder's ``weights-*.safetensors`` as fp32."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        weights |= {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}
    if not weights:
        raise FileNotFoundError(f"no weights-*.safetensors in {folder}")
    return weights
