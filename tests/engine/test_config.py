"""Settings are checked by name and limit; the BLAS is loaded before MLX or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import blas
from engine.blas import Blas, describe_blas, prepare_blas
from engine.config import EngineConfig
from engine.errors import ConfigError

MODEL = Path("model")


def test_defaults_are_valid() -> None:
    EngineConfig(model=MODEL).validate()


@pytest.mark.parametrize(
    ("changes", "field", "limit"),
    [
        ({"model": "model"}, "model", "must be a Path"),
        ({"dtype": "int8"}, "dtype", "one of auto, float32, bfloat16, float16, not 'int8'"),
        ({"blas": "mkl"}, "blas", "one of auto, reference"),
        ({"weights": None}, "weights", "one of auto, keep, dequantize"),
        ({"mtp_gate": "on"}, "mtp_gate", "one of auto, off"),
        ({"max_rows": 0}, "max_rows", "in 1…256, not 0"),
        ({"max_rows": 257}, "max_rows", "in 1…256"),
        ({"max_rows": True}, "max_rows", "an integer"),
        ({"page_size": 12}, "page_size", "a power of two"),
        ({"page_size": 512}, "page_size", "in 1…256"),
        ({"max_depth": 9}, "max_depth", "in 0…8"),
        ({"max_depth": -1}, "max_depth", "in 0…8"),
        ({"prefill_chunk": 0}, "prefill_chunk", "in 1…8192"),
        ({"kv_memory": 0}, "kv_memory", "at least 1, not 0"),
        ({"kv_memory": 1e9}, "kv_memory", "an integer"),
        ({"context": 1}, "context", "at least 2"),
        ({"prefix_memory": -1}, "prefix_memory", "at least 0, not -1"),
        ({"deterministic": 1}, "deterministic", "true or false, not 1"),
    ],
)
def test_every_limit_is_named(changes: dict[str, Any], field: str, limit: str) -> None:
    settings: dict[str, Any] = {"model": MODEL} | changes
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings).validate()
    assert caught.value.field == field
    assert limit in caught.value.limit


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_openblas_is_what_global_symbols_resolve_to() -> None:
    code = """
import ctypes
from engine.blas import prepare_blas
found = prepare_blas("auto")
again = prepare_blas("reference")
import mlx.core as mx
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
print(found.name); print(again.name); print(again.note)
print(hasattr(ctypes.CDLL(None), "openblas_get_config"))
"""
    name, again, note, is_global = run(code).splitlines()
    if name == "mlx reference":
        pytest.skip("no OpenBLAS on this machine")
    assert name.startswith("openblas ")
    assert "(libopenblas" in name
    assert again == name
    assert "has no effect" in note
    assert is_global == "True"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_after_mlx_it_is_too_late_and_said_so() -> None:
    code = "import mlx.core\nfrom engine.blas import prepare_blas\nprint(prepare_blas('auto'))"
    assert "imported before OpenBLAS" in run(code)
    code = code.replace("'auto'", "'reference'")
    assert run(code) == "Blas(name='mlx reference', note=None)"


def test_a_missing_library_is_a_note_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_loaded", None)
    monkeypatch.setattr(blas, "_CANDIDATES", ("libnothing.so.0", "libc.so.6"))
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    found = prepare_blas("auto")
    assert found.name == "mlx reference"
    assert "no OpenBLAS found" in (found.note or "")
    monkeypatch.setattr(blas, "_has_cuda_build", lambda: True)
    assert prepare_blas("auto").note is None


def test_other_devices_name_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_blas(Blas(name="x", note="y"), on_gpu=True) == Blas(name="none: GPU")
    assert describe_blas(Blas(name="x"), on_gpu=False) == Blas(name="x")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert prepare_blas("auto") == Blas(name="accelerate")
