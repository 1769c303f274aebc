"""Turn a checked checkpoint folder into arrays, and put them into a module tree.

`read_checkpoint` validates everything from headers (`engine.manifest`) and maps the files lazily;
`load_weights` quantises or dequantises the module tree to match, casts, and updates it strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten

from engine import quant
from engine.errors import CheckpointError
from engine.layouts import MTP_PREFIX, SHOWN, Kind, listed
from engine.manifest import Manifest, is_raw_conv, read_manifest
from engine.models.qwen3_5_config import Qwen35Config
from engine.norms import NormVerdict
from engine.quant import QuantSpec

FLOAT32_SUFFIXES = (".A_log", ".dt_bias")
"""Parameters that stay float32 whatever the activations are: both go into the decay
exp(-exp(A_log) · softplus(a + dt_bias)), which the recurrence raises to the power of the distance;
rounding it to half precision changes what is remembered over thousands of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, still on disk: its arrays are lazy until something evaluates them."""

    path: Path
    config: dict[str, Any]
    text_config: dict[str, Any]
    """The language model's part of `config` (`config` itself in text-only repos)."""
    family: str
    arch: Qwen35Config
    tensors: dict[str, mx.array]
    """By canonical name, `.scales` and `.biases` included: convolutions in [C, K, 1], norms folded
    (γ, float32). `load_weights` takes them out as it goes, so that no tensor is held twice."""
    quantization: dict[str, QuantSpec]
    """Packed modules by canonical path; a path that is absent is dense."""
    has_mtp: bool
    verdicts: dict[str, NormVerdict]
    """How the norms of "trunk" and "mtp" were read."""
    notes: tuple[str, ...]

    @property
    def dtype(self) -> mx.Dtype:
        """Type the checkpoint's own floats are in, as its embedding (or that one's scales) has it;
        float32 where those are bytes."""
        name = "model.embed_tokens"
        array = self.tensors.get(f"{name}.scales", self.tensors[f"{name}.weight"])
        return array.dtype if mx.issubdtype(array.dtype, mx.floating) else mx.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_weights` put on the device."""

    weight_bytes: int
    parameters: int
    """Logical parameters: a packed weight counts what it stands for."""
    quantization: str
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint folder and map its tensors.

    Raises CheckpointError naming the file or tensors at fault, ConfigError naming the key of
    config.json. No weight is read yet, except the norms (which decide their own convention).
    """
    manifest = read_manifest(path)
    text = manifest.config.get("text_config")
    return Checkpoint(
        path=path,
        config=manifest.config,
        text_config=manifest.config if text is None else text,
        family=manifest.family,
        arch=manifest.arch,
        tensors=_map_tensors(manifest),
        quantization=manifest.quantization,
        has_mtp=manifest.has_mtp,
        verdicts=manifest.verdicts,
        notes=manifest.notes,
    )


def load_weights(
    module: Module, checkpoint: Checkpoint, *, dtype: mx.Dtype, dequantize: bool
) -> LoadReport:
    """Fill `module`, whose parameter paths are the canonical names, and evaluate it.

    Packed modules become `nn.QuantizedLinear`/`nn.QuantizedEmbedding`, or dense when `dequantize`;
    floats are cast to `dtype` except `FLOAT32_SUFFIXES`. A module tree without any `mtp` parameter
    leaves the checkpoint's head unloaded, with a note. Empties `checkpoint.tensors`.

    Raises CheckpointError naming tensors that only one side has, or whose shapes differ.
    """
    wanted = _shapes(module)
    notes: list[str] = []
    tensors = checkpoint.tensors
    if not any(name.startswith(MTP_PREFIX) for name in wanted):
        head = [name for name in tensors if name.startswith(MTP_PREFIX)]
        for name in head:
            del tensors[name]
        if head:
            notes.append("the checkpoint's MTP head was not loaded")
    packed = {p: s for p, s in checkpoint.quantization.items() if f"{p}.weight" in tensors}
    _check_against(module, checkpoint, packed)
    if packed and not dequantize:
        quantize(module, class_predicate=_predicate(packed))
    parameters = sum(_product(shape) for shape in wanted.values())
    for name in list(wanted):
        path = name.removesuffix(".weight")
        spec = packed.get(path)
        if spec is None:
            loaded = {name: _cast(name, tensors.pop(name), dtype)}
        elif dequantize:
            loaded = {name: _dequantized(path, spec, tensors, dtype)}
        else:
            loaded = _kept(path, spec, tensors, dtype)
        # One module at a time: the packed source is dropped before the next is read.
        mx.eval(loaded)
        module.update(cast(dict[str, Any], tree_unflatten(list(loaded.items()))))
    summary = quant.summary(packed)
    return LoadReport(
        weight_bytes=sum(a.nbytes for _, a in _arrays(module)),
        parameters=parameters,
        quantization=f"{summary}, dequantized at load" if packed and dequantize else summary,
        notes=tuple(notes),
    )


def planned_bytes(checkpoint: Checkpoint, *, dtype: mx.Dtype, dequantize: bool) -> int:
    """What `load_weights` will report as `weight_bytes`, MTP head included, before any weight is
    read: a budget that does not fit can refuse before the memory is taken."""
    total = 0
    for name, array in checkpoint.tensors.items():
        path, _, part = name.rpartition(".")
        spec = checkpoint.quantization.get(path)
        if spec is not None and dequantize:
            total += array.size * 32 // spec.bits * dtype.size if part == "weight" else 0
        elif not mx.issubdtype(array.dtype, mx.floating):
            total += array.nbytes
        else:
            total += array.size * (4 if name.endswith(FLOAT32_SUFFIXES) else dtype.size)
    return total


def _map_tensors(manifest: Manifest) -> dict[str, mx.array]:
    """Lazy arrays by canonical name, with layout and norm changes applied."""
    files = {tensor.file for tensor in manifest.stored.values()}
    loaded = {}
    for file in files:
        try:
            loaded[file] = cast(dict[str, mx.array], mx.load(str(file), format="safetensors"))
        except (RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(file, f"MLX cannot read it: {error}") from error
    tensors = {}
    for name, stored in manifest.stored.items():
        array = loaded[stored.file].pop(stored.name)
        spec = manifest.schema.get(name)
        if spec is not None and spec.kind is Kind.CONV and is_raw_conv(spec, stored):
            array = mx.moveaxis(array, 2, 1)  # [C, 1, K] -> [C, K, 1]
        if spec is not None and spec.kind is Kind.NORM:
            part = "mtp" if name.startswith(MTP_PREFIX) else "trunk"
            array = array.astype(mx.float32)  # 1 + w rounds small w away in half precision
            if manifest.verdicts[part].delta:
                array = array + 1.0
        tensors[name] = array
    return tensors


def _check_against(module: Module, checkpoint: Checkpoint, packed: dict[str, QuantSpec]) -> None:
    """The module's dense parameters and the checkpoint's must be the same set and shapes."""
    wanted = _shapes(module)
    found = {}
    for name, array in checkpoint.tensors.items():
        path, _, part = name.rpartition(".")
        spec = packed.get(path)
        if spec is None:
            found[name] = tuple(array.shape)
        elif part == "weight":
            rows, words = array.shape
            found[name] = (rows, words * 32 // spec.bits)
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    unequal = [name for name in wanted if name in found and wanted[name] != found[name]]
    faults = []
    if missing:
        faults.append(f"missing {listed(missing)}")
    if extra:
        faults.append(f"unknown to the module {listed(extra)}")
    if unequal:
        pairs = [f"{n} is {list(found[n])}, expected {list(wanted[n])}" for n in unequal[:SHOWN]]
        faults.append(f"misshapen: {'; '.join(pairs)}")
    if faults:
        names = tuple((missing + extra + unequal)[:SHOWN])
        raise CheckpointError(checkpoint.path, "; ".join(faults), tensors=names)


def _predicate(packed: dict[str, QuantSpec]) -> Callable[[str, Module], bool | dict[str, Any]]:
    def choose(path: str, _: Module) -> bool | dict[str, Any]:
        spec = packed.get(path)
        if spec is None:
            return False
        return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}

    return choose


def _dequantized(
    path: str, spec: QuantSpec, tensors: dict[str, mx.array], dtype: mx.Dtype
) -> mx.array:
    """A packed weight as [out, in] of `dtype`, computed in float32."""
    weight, scales = tensors.pop(f"{path}.weight"), tensors.pop(f"{path}.scales")
    biases = tensors.pop(f"{path}.biases", None)
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    dense = mx.dequantize(
        weight,
        scales,
        biases,
        group_size=spec.group_size,
        bits=spec.bits,
        mode=spec.mode,
        dtype=mx.float32,
    )
    return dense.astype(dtype)


def _kept(
    path: str, spec: QuantSpec, tensors: dict[str, mx.array], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """A packed module's tensors; affine scales and biases set the type of its output, so they are
    cast, while the byte scales of the other modes are codes."""
    names = [f"{path}.weight", f"{path}.scales"]
    if spec.mode == "affine":
        names.append(f"{path}.biases")
    return {name: _cast(name, tensors.pop(name), dtype) for name in names}


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(mx.float32 if name.endswith(FLOAT32_SUFFIXES) else dtype)


def _arrays(module: Module) -> list[tuple[str, mx.array]]:
    tree = module.parameters()
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def _shapes(module: Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in _arrays(module)}


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
