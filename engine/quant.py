"""Which modules of a checkpoint are quantised, and how: declared by its config, proven by shapes.

MLX keeps a quantised module as `<path>.weight` (packed words), `<path>.scales` and, in affine
mode, `<path>.biases`. A module is quantised when it has scales; group size and bits follow from
its shapes (MTP heads are often packed otherwise than the config's default says), and an override
that names the module must agree with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import CheckpointError
from engine.headers import StoredTensor
from engine.layouts import Schema, TensorSpec, canonical_name

_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
_FLOAT_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""(bits, group size) → mode, for modules whose scales are bytes."""


@dataclass(frozen=True, slots=True, order=True)
class QuantSpec:
    """How one module's weight is packed, in the terms of `mx.quantize`."""

    group_size: int
    bits: int
    mode: str

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, group {self.group_size}"


def resolve(
    config: Mapping[str, Any], schema: Schema, stored: Mapping[str, StoredTensor], where: object
) -> dict[str, QuantSpec]:
    """Quantised modules of a checkpoint by canonical path; all others are dense.

    Raises CheckpointError naming the module when declaration and tensors contradict each other,
    when the geometry is none MLX knows, or when the weights come from another quantiser.
    """
    declared = _declared(config, where)
    overrides = {
        canonical: value
        for path, value in declared.items()
        if isinstance(value, dict | bool) and (canonical := canonical_name(path)) is not None
    }
    specs = {}
    for name, spec in schema.items():
        if not spec.quantizable:
            continue
        module = name.removesuffix(".weight")
        override = overrides.get(module)
        if f"{module}.scales" not in stored:
            if isinstance(override, dict):
                what = f"{module} is declared quantised but has no {module}.scales"
                raise CheckpointError(where, what, tensors=(f"{module}.scales",))
            continue
        if override is False:
            what = f"{module} is declared dense (false) but has {module}.scales"
            raise CheckpointError(where, what, tensors=(f"{module}.scales",))
        found = _geometry(module, spec, stored, where)
        if isinstance(override, dict):
            _check_override(module, found, {**declared, **override}, where)
        specs[module] = found
    return specs


def companions(module: str, spec: QuantSpec, dense: TensorSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes a module's tensors have once packed."""
    rows, columns = dense.shape
    groups = (rows, columns // spec.group_size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{module}.weight": (rows, columns * spec.bits // 32),
        f"{module}.scales": groups,
    }
    if spec.mode == "affine":
        shapes[f"{module}.biases"] = groups
    return shapes


def summary(specs: Mapping[str, QuantSpec]) -> str:
    """One line for people: "none", "affine 4-bit, group 64", or each kind with its count."""
    if not specs:
        return "none"
    counts = Counter(specs.values()).most_common()
    if len(counts) == 1:
        return str(counts[0][0])
    return "; ".join(f"{spec} ({count} modules)" for spec, count in counts)


def _declared(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    block = config.get("quantization")
    if block is None:
        block = config.get("quantization_config")
        if isinstance(block, dict) and "quant_method" in block:
            what = f"quantised with quant_method {block['quant_method']!r}; only MLX's own formats"
            hint = "are read (mlx_lm.convert makes one from the original weights)"
            raise CheckpointError(where, f"{what} {hint}")
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise CheckpointError(where, "config.json: quantization must be an object")
    return block


def _geometry(
    module: str, dense: TensorSpec, stored: Mapping[str, StoredTensor], where: object
) -> QuantSpec:
    """What the shapes of a module with scales say. Only rank and divisibility are judged here; that
    every companion has exactly the shape that follows is the caller's full check."""
    weight, scales = stored.get(f"{module}.weight"), stored[f"{module}.scales"]
    if weight is None:
        what = f"{module}.weight is missing beside {module}.scales"
        raise CheckpointError(where, what, tensors=(f"{module}.weight",))
    columns = dense.shape[-1]
    words = weight.shape[-1] if weight.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    bits, rest = divmod(words * 32, columns)
    group = columns // groups if groups and columns % groups == 0 else 0
    if scales.dtype == "U8":
        mode = _FLOAT_MODES.get((bits, group))
    else:
        mode = "affine" if bits in _AFFINE_BITS and group in _AFFINE_GROUPS else None
    if mode is None or rest or weight.dtype != "U32":
        what = (
            f"{module}: weight {weight.dtype} {list(weight.shape)} with scales {scales.dtype} "
            f"{list(scales.shape)} is no packing of {list(dense.shape)} that MLX knows"
        )
        raise CheckpointError(where, what, tensors=(f"{module}.weight", f"{module}.scales"))
    return QuantSpec(group, bits, mode)


def _check_override(
    module: str, found: QuantSpec, declared: Mapping[str, Any], where: object
) -> None:
    wanted = QuantSpec(
        declared.get("group_size", found.group_size),
        declared.get("bits", found.bits),
        declared.get("mode") or "affine",
    )
    if wanted != found:
        what = f"{module} is declared {wanted}, its shapes say {found}"
        raise CheckpointError(where, what, tensors=(f"{module}.weight",))
