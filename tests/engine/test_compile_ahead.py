"""Kernels compiled ahead: which products, by processes that work, and what a failure says."""

from pathlib import Path

import numpy as np
import pytest

from engine import compile_ahead as ahead
from engine.checkpoint import read_checkpoint
from engine.compile_ahead import Product, compile_ahead, distinct
from engine.quant import QuantSpec
from engine.tiny import MODEL_DIR

SMALL = Product(
    columns_in=128, columns_out=64, group_size=64, bits=4, mode="affine", dtype="bfloat16"
)


def test_one_product_for_each_packing_of_its_commonest_shape() -> None:
    four, eight = QuantSpec(64, 4, "affine"), QuantSpec(32, 8, "affine")
    shapes = {"a": ((64, 16), four), "b": ((64, 16), four), "c": ((256, 16), four)}
    shapes["d"] = ((8, 32), eight)
    packed = {name: (np.zeros(shape), spec) for name, (shape, spec) in shapes.items()}
    assert distinct(packed, "bfloat16") == [
        SMALL,
        Product(
            columns_in=128, columns_out=8, group_size=32, bits=8, mode="affine", dtype="bfloat16"
        ),
    ]


def test_the_bundled_model_has_two_packings() -> None:
    checkpoint = read_checkpoint(MODEL_DIR)
    packed = {
        module: (checkpoint.tensors[f"{module}.weight"], spec)
        for module, spec in checkpoint.quantization.items()
    }
    products = distinct(packed, "bfloat16")
    assert {product.bits for product in products} == {6, 8}
    assert {product.columns_in for product in products} == {checkpoint.arch.hidden_size}


def test_its_processes_multiply() -> None:
    """On any device: this machine's has nothing to compile, but the products must be made."""
    assert compile_ahead([SMALL]) == ""


def test_a_product_that_cannot_be_made_is_a_note() -> None:
    odd = Product(columns_in=100, columns_out=64, group_size=64, bits=4, mode="affine", dtype="f")
    assert compile_ahead([SMALL, odd]) == "3 of 6 CUDA kernels could not be compiled ahead"


def test_processes_that_hang_are_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "hang.py"
    hanging.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(ahead, "__file__", str(hanging))
    monkeypatch.setattr(ahead, "TIMEOUT_S", 0.3)
    assert compile_ahead([SMALL]) == "CUDA kernels were not compiled ahead within 0.3 s"
