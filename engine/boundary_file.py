"""Files of boundaries: a sequence's saved point and its pages, to be taken up by another process.

A file is safetensors: the recurrent states, the carried hidden, and the keys and values of the
prefix by layer as [L, heads, head_dim], so that a reader's page size may differ from the writer's.
Its metadata holds one JSON manifest: format version, fingerprint of the model, the tokens, whether
MTP history is in it, the caller's own entries, and a digest of the data. A file is written beside
its place and renamed, so it is complete or absent; all of it is checked before any of it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from engine.boundary import Boundary
from engine.cache import PagePool, RecurrentState
from engine.errors import CheckpointError
from engine.headers import read_header
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import ForeignFileError, SavedPrefix, pages_needed

VERSION = 1
KEY = "selfdraft.boundary"
"""Metadata key of the manifest."""

PARTIAL = ".part"
"""Ends the name of a file that is being written; of one that is left there is nothing to read."""

_SAMPLES = 64
"""Elements of each weight that go into a fingerprint."""


def fingerprint(model: Qwen35Model) -> str:
    """SHA-256 over what decides a model's numbers, as it stands on the device.

    Config, every parameter's name, shape and type (so activations of another type, or weights that
    were dequantised, are another model), and a sample of each parameter's bytes.
    """
    digest = hashlib.sha256()
    config = dataclasses.asdict(model.config)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tree: Any = model.parameters()  # type: ignore[no-untyped-call]
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(tree))
    for name, array in sorted(parameters, key=lambda item: item[0]):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        flat = np.linspace(0, array.size - 1, min(array.size, _SAMPLES)).astype(np.int64)
        # By coordinates: flattening a transposed weight would copy it.
        places = np.unravel_index(flat, array.shape)
        digest.update(_bytes(array[tuple(mx.array(place) for place in places)]))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryFiles:
    """Writes and reads files for one engine."""

    fingerprint: str
    model: Qwen35Model
    pools: list[PagePool]
    """The trunk's attention layers."""
    mtp_pool: PagePool | None

    def write(
        self, boundary: Boundary, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        """Write a file, or nothing. Raises OSError."""
        tensors: dict[str, mx.array] = {}
        for index, state in enumerate(boundary.states):
            tensors |= {f"conv.{index}": state.conv, f"memory.{index}": state.memory}
        if boundary.mtp:
            tensors["carry"] = boundary.carry
        length = boundary.position
        for name, pool in self._layers(mtp=boundary.mtp):
            first = 1 if name == "mtp" else 0
            for part, stored in (("keys", pool.keys), ("values", pool.values)):
                rows = stored[mx.array(pages)].reshape(-1, *stored.shape[2:])[first:length]
                # Position 0 of the MTP layer is never written: what lies there is someone else's.
                rows = mx.pad(rows, [(first, 0), (0, 0), (0, 0)]) if first else rows
                tensors[f"{part}.{name}"] = mx.contiguous(rows)
        manifest = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "tokens": list(saved.tokens),
            "mtp": saved.mtp,
            "metadata": saved.metadata,
            "sha256": _digest(tensors),
        }
        _write_whole(path, tensors, {KEY: json.dumps(sealed(manifest))})

    def read(self, path: Path) -> SavedPrefix:
        """What a file says about itself. Raises ForeignFileError unless it is complete and fits."""
        return self._open(path)[0]

    def load(self, path: Path) -> tuple[SavedPrefix, dict[str, mx.array]]:
        """A file's tensors, in memory and intact. Raises ForeignFileError."""
        saved, digest = self._open(path)
        try:
            tensors = cast(dict[str, mx.array], mx.load(str(path), format="safetensors"))
            mx.eval(tensors)
        except (RuntimeError, ValueError, OSError) as error:
            raise ForeignFileError(f"{path}: MLX cannot read it: {error}") from error
        if _digest(tensors) != digest:
            raise ForeignFileError(f"{path}: damaged: its data is not what was written")
        return saved, tensors

    def place(
        self, saved: SavedPrefix, tensors: dict[str, mx.array], pages: NDArray[np.int32]
    ) -> Boundary:
        """Put a loaded file's prefix into pages, evaluated; returns its boundary."""
        length = len(saved.tokens)
        for name, pool in self._layers(mtp=saved.mtp):
            count, size = pages_needed(length, pool.keys.shape[1]), pool.keys.shape[1]
            where = mx.array(pages[:count])
            blocks = []
            for part in ("keys", "values"):
                rows = mx.pad(
                    tensors[f"{part}.{name}"], [(0, count * size - length), (0, 0), (0, 0)]
                )
                blocks.append(rows.reshape(count, size, *rows.shape[1:]))
            pool.keys[where], pool.values[where] = blocks
            mx.eval(pool.keys, pool.values)
        layers = len(self.model.zero_states(1))
        states = (
            RecurrentState(tensors[f"conv.{i}"], tensors[f"memory.{i}"]) for i in range(layers)
        )
        return Boundary(
            position=length,
            states=tuple(states),
            carry=tensors["carry"] if saved.mtp else self._no_carry(),
            mtp=saved.mtp,
        )

    def _no_carry(self) -> mx.array:
        """As rows without MTP history have it: a hidden that nobody reads, if there is a head."""
        width = 0 if self.mtp_pool is None else 1
        return mx.zeros((1, width, self.model.config.hidden_size), self._dtype)

    @property
    def _dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.model.model.norm.weight.dtype
        return dtype

    def _layers(self, *, mtp: bool) -> list[tuple[str, PagePool]]:
        named = [(str(index), pool) for index, pool in enumerate(self.pools)]
        if mtp and self.mtp_pool is not None:
            named.append(("mtp", self.mtp_pool))
        return named

    def _open(self, path: Path) -> tuple[SavedPrefix, str]:
        """Manifest checked, tensors checked against it by name, shape and type; and its digest."""
        try:
            header = read_header(path)
            manifest = _manifest(path)
        except CheckpointError as error:
            raise ForeignFileError(str(error)) from error
        if manifest.get("version") != VERSION:
            found = manifest.get("version")
            raise ForeignFileError(f"{path}: format version {found!r}, this engine reads {VERSION}")
        if sealed(manifest) != manifest:
            raise ForeignFileError(f"{path}: damaged: its manifest is not what was written")
        if manifest.get("fingerprint") != self.fingerprint:
            raise ForeignFileError(f"{path}: of another model, or of another type of weights")
        saved = _saved_prefix(path, manifest)
        if saved.mtp and self.mtp_pool is None:
            raise ForeignFileError(f"{path}: has MTP history, this engine does not draft")
        wanted = self._wanted(saved)
        if missing := sorted(wanted.keys() - header.keys()):
            raise ForeignFileError(f"{path}: tensor {missing[0]} is missing")
        if extra := sorted(header.keys() - wanted.keys()):
            raise ForeignFileError(f"{path}: unknown tensor {extra[0]}")
        for name, (dtype, shape) in wanted.items():
            found = header[name].dtype, header[name].shape
            if found != (dtype, shape):
                raise ForeignFileError(f"{path}: {name} is {found}, expected {(dtype, shape)}")
        return saved, str(manifest.get("sha256"))

    def _wanted(self, saved: SavedPrefix) -> dict[str, tuple[str, tuple[int, ...]]]:
        wanted = {}
        for index, state in enumerate(self.model.zero_states(1)):
            wanted[f"conv.{index}"] = _TYPES[state.conv.dtype], tuple(state.conv.shape)
            wanted[f"memory.{index}"] = _TYPES[state.memory.dtype], tuple(state.memory.shape)
        if saved.mtp:
            wanted["carry"] = _TYPES[self._dtype], (1, 1, self.model.config.hidden_size)
        for name, pool in self._layers(mtp=saved.mtp):
            shape = (len(saved.tokens), *pool.keys.shape[2:])
            for part in ("keys", "values"):
                wanted[f"{part}.{name}"] = _TYPES[pool.keys.dtype], shape
        return wanted


_TYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}
"""Names of types in a safetensors header."""


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the digest of everything else in it."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(rest, sort_keys=True)
    return rest | {"seal": hashlib.sha256(text.encode()).hexdigest()}


def _manifest(path: Path) -> dict[str, Any]:
    """The JSON manifest of a file whose header is known to be well formed."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        metadata = json.loads(handle.read(length)).get("__metadata__")
    try:
        manifest = json.loads(metadata[KEY])
    except (KeyError, TypeError, ValueError) as error:
        raise ForeignFileError(f"{path}: not a boundary file: it has no manifest") from error
    if not isinstance(manifest, dict):
        raise ForeignFileError(f"{path}: its manifest is not a JSON object")
    return manifest


def _saved_prefix(path: Path, manifest: dict[str, Any]) -> SavedPrefix:
    tokens, mtp, metadata = (manifest.get(key) for key in ("tokens", "mtp", "metadata"))
    if not (isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens)):
        raise ForeignFileError(f"{path}: its manifest names no tokens")
    if not isinstance(mtp, bool):
        raise ForeignFileError(f"{path}: its manifest does not say whether MTP history is in it")
    if not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise ForeignFileError(f"{path}: metadata in its manifest must be strings")
    return SavedPrefix(tokens=tuple(tokens), mtp=mtp, metadata=metadata)


def _bytes(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def _digest(tensors: dict[str, mx.array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _write_whole(path: Path, tensors: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Write beside `path`, flush to the disk, rename.

    The file beside has a name of its own: what a killed process left there, which in a container
    had the same process id, is in nobody's way.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    beside = Path(name)
    try:
        with open(number, "wb") as handle:
            mx.save_safetensors(handle, tensors, metadata)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, RuntimeError):
            raise OSError(f"{path}: cannot be written: {error}") from error
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
