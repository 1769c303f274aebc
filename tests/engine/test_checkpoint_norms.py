"""Norm conventions: whatever mixture of γ and γ - 1 a folder holds, γ comes out, or a note says why
it may not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import norms
from engine.checkpoint import read_checkpoint
from tests.engine.tiny_checkpoints import (
    Tensors,
    base_weights,
    is_delta,
    read_safetensors,
    to_mlx,
    write_checkpoint,
    write_safetensors,
)


def shift(folder: Path, amount: float, part: Callable[[str], bool], file: str) -> None:
    """Add to the zero-centred norms of a part, as a careless converter would."""
    tensors: Tensors = read_safetensors(folder / file)
    for name, value in tensors.items():
        canonical = name.removeprefix("language_model.")
        if is_delta(canonical) and part(canonical):
            tensors[name] = value + np.float32(amount)
    write_safetensors(folder / file, tensors)


def is_head(name: str) -> bool:
    return name.startswith("mtp.")


def is_trunk(name: str) -> bool:
    return not is_head(name)


def declare(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("variant", "part", "amount", "file"),
    [
        ("hf", is_head, 1, "model.safetensors"),
        ("hf", is_trunk, 1, "model.safetensors"),
        ("mlx", is_trunk, -1, "model.safetensors"),
        ("mlx", is_head, 1, "mtp.safetensors"),
    ],
)
def test_mixed_conventions_come_out_folded(
    tmp_path: Path, variant: str, part: Callable[[str], bool], amount: float, file: str
) -> None:
    folder = write_checkpoint(tmp_path, variant)
    shift(folder, amount, part, file)
    checkpoint = read_checkpoint(folder)
    for name, value in to_mlx(base_weights(variant)).items():
        if is_delta(name):
            loaded = np.array(checkpoint.tensors[name])
            np.testing.assert_allclose(loaded, value, atol=1e-6, err_msg=name)
    unusual = [note for note in checkpoint.notes if "unusual" in note]
    assert bool(unusual) == (part is is_trunk), "a trunk at odds with its own layout is reported"


def test_norms_added_twice_are_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    shift(folder, 1, is_trunk, "model.safetensors")
    notes = read_checkpoint(folder).notes
    assert any(note.startswith("trunk norms: every input_layernorm") for note in notes)


@pytest.mark.parametrize(
    ("keys", "delta"),
    [
        ({"mtplx_mtp_quantization": {"norm_encoding": "mlx_delta"}}, True),
        ({"mtp_norm_encoding": "Delta"}, True),
        ({"mtp_norm_encoding": "absolute"}, False),
    ],
)
def test_a_declaration_is_obeyed_and_contradiction_reported(
    tmp_path: Path, keys: dict[str, Any], delta: bool
) -> None:
    folder = write_checkpoint(tmp_path, "mlx")  # its head is raw: deltas
    declare(folder, **keys)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.verdicts["mtp"].delta is delta
    assert checkpoint.verdicts["mtp"].why.startswith("declared")
    contradicted = [note for note in checkpoint.notes if "the weights look delta" in note]
    assert bool(contradicted) is not delta


def test_an_unknown_declaration_is_reported_and_ignored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    declare(folder, mtp_norm_encoding="zigzag")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.verdicts["mtp"].delta
    assert "mtp norms: unknown declaration 'zigzag' ignored" in checkpoint.notes


@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_beside_the_head_declares_its_norms(tmp_path: Path, version: int) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    (folder / "mtp").mkdir()
    (folder / "mtp.safetensors").rename(folder / "mtp" / "weights.safetensors")
    manifest = {"artifact_schema_version": version, "rmsnorm_weight_format": "mlx_gamma"}
    (folder / "mtp" / "manifest.json").write_text(json.dumps(manifest))
    verdict = read_checkpoint(folder).verdicts["mtp"]
    assert (verdict.delta, verdict.why) == (
        (False, "declared 'mlx_gamma'") if version == 1 else (True, "statistics")
    )


def published(q: float, k: float, low: float, negative: float) -> dict[str, np.ndarray]:
    """A head with given means and share of negative input_layernorm entries."""
    values = np.full(1000, low, np.float32)
    count = int(1000 * negative)
    values[:count] = -0.05
    values[count:] += (low - values.mean()) * 1000 / (1000 - count)
    head = "mtp.layers.0."
    return {
        f"{head}input_layernorm.weight": values,
        f"{head}post_attention_layernorm.weight": np.full(10, low + 0.1, np.float32),
        f"{head}self_attn.q_norm.weight": np.full(10, q, np.float32),
        f"{head}self_attn.k_norm.weight": np.full(10, k, np.float32),
        "mtp.norm.weight": np.full(10, 2.4, np.float32),
    }


@pytest.mark.parametrize(
    ("head", "delta"),
    [
        (published(0.73, 0.75, 0.35, 0.4), True),
        (published(1.73, 1.75, 0.87, 0.0), False),
        (published(1.74, 1.73, 1.35, 0.0), False),
        (published(1.0, 1.0, 0.87, 0.0), False),
    ],
)
def test_verdict_on_published_figures(head: dict[str, np.ndarray], delta: bool) -> None:
    """Means measured by MTPLX on real heads, sign shares by mlx-serve."""
    for raw_layout in (True, False):
        verdict = norms.decide("mtp", head, declared=None, raw_layout=raw_layout)
        assert (verdict.delta, verdict.why) == (delta, "statistics")


@pytest.mark.parametrize("raw_layout", [True, False])
def test_undecided_statistics_fall_back_on_the_layout(raw_layout: bool) -> None:
    untrained = {"mtp.layers.0.input_layernorm.weight": np.zeros(8, np.float32)}
    verdict = norms.decide("mtp", untrained, declared=None, raw_layout=raw_layout)
    assert verdict.delta is raw_layout
    assert verdict.doubts == ("statistics disagree: means say delta, signs folded",)
