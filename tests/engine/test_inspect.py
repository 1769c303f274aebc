"""Inspection: right about good folders, and still informative about broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.contract import NO_DRAFTS, QWEN3_5, mtp_backend, validate_structure
from engine.inspect import inspect_model
from engine.layouts import mtp_schema
from engine.models.qwen3_5_config import Qwen35Config
from tests.engine.tiny_checkpoints import (
    VARIANTS,
    base_weights,
    text_config,
    write_checkpoint,
    write_safetensors,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_good_folder_is_runnable(tmp_path: Path, variant: str) -> None:
    facts = inspect_model(write_checkpoint(tmp_path, variant))
    weights = base_weights(variant)
    assert facts.runnable
    assert facts.reason == "complete checkpoint with an MTP head"
    assert facts.family == "qwen3_5"
    assert facts.parameters == sum(value.size for value in weights.values())
    assert facts.mtp_parameters == sum(v.size for n, v in weights.items() if "mtp." in n)
    assert len(facts.mtp_found) == 15
    assert facts.mtp_missing == ()
    assert facts.mtp_advertised == 1
    assert facts.max_depth == facts.backend.max_depth == 8
    assert facts.tied == (variant == "hf_tied")
    assert facts.context_length == 4096
    # Keys and values of 1 or 2 heads × 32 floats, in every full-attention layer and the head.
    heads = 1 if variant == "hf_tied" else 2
    assert facts.token_bytes == (facts.full_attention_layers + 1) * 2 * heads * 32 * 4
    if variant != "hf_tied":
        # Three linear layers: 4 × 16 × 16 memory, 3 rows of 128 channels; a hidden of 64.
        assert facts.boundary_bytes == 3 * (4 * 16 * 16 + 3 * 128) * 4 + 64 * 4
    assert facts.row_bytes == facts.boundary_bytes + 9 * 64 * 4
    if variant == "hf_tied":
        assert (facts.layers, facts.linear_layers, facts.full_attention_layers) == (5, 3, 2)
    if variant == "mlx_4bit":
        assert facts.quantization.startswith("affine 4-bit, group 32 (38 modules)")
        assert facts.stored_dtypes == ("F32", "U32")
        assert facts.bytes_on_disk < facts.parameters
    else:
        assert facts.quantization == "none"
        assert facts.bytes_on_disk == 4 * facts.parameters
        assert facts.trunk_norms.startswith("folded" if variant == "mlx" else "delta")


def test_text_files_are_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    assert not inspect_model(folder).tokenizer
    (folder / "tokenizer.json").write_text("{}")
    config = folder / "tokenizer_config.json"
    config.write_text("not json")
    facts = inspect_model(folder)
    assert facts.tokenizer
    assert not facts.chat_template
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert inspect_model(folder).chat_template
    config.unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_model(folder).chat_template


def test_a_folder_without_head_runs_at_depth_zero_and_says_why(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    (folder / "mtp.safetensors").unlink()
    facts = inspect_model(folder)
    assert facts.runnable
    assert "decoding runs at depth 0" in facts.reason
    assert facts.backend == NO_DRAFTS
    assert facts.max_depth == facts.mtp_parameters == 0
    assert facts.mtp_found == facts.mtp_missing == ()


def test_a_broken_head_is_reported_with_everything_else(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    tensors = base_weights("hf")
    del tensors["mtp.norm.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    facts = inspect_model(folder)
    assert not facts.runnable
    assert "incomplete MTP head, missing mtp.norm.weight" in facts.reason
    assert facts.mtp_missing == ("mtp.norm.weight",)
    assert facts.layers == 4
    assert facts.bytes_on_disk > 0


def test_an_unknown_family_still_has_a_size(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    facts = inspect_model(folder)
    assert not facts.runnable
    assert facts.model_type == "llama"
    assert facts.bytes_on_disk > 0
    assert "not supported; supported: qwen3_5" in facts.reason


def test_no_folder(tmp_path: Path) -> None:
    facts = inspect_model(tmp_path / "nowhere")
    assert not facts.runnable
    assert "does not exist" in facts.reason


def test_inspection_and_blas_need_no_mlx() -> None:
    """OpenBLAS must be loaded before MLX, so what runs first may not import it."""
    code = (
        "import sys; import engine.blas, engine.inspect, engine.budget, engine.config;"
        "sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_structure_tells_absent_broken_and_further_heads_apart() -> None:
    arch = Qwen35Config.from_dict(text_config("hf"))
    names = list(mtp_schema(arch))
    assert validate_structure(names, arch).complete
    assert validate_structure([*names, "mtp.fc.scales", "model.norm.weight"], arch).complete
    assert validate_structure(["model.norm.weight"], arch).absent
    broken = validate_structure(names[1:], arch)
    assert (broken.missing, broken.complete, broken.absent) == (("mtp.fc.weight",), False, False)
    further = validate_structure([*names, "mtp.layers.1.norm.weight"], arch)
    assert further.unknown == ("mtp.layers.1.norm.weight",)
    assert not further.complete


def test_depth_zero_is_no_backend() -> None:
    assert mtp_backend(QWEN3_5, 0) is NO_DRAFTS
    assert "model.embed_tokens" in mtp_backend(QWEN3_5, 3).shares
