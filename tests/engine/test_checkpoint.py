"""Good checkpoints: every layout gives the same tensors, and they reach a module tree unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_flatten

from engine.checkpoint import Checkpoint, load_weights, planned_bytes, read_checkpoint
from engine.errors import CheckpointError
from engine.headers import read_floats, read_header
from engine.models.qwen3_5 import Qwen35Model
from tests.engine.tiny_checkpoints import (
    DENSE_MODULE,
    VARIANTS,
    base_weights,
    digest,
    quantize,
    reference,
    to_mlx,
    unpack,
    write_checkpoint,
    write_safetensors,
)

DENSE_VARIANTS = [variant for variant in VARIANTS if variant != "mlx_4bit"]


def module_for(checkpoint: Checkpoint, *, with_mtp: bool = True) -> Qwen35Model:
    return Qwen35Model(checkpoint.arch, with_mtp=with_mtp and checkpoint.has_mtp)


def parameters(module: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


@pytest.mark.parametrize("variant", ["hf", "hf_tied", "mlx_4bit"])
def test_generated_weights_are_those_of_the_references(variant: str) -> None:
    assert str(reference(variant)["digest"]) == digest(variant)


@pytest.mark.parametrize("variant", DENSE_VARIANTS)
def test_every_layout_gives_folded_mlx_tensors(tmp_path: Path, variant: str) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, variant))
    expected = to_mlx(base_weights(variant))
    assert checkpoint.tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.array(checkpoint.tensors[name]), value, err_msg=name)
    assert checkpoint.has_mtp
    assert checkpoint.family == "qwen3_5"
    assert checkpoint.text_config["hidden_size"] == 64


def test_notes_say_how_norms_were_read_and_where_the_head_came_from(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "mlx"))
    assert checkpoint.notes == (
        "MTP head read from mtp.safetensors",
        "trunk norms: folded, by statistics",
        "mtp norms: delta (+1 added), by statistics",
    )


@pytest.mark.parametrize(
    "name", ["mtp/weights.safetensors", "model-mtp.safetensors", "head.safetensors"]
)
@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", ""])
def test_sidecars_are_found_by_name_or_by_config(tmp_path: Path, name: str, prefix: str) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    (folder / "mtp.safetensors").unlink()
    head = {n: v for n, v in base_weights("mlx").items() if n.startswith("mtp.")}
    renamed = {prefix + n.removeprefix("mtp."): v for n, v in head.items()}
    write_safetensors(folder / name, renamed)
    if name == "head.safetensors":
        config = json.loads((folder / "config.json").read_text())
        config["mlx_lm_extra_tensors"] = {"mtp_file": name}
        (folder / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(folder)
    assert sum(n.startswith("mtp.") for n in checkpoint.tensors) == 15


def test_quantisation_is_resolved_per_module(tmp_path: Path) -> None:
    quantization = read_checkpoint(write_checkpoint(tmp_path, "mlx_4bit")).quantization
    assert str(quantization["model.embed_tokens"]) == "affine 8-bit, group 32"
    assert str(quantization["mtp.layers.0.mlp.up_proj"]) == "affine 4-bit, group 32"
    assert DENSE_MODULE not in quantization
    assert "mtp.fc" not in quantization


def test_packed_geometry_is_inferred_where_the_config_is_silent(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx_4bit")
    config = json.loads((folder / "config.json").read_text())
    expected = read_checkpoint(folder).quantization
    del config["quantization"], config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(folder).quantization == expected


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("affine", 3, 32), ("affine", 6, 32)],
)
def test_every_packing_mlx_has_is_loaded(
    tmp_path: Path, mode: str, bits: int, group: int, dequantize: bool
) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    tensors = base_weights("hf")
    dense = mx.array(tensors.pop("lm_head.weight"))
    packed = mx.quantize(dense, group_size=group, bits=bits, mode=mode)
    parts = ("weight", "scales", "biases")[: len(packed)]
    tensors |= {f"lm_head.{p}": np.array(a) for p, a in zip(parts, packed, strict=True)}
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = read_checkpoint(folder)
    assert str(checkpoint.quantization["lm_head"]) == f"{mode} {bits}-bit, group {group}"
    module = module_for(checkpoint)
    load_weights(module, checkpoint, dtype=mx.float32, dequantize=dequantize)
    expected = mx.dequantize(*packed, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    difference = mx.abs(module.lm_head(x) - x @ expected.T).max()
    assert float(difference) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_fills_the_module_exactly(tmp_path: Path, variant: str) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, variant))
    module = module_for(checkpoint)
    report = load_weights(module, checkpoint, dtype=mx.float32, dequantize=True)
    dense = to_mlx(base_weights(variant))
    packed, _ = quantize(dense) if variant == "mlx_4bit" else ({}, {})
    loaded = parameters(module)
    assert loaded.keys() == dense.keys()
    for name, value in dense.items():
        path = name.removesuffix(".weight")
        if f"{path}.scales" in packed:
            bits = 8 if path.endswith("embed_tokens") else 4
            parts = (packed[name], packed[f"{path}.scales"], packed[f"{path}.biases"])
            value = unpack(*parts, bits=bits)
            np.testing.assert_allclose(np.array(loaded[name]), value, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(np.array(loaded[name]), value, err_msg=name)
    assert report.parameters == sum(value.size for value in dense.values())
    assert report.weight_bytes == 4 * report.parameters
    assert report.quantization.endswith("dequantized at load") == (variant == "mlx_4bit")
    assert not checkpoint.tensors, "the loader must not hold sources beside what it made of them"


def test_packed_weights_can_stay_packed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx_4bit")
    kept, dense = (module_for(read_checkpoint(folder)) for _ in range(2))
    report = load_weights(kept, read_checkpoint(folder), dtype=mx.float32, dequantize=False)
    load_weights(dense, read_checkpoint(folder), dtype=mx.float32, dequantize=True)
    assert isinstance(kept.mtp.layers[0].mlp.up_proj, QuantizedLinear)
    assert isinstance(kept.mtp.fc, Linear)
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    up, same = kept.mtp.layers[0].mlp.up_proj(x), dense.mtp.layers[0].mlp.up_proj(x)
    assert float(mx.abs(up - same).max()) < 1e-4
    assert report.parameters == 239_688
    assert report.weight_bytes < 240_000
    assert report.quantization == (
        "affine 4-bit, group 32 (38 modules); affine 8-bit, group 32 (1 modules)"
    )


@pytest.mark.parametrize("dequantize", [True, False])
def test_half_precision_spares_what_the_recurrence_needs(tmp_path: Path, dequantize: bool) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "mlx_4bit"))
    module = module_for(checkpoint)
    load_weights(module, checkpoint, dtype=mx.bfloat16, dequantize=dequantize)
    for name, value in parameters(module).items():
        exact = name.endswith((".A_log", ".dt_bias"))
        allowed = {mx.float32} if exact else {mx.bfloat16, mx.uint32}
        assert value.dtype in allowed, name


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("variant", ["hf", "mlx_4bit"])
def test_bytes_are_known_before_loading(
    tmp_path: Path, variant: str, dequantize: bool, dtype: mx.Dtype
) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, variant))
    planned = planned_bytes(checkpoint, dtype=dtype, dequantize=dequantize)
    module = module_for(checkpoint)
    report = load_weights(module, checkpoint, dtype=dtype, dequantize=dequantize)
    assert planned == report.weight_bytes


def test_a_module_without_head_leaves_the_head_unloaded_and_says_so(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "hf"))
    module = module_for(checkpoint, with_mtp=False)
    report = load_weights(module, checkpoint, dtype=mx.float32, dequantize=True)
    assert report.notes == ("the checkpoint's MTP head was not loaded",)


def test_a_module_that_wants_more_or_other_tensors_is_refused(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "hf"))
    module = module_for(checkpoint)
    module.model.surplus = Linear(2, 2, bias=False)
    module.lm_head = Linear(64, 7, bias=False)
    with pytest.raises(CheckpointError, match=r"missing model\.surplus\.weight") as caught:
        load_weights(module, checkpoint, dtype=mx.float32, dequantize=True)
    assert "lm_head.weight is [160, 64], expected [7, 64]" in str(caught.value)


def test_headers_and_values_agree_with_mlx(tmp_path: Path) -> None:
    file = tmp_path / "mixed.safetensors"
    rng = np.random.default_rng(0)
    arrays = {
        "half": mx.array(rng.normal(size=(3, 5))).astype(mx.float16),
        "brain": mx.array(rng.normal(size=(7,))).astype(mx.bfloat16),
        "single": mx.array(rng.normal(size=(2, 2, 2))).astype(mx.float32),
        "words": mx.arange(6, dtype=mx.uint32),
    }
    mx.save_safetensors(str(file), arrays)
    header = read_header(file)
    assert {n: t.shape for n, t in header.items()} == {n: a.shape for n, a in arrays.items()}
    for name in ("half", "brain", "single"):
        wanted = np.array(arrays[name].astype(mx.float32))
        np.testing.assert_array_equal(read_floats(header[name]), wanted)
    with pytest.raises(CheckpointError, match="words is U32, not a float"):
        read_floats(header["words"])


@pytest.mark.parametrize("variant", ["mlx", "hf"])
def test_a_missing_head_means_depth_zero_not_an_error(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, variant)
    trunk = {n: v for n, v in base_weights(variant).items() if not n.startswith("mtp.")}
    (folder / "mtp.safetensors").unlink(missing_ok=True)
    write_safetensors(folder / "model.safetensors", trunk)
    checkpoint = read_checkpoint(folder)
    assert not checkpoint.has_mtp
    assert checkpoint.notes[-1].startswith("no MTP tensors although the config advertises a head")


def test_a_head_the_config_does_not_mention_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    config = json.loads((folder / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.has_mtp
    assert "does not mention a head" in checkpoint.notes[-1]


def test_a_tied_head_that_is_stored_anyway_is_dropped(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf_tied")
    tensors = base_weights("hf_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = read_checkpoint(folder)
    assert "lm_head.weight" not in checkpoint.tensors
    assert any("lm_head dropped" in note for note in checkpoint.notes)
