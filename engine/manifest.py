"""From a checkpoint folder to a checked list of tensors: headers only, no weights, no MLX.

`open_folder` reads config and headers and gives every tensor its canonical name; `read_manifest`
goes on to demand that the set is exactly what the model needs. Inspection uses the first to report
on folders that fail the second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine import layouts, norms, quant
from engine.errors import CheckpointError
from engine.headers import FLOAT_DTYPES, StoredTensor, read_floats, read_header
from engine.layouts import Kind, Schema, TensorSpec, listed
from engine.models.qwen3_5_config import Qwen35Config
from engine.norms import NormVerdict
from engine.quant import QuantSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDECARS = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A checkpoint folder as it lies there. `stored` is by canonical name, vision dropped."""

    path: Path
    config: dict[str, Any]
    stored: dict[str, StoredTensor]
    sidecar: Path | None
    """File beside the trunk's that holds the MTP head, None when there is none."""
    notes: tuple[str, ...]

    @property
    def mtp_names(self) -> list[str]:
        return [name for name in self.stored if name.startswith(layouts.MTP_PREFIX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint whose tensors are complete, well shaped and understood."""

    path: Path
    config: dict[str, Any]
    family: str
    arch: Qwen35Config
    schema: Schema
    """Canonical dense tensors the model has: trunk, and MTP when `has_mtp`."""
    stored: dict[str, StoredTensor]
    """Exactly the tensors to load: the schema's, and the companions of quantised ones."""
    quantization: dict[str, QuantSpec]
    has_mtp: bool
    verdicts: dict[str, NormVerdict]
    """Norm convention by part, "trunk" and, when there is one, "mtp"."""
    notes: tuple[str, ...]


def open_folder(path: Path) -> Folder:
    """Read config and headers. Raises CheckpointError naming the file or tensor at fault."""
    if not path.is_dir():
        what = "is a file; a checkpoint is a folder" if path.exists() else "does not exist"
        raise CheckpointError(path, what)
    config = read_json(path / "config.json")
    notes: list[str] = []
    main = _main_tensors(path, notes)
    stored: dict[str, StoredTensor] = {}
    for tensor in main:
        _add(stored, layouts.canonical_name(tensor.name), tensor)
    sidecar = _sidecar(path, config, {tensor.file for tensor in main})
    if sidecar is not None:
        for tensor in read_header(sidecar).values():
            _add(stored, layouts.sidecar_name(tensor.name), tensor)
        notes.append(f"MTP head read from {sidecar.relative_to(path)}")
    return Folder(path=path, config=config, stored=stored, sidecar=sidecar, notes=tuple(notes))


def read_manifest(path: Path) -> Manifest:
    """Check a folder completely.

    Raises CheckpointError (family, missing, extra, misshapen or mistyped tensors, by name) and
    ConfigError (a key of config.json).
    """
    return check_folder(open_folder(path))


def check_folder(folder: Folder) -> Manifest:
    """The second half of `read_manifest`."""
    path, config, stored = folder.path, folder.config, dict(folder.stored)
    notes = list(folder.notes)
    family = layouts.family_of(config, path)
    arch = Qwen35Config.from_dict(config)
    schema = layouts.trunk_schema(arch)
    has_mtp = bool(folder.mtp_names)
    if has_mtp:
        schema |= layouts.mtp_schema(arch)
    if arch.tie_word_embeddings:
        heads = ("lm_head.weight", "lm_head.scales", "lm_head.biases")
        tied = [stored.pop(name, None) for name in heads]
        if any(tied):
            notes.append("lm_head dropped: the config ties it to the embedding")
    quantization = quant.resolve(config, schema, stored, path)
    _check_names(path, schema, stored, quantization)
    _check_shapes(path, schema, stored, quantization)
    verdicts = _verdicts(folder, schema, stored, raw_layout=_raw_layout(path, schema, stored))
    for part, verdict in verdicts.items():
        notes.append(f"{part} norms: {verdict.convention}, by {verdict.why}")
        notes.extend(f"{part} norms: {doubt}" for doubt in verdict.doubts)
    notes.extend(_mtp_notes(arch, has_mtp))
    return Manifest(
        path=path,
        config=config,
        family=family,
        arch=arch,
        schema=schema,
        stored=stored,
        quantization=quantization,
        has_mtp=has_mtp,
        verdicts=verdicts,
        notes=tuple(notes),
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(file.parent, f"{file.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, "must hold a JSON object")
    return value


def is_raw_conv(spec: TensorSpec, tensor: StoredTensor) -> bool:
    """Whether a convolution lies in Hugging Face's [C, 1, K]."""
    return tensor.shape == layouts.conv_shapes(spec)[0]


def _inside(folder: Path, name: object, what: str) -> Path:
    """A file a checkpoint names, which must be safetensors below its folder. Checked on the name
    alone: hub caches legitimately link shards to blobs elsewhere."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(folder, f"{what} must be a file name, not {name!r}")
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0]:
        raise CheckpointError(folder, f"{what} {name!r} leads out of the folder")
    if pure.suffix != ".safetensors":
        raise CheckpointError(folder, f"{what} {name!r} is not a safetensors file")
    return folder / pure


def _main_tensors(path: Path, notes: list[str]) -> list[StoredTensor]:
    """Tensors of the shards the index names, or of the single file."""
    present = sorted(p.name for p in path.glob("*.safetensors"))
    if (path / INDEX).exists():
        tensors = _indexed(path)
        used = {tensor.file.name for tensor in tensors}
    elif SINGLE in present:
        tensors, used = list(read_header(path / SINGLE).values()), {SINGLE}
    elif shards := [name for name in present if name.startswith("model-") and "-of-" in name]:
        raise CheckpointError(path, f"{INDEX} is missing beside {listed(shards)}")
    else:
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES)
        what = f"no {SINGLE} and no {INDEX}"
        if pickles:
            what += f", only {listed(pickles)}: pickles can run code and are never read"
        raise CheckpointError(path, what)
    others = [name for name in present if name not in used and name not in SIDECARS]
    if surplus := [name for name in others if name.startswith("model")]:
        where = INDEX if (path / INDEX).exists() else SINGLE
        raise CheckpointError(path, f"{listed(surplus)}: weights that {where} does not know of")
    if others:
        notes.append(f"not read: {listed(others)}")
    return tensors


def _indexed(path: Path) -> list[StoredTensor]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path / INDEX, "weight_map is missing or empty")
    shards = {name: _inside(path, name, "shard") for name in dict.fromkeys(weight_map.values())}
    absent = [name for name, file in shards.items() if not file.exists()]
    if absent:
        raise CheckpointError(path, f"missing {listed(absent)}, which {INDEX} names")
    headers = {name: read_header(file) for name, file in shards.items()}
    lost = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if lost:
        what = f"{INDEX} places tensors where they are not: {listed(lost)}"
        raise CheckpointError(path, what, tensors=tuple(lost[: layouts.SHOWN]))
    for shard, header in headers.items():
        extra = [name for name in header if weight_map.get(name) != shard]
        if extra:
            what = f"holds tensors that {INDEX} does not place there: {listed(extra)}"
            raise CheckpointError(path / shard, what, tensors=tuple(extra[: layouts.SHOWN]))
    return [headers[shard][name] for name, shard in weight_map.items()]


def _sidecar(path: Path, config: Mapping[str, Any], used: set[Path]) -> Path | None:
    """The separate file with the MTP head: declared by the config, or the one known name."""
    block = config.get("mlx_lm_extra_tensors")
    if isinstance(block, Mapping) and block.get("mtp_file") is not None:
        file = _inside(path, block["mtp_file"], "config.json: mlx_lm_extra_tensors.mtp_file")
        if not file.exists():
            raise CheckpointError(path, f"{block['mtp_file']} is missing: config.json names it")
        return None if file in used else file
    found = [path / name for name in SIDECARS if (path / name).exists()]
    found = [file for file in found if file not in used]
    if len(found) > 1:
        names = listed(str(file.relative_to(path)) for file in found)
        raise CheckpointError(path, f"several MTP sidecars, keep one: {names}")
    return found[0] if found else None


def _add(stored: dict[str, StoredTensor], name: str | None, tensor: StoredTensor) -> None:
    if name is None:
        return
    if name in stored:
        other = stored[name]
        places = f"{other.name} in {other.file.name}, {tensor.name} in {tensor.file.name}"
        raise CheckpointError(
            tensor.file.parent, f"{name} is there twice: {places}", tensors=(name,)
        )
    stored[name] = tensor


def _expected(schema: Schema, quantization: Mapping[str, QuantSpec]) -> dict[str, tuple[int, ...]]:
    """Every stored tensor the model needs, with the shape it must have (MLX layout)."""
    shapes = {}
    for name, spec in schema.items():
        module = name.removesuffix(".weight")
        packed = quantization.get(module)
        if packed is None:
            shapes[name] = spec.shape
        else:
            shapes |= quant.companions(module, packed, spec)
    return shapes


def _check_names(
    path: Path,
    schema: Schema,
    stored: Mapping[str, StoredTensor],
    quantization: Mapping[str, QuantSpec],
) -> None:
    expected = _expected(schema, quantization)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    faults = []
    if missing:
        head = all(name.startswith(layouts.MTP_PREFIX) for name in missing)
        faults.append(f"{'incomplete MTP head, ' if head else ''}missing {listed(missing)}")
    if extra:
        faults.append(f"unknown {listed(extra)}")
    if faults:
        names = tuple((missing + extra)[: layouts.SHOWN])
        raise CheckpointError(path, "; ".join(faults), tensors=names)


def _check_shapes(
    path: Path,
    schema: Schema,
    stored: Mapping[str, StoredTensor],
    quantization: Mapping[str, QuantSpec],
) -> None:
    faults: dict[str, str] = {}
    for name, shape in _expected(schema, quantization).items():
        tensor, spec = stored[name], schema.get(name)
        allowed = [shape]
        if spec is not None and spec.kind is Kind.CONV:
            allowed = list(layouts.conv_shapes(spec))
        if tensor.shape not in allowed:
            wanted = " or ".join(str(list(a)) for a in allowed)
            faults[name] = f"{name} is {list(tensor.shape)}, expected {wanted}"
        elif tensor.dtype not in _allowed_dtypes(name, quantization):
            wanted = ", ".join(_allowed_dtypes(name, quantization))
            faults[name] = f"{name} is stored as {tensor.dtype}, expected {wanted}"
    if faults:
        what = "misshapen or mistyped: " + "; ".join(list(faults.values())[: layouts.SHOWN])
        raise CheckpointError(path, what, tensors=tuple(faults)[: layouts.SHOWN])


def _allowed_dtypes(name: str, quantization: Mapping[str, QuantSpec]) -> tuple[str, ...]:
    module, _, part = name.rpartition(".")
    packed = quantization.get(module)
    if packed is None:
        return FLOAT_DTYPES
    if part == "weight":
        return ("U32",)
    return FLOAT_DTYPES if packed.mode == "affine" else ("U8",)


def _raw_layout(path: Path, schema: Schema, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the trunk's convolutions lie in Hugging Face's layout (False when it has none)."""
    raw = {n: is_raw_conv(s, stored[n]) for n, s in schema.items() if s.kind is Kind.CONV}
    if len(set(raw.values())) > 1:
        odd = [name for name, is_raw in raw.items() if is_raw]
        what = f"half converted: these lie in Hugging Face's layout, others in MLX's: {listed(odd)}"
        raise CheckpointError(path, what, tensors=tuple(odd[: layouts.SHOWN]))
    return any(raw.values())


def _verdicts(
    folder: Folder, schema: Schema, stored: Mapping[str, StoredTensor], *, raw_layout: bool
) -> dict[str, NormVerdict]:
    values = {n: read_floats(stored[n]) for n, s in schema.items() if s.kind is Kind.NORM}
    head = {n: v for n, v in values.items() if n.startswith(layouts.MTP_PREFIX)}
    trunk = {n: v for n, v in values.items() if n not in head}
    verdicts = {"trunk": norms.decide("trunk", trunk, declared=None, raw_layout=raw_layout)}
    if head:
        verdicts["mtp"] = norms.decide(
            "mtp", head, declared=_declared_head(folder), raw_layout=raw_layout
        )
    return verdicts


def _declared_head(folder: Folder) -> str | None:
    """The head's declared norm encoding: in the config, or in vllm-mlx's manifest beside it."""
    declared = norms.declared_encoding(folder.config)
    if declared is not None or folder.sidecar is None or folder.sidecar.parent == folder.path:
        return declared
    file = folder.sidecar.parent / "manifest.json"
    if not file.exists():
        return None
    manifest = read_json(file)
    word = manifest.get("rmsnorm_weight_format")
    known = manifest.get("artifact_schema_version") == 1 and isinstance(word, str)
    return word if known else None


def _mtp_notes(arch: Qwen35Config, has_mtp: bool) -> list[str]:
    if has_mtp and not arch.mtp_layers:
        return ["MTP tensors found although the config does not mention a head"]
    if not has_mtp and arch.mtp_layers:
        return ["no MTP tensors although the config advertises a head: decoding runs at depth 0"]
    return [] if has_mtp else ["no MTP head: decoding runs at depth 0"]
