"""Boundaries on disk: another process goes on bit for bit; anything foreign is refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import boundary_file
from engine.boundary_file import KEY, fingerprint, sealed
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import ForeignFileError, SavedPrefix, page_array
from tests import checkout
from tests.engine.host import Bits, Host, Point, bits, sampled
from tests.engine.small import engine_over, small_model

SPLIT = 13
DEPTH = 3
HEAD = [(7 * i + 3) % 96 for i in range(SPLIT)]
TAIL = [5, 6, 7]


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def exported(model: Qwen35Model, folder: Path, **options: Any) -> Path:
    """A file of a turn's beginning, written by an engine that goes on."""
    host = Host(engine_over(model, boundaries=2))
    host.start(1, [*HEAD, 90, 91], sampled(5, 4, **options), saves={SPLIT: 1})
    host.finish(1, depth=DEPTH)
    path = folder / "turn"
    host.engine.export_boundary(1, saved(**options), page_array(host.points[1].pages), path)
    return path


def saved(speculative: bool = True) -> SavedPrefix:
    return SavedPrefix(tokens=tuple(HEAD), mtp=speculative, metadata={"session": "ä 1"})


def continued(model: Qwen35Model, path: Path, page_size: int = 8) -> Bits:
    """A row from an imported file, in an engine that has decoded other things before."""
    host = Host(engine_over(model, boundaries=3, page_size=page_size))
    host.start(7, list(range(40)), sampled(6, 9))
    host.finish(7, depth=1)
    pages = host._take(-(-SPLIT // page_size) + 1)
    host.engine.import_boundary(5, page_array(pages), path)
    host.points[5] = Point(HEAD, pages)
    host.start(8, HEAD + TAIL, sampled(9, 4), restore=5)
    host.drop(5)
    host.finish(8, depth=DEPTH)
    return bits(host, 8)


def alone(model: Qwen35Model) -> Bits:
    host = Host(engine_over(model, boundaries=1))
    host.start(1, HEAD + TAIL, sampled(9, 4))
    host.finish(1, depth=DEPTH)
    return bits(host, 1)


@pytest.mark.parametrize("page_size", [8, 4, 16])
def test_an_imported_prefix_is_continued_bit_for_bit(
    model: Qwen35Model, tmp_path: Path, page_size: int
) -> None:
    path = exported(model, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["turn"]
    assert continued(model, path, page_size).same(alone(model))


CHILD = """
import sys
from pathlib import Path
import numpy as np
from tests.engine.small import small_model
from tests.engine.test_boundary_file import continued
found = continued(small_model(), Path(sys.argv[1]))
np.savez(sys.argv[2], **{name: getattr(found, name) for name in found.__dataclass_fields__})
"""


def test_another_process_goes_on_bit_for_bit(model: Qwen35Model, tmp_path: Path) -> None:
    path, out = exported(model, tmp_path), tmp_path / "found.npz"
    subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(out)], check=True, cwd=checkout.ROOT
    )
    with np.load(out) as file:
        lists = {name: file[name].tolist() for name in ("tokens", "drafted", "accepted")}
        found = Bits(**lists, logits=file["logits"], mtp=file["mtp"])
    assert found.same(alone(model))


def test_a_file_says_what_it_holds(model: Qwen35Model, tmp_path: Path) -> None:
    engine = engine_over(model, boundaries=1)
    assert engine.read_boundary(exported(model, tmp_path)) == saved()


def test_a_prefix_without_history_stays_without(model: Qwen35Model, tmp_path: Path) -> None:
    path = exported(model, tmp_path, speculative=False)
    engine = engine_over(model, boundaries=1)
    assert not engine.read_boundary(path).mtp
    engine.import_boundary(1, page_array([4, 9]), path)
    assert engine._boundaries.facts() == {1: (SPLIT, False)}
    assert engine._boundaries[1].nbytes == model_bytes(model)
    host = Host(engine)
    host.points[1] = Point(HEAD, [4, 9])
    host._free = host._free[:-20]
    host.start(1, HEAD + TAIL, sampled(9, 4, speculative=False), restore=1)
    host.finish(1, depth=0)
    other = Host(engine_over(model))
    other.start(1, HEAD + TAIL, sampled(9, 4, speculative=False))
    other.finish(1, depth=0)
    assert host.tokens[1] == other.tokens[1]


def model_bytes(model: Qwen35Model) -> int:
    states = sum(s.conv.nbytes + s.memory.nbytes for s in model.zero_states(1))
    return states + 4 * model.config.hidden_size


# --- refusals ------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change tensors and manifest of a file."""
    loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    tensors, metadata = loaded
    manifest = json.loads(metadata[KEY])
    mx.eval(tensors)
    change(tensors, manifest)
    with path.open("wb") as handle:
        mx.save_safetensors(handle, tensors, {KEY: json.dumps(sealed(manifest))})


def _set(name: str, value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, manifest: manifest.update({name: value})


def _without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], manifest: dict[str, Any]) -> None:
        del tensors[name]

    return change


def _with(name: str, value: mx.array) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, manifest: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", 99), "format version 99, this engine reads 1"),
        (_set("fingerprint", "0" * 64), "of another model"),
        (_set("tokens", []), "names no tokens"),
        (_set("tokens", HEAD[1:]), r"keys\.0 is .*13.*expected .*12"),
        (_set("mtp", "yes"), "does not say whether MTP history"),
        (_set("mtp", False), r"unknown tensor carry"),
        (_set("metadata", {"a": 1}), "must be strings"),
        (_without("memory.1"), r"tensor memory\.1 is missing"),
        (_without("values.mtp"), r"tensor values\.mtp is missing"),
        (_with("more", mx.zeros((2,))), "unknown tensor more"),
        (_with("conv.0", mx.zeros((1, 3, 4))), r"conv\.0 is .*\(1, 3, 4\)"),
        (_with("carry", mx.zeros((1, 1, 64), mx.float16)), "carry is .*F16.*expected .*F32"),
    ],
)
def test_a_foreign_file_is_refused_and_changes_nothing(
    model: Qwen35Model,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
    message: str,
) -> None:
    path = exported(model, tmp_path)
    rewritten(path, change)
    refused(model, path, message)


def refused(model: Qwen35Model, path: Path, message: str, *, by_reading: bool = True) -> None:
    engine = engine_over(model, boundaries=1)
    if by_reading:
        with pytest.raises(ForeignFileError, match=message):
            engine.read_boundary(path)
    with pytest.raises(ForeignFileError, match=message):
        engine.import_boundary(1, page_array([1, 2]), path)
    assert len(engine._boundaries) == 0
    assert all(mx.abs(pool.keys).sum().item() == 0 for pool in engine._pools)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(model: Qwen35Model, tmp_path: Path, kept: float) -> None:
    path = exported(model, tmp_path)
    whole = path.read_bytes()
    count = int(len(whole) * kept) if isinstance(kept, float) else kept
    path.write_bytes(whole[:count])
    refused(model, path, "truncated")


def test_a_flipped_bit_is_refused(model: Qwen35Model, tmp_path: Path) -> None:
    path = exported(model, tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    refused(model, path, "damaged: its data is not what was written", by_reading=False)


def test_another_token_in_the_header_is_refused(model: Qwen35Model, tmp_path: Path) -> None:
    path = exported(model, tmp_path)
    whole = path.read_bytes()
    assert whole.count(b"[3, 10, 17") == 1
    path.write_bytes(whole.replace(b"[3, 10, 17", b"[3, 10, 18"))
    refused(model, path, "damaged: its manifest is not what was written")


def test_other_files_are_refused(model: Qwen35Model, tmp_path: Path) -> None:
    path = tmp_path / "x"
    refused(model, path, "cannot be read: No such file")
    path.write_bytes(b"PK\x03\x04" * 10)
    refused(model, path, "pickle")
    text = b"{}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(model, path, "it has no manifest")


def test_another_models_file_is_refused(model: Qwen35Model, tmp_path: Path) -> None:
    path = exported(small_model(1), tmp_path)
    refused(model, path, "of another model")


def test_a_fingerprint_depends_on_every_weight(model: Qwen35Model) -> None:
    other = small_model()
    assert fingerprint(other) == fingerprint(model)
    other.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-3
    assert fingerprint(other) != fingerprint(model)


def test_an_engine_that_does_not_draft_refuses_history(model: Qwen35Model, tmp_path: Path) -> None:
    path = exported(model, tmp_path)
    engine = engine_over(model, boundaries=1)
    files = engine._files()
    plain = boundary_file.BoundaryFiles(
        fingerprint=files.fingerprint, model=model, pools=files.pools, mtp_pool=None
    )
    with pytest.raises(ForeignFileError, match="this engine does not draft"):
        plain.read(path)


def test_what_cannot_be_written_leaves_nothing(
    model: Qwen35Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        exported(model, tmp_path / "nowhere")
    path = exported(model, tmp_path)
    before = path.read_bytes()

    def full(handle: Any, tensors: object, metadata: object) -> None:
        handle.write(b"part of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        exported(model, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["turn"]
    assert path.read_bytes() == before


def test_calls_are_checked(model: Qwen35Model, tmp_path: Path) -> None:
    host = Host(engine_over(model, boundaries=1))
    host.start(1, [*HEAD, 1], sampled(4, 1), saves={SPLIT: 1})
    pages, path = page_array(host.points[1].pages), tmp_path / "x"
    engine = host.engine
    with pytest.raises(ValueError, match="boundary 3 is unknown"):
        engine.export_boundary(3, saved(), pages, path)
    with pytest.raises(ValueError, match="boundary 1 is at 13 with mtp=True"):
        engine.export_boundary(1, saved(speculative=False), pages, path)
    with pytest.raises(ValueError, match="does not cover 13 positions"):
        engine.export_boundary(1, saved(), pages[:1], path)
    engine.export_boundary(1, saved(), pages, path)
    with pytest.raises(ValueError, match="boundary 1 exists already"):
        engine.import_boundary(1, page_array([30, 31]), path)
    with pytest.raises(ValueError, match="2 boundaries, the engine holds 1"):
        engine.import_boundary(2, page_array([30, 31]), path)
    with pytest.raises(ValueError, match="does not cover 13 positions"):
        engine_over(model, boundaries=1).import_boundary(2, page_array([30]), path)
