"""Small tensor operations shared by the model families. Stock MLX only.

`mx.compile` is deliberately absent: on Linux CPU it calls a C++ compiler at run time, which a
server may not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

TILE = 128
"""Output columns that packed products on a GPU come in."""


def silu(x: mx.array) -> mx.array:
    """x · σ(x), elementwise."""
    return x * mx.sigmoid(x)


def unit_scale(x: mx.array, scale: mx.array | float, eps: float = 1e-6) -> mx.array:
    """x / sqrt(Σx² + eps) · scale over the last axis, through the RMS kernel.

    With n = size of that axis, sqrt(Σx² + eps) = sqrt(n) · sqrt(mean x² + eps / n); the caller's
    `scale` must already contain the factor n^-0.5.
    """
    return mx.fast.rms_norm(x, None, eps / x.shape[-1]) * scale


def columns(x: mx.array, *sizes: int) -> list[mx.array]:
    """Cut the last axis into parts of these sizes; what a fused product has beyond them (see
    `fuse_linears`) is dropped."""
    ends = list(accumulate(sizes))
    whole = ends[-1] == x.shape[-1]
    parts = list(mx.split(x, ends[:-1] if whole else ends, axis=-1))
    return parts[: len(sizes)]


def first_rows(x: mx.array, count: int) -> mx.array:
    """The first `count` rows of x [M, …]."""
    return x if x.shape[0] == count else x[:count]


def pad_rows(x: mx.array, count: int) -> mx.array:
    """x [M, …] with zero rows up to `count` >= M."""
    missing = count - x.shape[0]
    if not missing:
        return x
    return mx.concatenate([x, mx.zeros((missing, *x.shape[1:]), x.dtype)], axis=0)


class Rotation:
    """Rotary embedding of a block of positions, worked out once for all layers of a pass.

    Half-split pairs (j, j + dims/2) at frequency base^(-2j/dims), on the first `dims` of a head.
    On a GPU `mx.fast.rope` is one kernel; on CPU it falls back to some forty operations per call,
    most of which recompute the same angles, so there they are kept.
    """

    def __init__(self, *, start: mx.array, width: int, dims: int, base: float) -> None:
        self.start = start
        """[B] int32: position of each row's first token."""
        self._dims, self._base = dims, base
        self._angles: tuple[mx.array, mx.array] | None = None
        if mx.default_device().type != mx.gpu:
            steps = mx.arange(width, dtype=mx.float32)
            positions = start.astype(mx.float32)[:, None] + steps
            frequencies = mx.power(base, -mx.arange(0, dims, 2, dtype=mx.float32) / dims)
            angles = (positions[..., None] * frequencies)[:, None]
            self._angles = mx.cos(angles), mx.sin(angles)

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate [B, heads, W, hd]."""
        if self._angles is None:
            return mx.fast.rope(
                x, self._dims, traditional=False, base=self._base, scale=1.0, offset=self.start
            )
        cos, sin = self._angles
        first, second, rest = mx.split(x, [self._dims // 2, self._dims], axis=-1)
        turned = [first * cos - second * sin, first * sin + second * cos, rest]
        return mx.concatenate(turned, axis=-1).astype(x.dtype)


def finite(x: mx.array) -> mx.array:
    """x with NaN and infinities replaced by 0 (`mx.nan_to_num` takes four times the operations)."""
    return mx.where(x - x == 0, x, 0)


def causal_conv(u: mx.array, weight: mx.array, width: int) -> mx.array:
    """Depthwise causal convolution of the last `width` rows of `u`.

    `u` is [B, K - 1 + width, C] (the K - 1 rows before the block come first), `weight` [K, C].
    Returns [B, width, C] in float32. A strided view and one reduction: 3 to 4 times faster than
    `conv1d` or shifted products on CPU, and every row sums its K terms in the same order
    whatever the width.
    """
    batch, rows, channels = u.shape
    taps = weight.shape[0]
    windows = mx.as_strided(
        u.astype(mx.float32),
        (batch, width, taps, channels),
        (rows * channels, channels, channels, 1),
    )
    return (windows * weight).sum(axis=2)


def lay_out_for_cpu(model: Module) -> None:
    """Keep dense weights [out, in] in memory as [in, out], so that `x @ weight.T` reads in order.

    A CPU GEMM packs its operands first, and packing a transposed matrix is the larger part of a
    product with few rows: 16 to 45 % of the time saved at 1 to 6 rows (measured with OpenBLAS,
    768→256 to 2048→8192).
    """
    for _, module in model.named_modules():
        if isinstance(module, Linear | Embedding) and module.weight.ndim == 2:
            columns = mx.contiguous(module.weight.T)
            mx.eval(columns)
            module.weight = columns.T


def fuse_linears(layers: Sequence[Module]) -> Module | None:
    """One linear layer whose output is the concatenation of the given layers' outputs.

    Returns None when they do not share one storage format (mixed quantisation); the caller then
    keeps them apart. Fewer, larger products cost less on every device, and each output column is
    computed as before. On a GPU a packed result gets columns of zeros, to be ignored, up to a
    multiple of `TILE`: MLX's CUDA kernels have read past the ends of partial tiles (ml-explore/mlx
    issue 3487).
    """
    first = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return None
    if isinstance(first, QuantizedLinear):
        formats = {(q.group_size, q.bits, q.mode) for q in layers if isinstance(q, type(first))}
        if len(formats) > 1:
            return None
    elif not isinstance(first, Linear):
        return None
    fused = type(first).__new__(type(first))
    Module.__init__(fused)
    for name in ("group_size", "bits", "mode"):
        if name in first.__dict__:
            setattr(fused, name, first.__dict__[name])
    packed = isinstance(first, QuantizedLinear) and mx.default_device().type == mx.gpu
    for name in first:
        joined = mx.concatenate([layer[name] for layer in layers], axis=0)
        missing = -joined.shape[0] % TILE if packed else 0
        setattr(fused, name, pad_rows(joined, joined.shape[0] + missing))
    return fused
