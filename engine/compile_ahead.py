"""Have the CUDA kernels of packed products compiled before this process uses them.

MLX compiles them when they are first met, some 30 s each, and keeps them in a cache on disk. With
MLX 0.32.4 on an H200 a process that compiled them itself met an illegal memory access soon after,
three times of three; one that finds them in the cache has not. So processes of their own multiply
one matrix of each packing, all at once, and this one finds the results. Warm, it takes as long as
starting Python and CUDA do. Nothing here matters on Metal or a CPU.

This file is also the program of those processes; it then imports nothing but MLX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.quant import QuantSpec

ROWS = ((8, 16), (32,), (64, 256))
"""Rows multiplied by each process: MLX has one kernel for up to 16, one up to 32, one beyond."""
TIMEOUT_S = 600.0
"""For all processes together. Compiling takes some 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A packed matrix, [columns_out, columns_in] before packing, times rows of a type."""

    columns_in: int
    columns_out: int
    group_size: int
    bits: int
    mode: str
    dtype: str
    """Of the activations, as `mlx.core` names it."""


class Shaped(Protocol):
    """An array, as far as it matters here."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def distinct(packed: Mapping[str, tuple[Shaped, QuantSpec]], dtype: str) -> list[Product]:
    """One product of each packing, of its commonest shape. `packed`: module → its weight, in 32-bit
    words, and how it is packed."""
    found: dict[QuantSpec, Product] = {}
    counts = Counter((weight.shape, spec) for weight, spec in packed.values())
    for (shape, spec), _ in counts.most_common():
        product = Product(
            columns_in=shape[1] * 32 // spec.bits,
            columns_out=shape[0],
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
            dtype=dtype,
        )
        found.setdefault(spec, product)
    return list(found.values())


def compile_ahead(products: Iterable[Product]) -> str:
    """Compile the kernels of these products, and wait. A note for people when some could not be;
    the first use compiles them then."""
    jobs = [(product, rows) for product in products for rows in ROWS]
    waiting, failed = list(jobs), 0
    running: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + TIMEOUT_S
    try:
        while waiting or running:
            while waiting and len(running) < max(1, (os.cpu_count() or 1) - 1):
                running.append(_start(*waiting.pop()))
            failed += running[0].wait(end - time.monotonic()) != 0
            running.pop(0)
    except subprocess.TimeoutExpired:
        return f"CUDA kernels were not compiled ahead within {TIMEOUT_S:g} s"
    finally:
        for process in running:
            process.kill()
            process.wait()
    return f"{failed} of {len(jobs)} CUDA kernels could not be compiled ahead" if failed else ""


def _start(product: Product, rows: tuple[int, ...]) -> subprocess.Popen[bytes]:
    order = json.dumps({**asdict(product), "rows": rows})
    # -P: the folder of this file has modules that are named like the standard library's.
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__)), order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def multiply(order: str) -> None:
    """Multiply one random packed matrix by blocks of the rows asked for."""
    import mlx.core as mx

    asked = json.loads(order)
    dtype = getattr(mx, asked["dtype"])
    packing = {name: asked[name] for name in ("group_size", "bits", "mode")}
    dense = mx.random.normal((asked["columns_out"], asked["columns_in"])).astype(dtype)
    weight, scales, *rest = mx.quantize(dense, **packing)
    biases = rest[0] if rest else None
    for rows in asked["rows"]:
        x = mx.ones((rows, asked["columns_in"]), dtype)
        mx.eval(mx.quantized_matmul(x, weight, scales, biases, transpose=True, **packing))


if __name__ == "__main__":
    multiply(sys.argv[1])
