"""Broken checkpoints: each is an error that names the file, tensor or key at fault."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint import read_checkpoint
from engine.errors import CheckpointError, ConfigError, EngineError
from engine.headers import read_header
from tests.engine.tiny_checkpoints import (
    Tensors,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)

Change = Callable[[Tensors], Any]


def change_tensors(folder: Path, change: Change, file: str = "model.safetensors") -> None:
    tensors = read_safetensors(folder / file)
    change(tensors)
    write_safetensors(folder / file, tensors)


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def put(name: str, value: np.ndarray) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = value

    return change


def drop(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


FLOATS = np.zeros((2, 2), np.float32)
HEAD = "mtp.layers.0.self_attn.k_proj.weight"
TENSOR_FAULTS: dict[str, tuple[str, Change, str]] = {
    "missing": (
        "hf",
        drop("model.layers.2.mlp.up_proj.weight"),
        "missing model.layers.2.mlp.up_proj",
    ),
    "missing untied head": ("hf", drop("lm_head.weight"), "missing lm_head.weight"),
    "extra": ("hf", put("model.layers.0.mlp.bias", FLOATS), "unknown model.layers.0.mlp.bias"),
    "extra layer": ("hf", put("model.layers.9.input_layernorm.weight", FLOATS), "model.layers.9"),
    "foreign name": ("hf", put("transformer.wte", FLOATS), "unknown transformer.wte"),
    "partial head": (
        "hf",
        drop(HEAD, "mtp.fc.weight"),
        "incomplete MTP head, missing mtp.fc.weight",
    ),
    "second head": ("hf", put("mtp.layers.1.norm.weight", FLOATS), "unknown mtp.layers.1.norm"),
    "own embedding": ("hf", put("mtp.embed_tokens.weight", FLOATS), "unknown mtp.embed_tokens"),
    "shape": (
        "hf",
        put("mtp.fc.weight", np.zeros((64, 64), np.float32)),
        r"mtp.fc.weight is \[64, 64\], expected \[64, 128\]",
    ),
    "conv shape": (
        "hf",
        put("model.layers.0.linear_attn.conv1d.weight", np.zeros((128, 4), np.float32)),
        r"conv1d.weight is \[128, 4\], expected \[128, 1, 4\] or \[128, 4, 1\]",
    ),
    "half converted": (
        "hf",
        put("model.layers.0.linear_attn.conv1d.weight", np.ones((128, 4, 1), np.float32)),
        "half converted.*model.layers.1.linear_attn.conv1d.weight",
    ),
    "dtype": (
        "hf",
        put("model.norm.weight", np.zeros(64, np.int32)),
        "model.norm.weight is stored as I32, expected F32, BF16, F16",
    ),
    "scales lost": (
        "mlx_4bit",
        drop("language_model.model.layers.0.mlp.up_proj.scales"),
        "unknown model.layers.0.mlp.up_proj.biases",
    ),
    "overridden scales lost": (
        "mlx_4bit",
        drop("language_model.model.embed_tokens.scales"),
        "declared quantised but has no model.embed_tokens.scales",
    ),
    "biases lost": (
        "mlx_4bit",
        drop("language_model.mtp.layers.0.mlp.up_proj.biases"),
        "missing mtp.layers.0.mlp.up_proj.biases",
    ),
    "scales of another group": (
        "mlx_4bit",
        put("language_model.lm_head.scales", np.zeros((160, 3), np.float32)),
        "lm_head: weight U32 .* is no packing of",
    ),
    "scales of another height": (
        "mlx_4bit",
        put("language_model.lm_head.scales", np.zeros((16, 2), np.float32)),
        r"lm_head.scales is \[16, 2\], expected \[160, 2\]",
    ),
    "packed without scales": (
        "hf",
        put("lm_head.weight", np.zeros((160, 8), np.uint32)),
        r"lm_head.weight is \[160, 8\], expected \[160, 64\]",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensor_faults_are_named(tmp_path: Path, fault: str) -> None:
    variant, change, message = TENSOR_FAULTS[fault]
    folder = write_checkpoint(tmp_path, variant)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(folder)
    assert caught.value.tensors


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    change_tensors(folder, lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.1.")])
    with pytest.raises(CheckpointError, match="and 6 more") as caught:
        read_checkpoint(folder)
    assert len(caught.value.tensors) == 8


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    change_tensors(folder, put("model.language_model.norm.weight", np.zeros(64, np.float32)))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is there twice"):
        read_checkpoint(folder)


def test_head_both_embedded_and_beside(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    tensors = read_safetensors(folder / "model.safetensors")
    write_safetensors(folder / "mtp.safetensors", {"mtp.fc.weight": tensors["mtp.fc.weight"]})
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is there twice"):
        read_checkpoint(folder)


def test_two_sidecars(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    shutil.copy(folder / "mtp.safetensors", folder / "model-mtp.safetensors")
    with pytest.raises(CheckpointError, match="several MTP sidecars"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors", "..\\x"]
)
def test_named_files_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    shutil.copy(folder / "mtp.safetensors", tmp_path / "outside.safetensors")
    change_config(folder, lambda c: c.update(mlx_lm_extra_tensors={"mtp_file": name}))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["head.bin", "head.pt", 7, ""])
def test_sidecars_are_safetensors(tmp_path: Path, name: Any) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    change_config(folder, lambda c: c.update(mlx_lm_extra_tensors={"mtp_file": name}))
    with pytest.raises(CheckpointError, match="mtp_file"):
        read_checkpoint(folder)


def test_a_declared_sidecar_must_exist(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    change_config(folder, lambda c: c.update(mlx_lm_extra_tensors={"mtp_file": "a.safetensors"}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is missing"):
        read_checkpoint(folder)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"
INDEX_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "absent shard": (lambda f: (f / SHARD).unlink(), f"missing {SHARD}"),
    "absent index": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "index.json is missing",
    ),
    "broken index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "cannot be read",
    ),
    "empty index": (lambda f: change_index(f, dict.clear), "weight_map is missing or empty"),
    "unknown shard": (
        lambda f: change_index(f, lambda m: m.update(x="model-00004-of-00003.safetensors")),
        "missing model-00004-of-00003",
    ),
    "escaping shard": (
        lambda f: change_index(f, lambda m: m.update(x="../x.safetensors")),
        "leads out of the folder",
    ),
    "pickled shard": (
        lambda f: change_index(f, lambda m: m.update(x="x.bin")),
        "not a safetensors",
    ),
    "lost tensor": (lambda f: change_index(f, lambda m: m.update(lost=SHARD)), "are not: lost"),
    "unlisted tensor": (
        lambda f: change_index(f, lambda m: m.pop("mtp.fc.weight")),
        "does not place there: mtp.fc.weight",
    ),
    "surplus shard": (
        lambda f: shutil.copy(f / SHARD, f / "model-00004-of-00004.safetensors"),
        "model-00004-of-00004.safetensors: weights that .* does not know of",
    ),
    "single file beside the index": (
        lambda f: shutil.copy(f / SHARD, f / "model.safetensors"),
        "weights that .* does not know of",
    ),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_index_faults_are_named(tmp_path: Path, fault: str) -> None:
    change, message = INDEX_FAULTS[fault]
    folder = write_checkpoint(tmp_path, "hf_sharded")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "nowhere")
    folder = write_checkpoint(tmp_path, "hf")
    with pytest.raises(CheckpointError, match="a checkpoint is a folder"):
        read_checkpoint(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: pickles can run code"):
        read_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "head", [pickle.dumps({"weights": list(range(99))}), b"PK\x03\x04" + b"z" * 99]
)
def test_a_renamed_pickle_is_recognised(tmp_path: Path, head: bytes) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    (folder / "model.safetensors").write_bytes(head)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is a pickle"):
        read_checkpoint(folder)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_no_damage_to_a_file_gets_past_the_header(tmp_path: Path, data: st.DataObject) -> None:
    """Truncation anywhere is an error; a changed byte is an error or changes nothing but values,
    names or types, which later checks see."""
    file = tmp_path / "whole.safetensors"
    arrays: Tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, np.float16),
    }
    write_safetensors(file, arrays)
    whole = file.read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError, match=r"damaged\.safetensors: truncated"):
        read_header(damaged)
    position = data.draw(st.integers(0, len(whole) - 32 - 1))
    flipped = bytearray(whole)
    flipped[position] ^= data.draw(st.integers(1, 255))
    damaged.write_bytes(bytes(flipped))
    try:
        tensors = read_header(damaged)
    except CheckpointError:
        return
    assert all(t.offset + t.nbytes <= len(whole) for t in tensors.values())


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        # These two end where the file does, one by overlap, one across a gap.
        b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
        b' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},'
        b' "c": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}',
        b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_forged_headers(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "forged.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"forged\.safetensors"):
        read_header(file)


QUANTIZATION_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "override contradicts shapes": (
        lambda c: c["quantization"].update({"model.layers.0.mlp.up_proj": {"bits": 8}}),
        "declared affine 8-bit, group 32, its shapes say affine 4-bit, group 32",
    ),
    "declared dense": (
        lambda c: c["quantization"].update({"mtp.layers.0.mlp.up_proj": False}),
        r"declared dense \(false\) but has mtp.layers.0.mlp.up_proj.scales",
    ),
    "declared packed": (
        lambda c: c["quantization"].update({"mtp.fc": {"bits": 4, "group_size": 32}}),
        "declared quantised but has no mtp.fc.scales",
    ),
    "not an object": (lambda c: c.update(quantization="q4"), "must be an object"),
}


@pytest.mark.parametrize("fault", QUANTIZATION_FAULTS)
def test_contradictory_quantisation(tmp_path: Path, fault: str) -> None:
    change, message = QUANTIZATION_FAULTS[fault]
    folder = write_checkpoint(tmp_path, "mlx_4bit")
    change_config(folder, change)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_other_quantisers_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    change_config(folder, lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(CheckpointError, match=r"quant_method 'fp8'.*mlx_lm\.convert"):
        read_checkpoint(folder)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llama", None, 3])
def test_other_families_are_refused_with_the_list(tmp_path: Path, model_type: Any) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    change_config(folder, lambda c: c.update(model_type=model_type))
    with pytest.raises(CheckpointError, match="supported: qwen3_5, qwen3_5_text"):
        read_checkpoint(folder)


def test_every_fault_is_an_engine_error() -> None:
    assert issubclass(CheckpointError, EngineError)
    assert issubclass(ConfigError, EngineError)
