"""Read and check the header of one safetensors file, without MLX and without its weights.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}},
then the data; offsets count from the end of the header and must cover the data without gap or
overlap. Everything is checked against the file's size here, so that a truncated or forged file is
an error with a name before any reader maps it.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import CheckpointError

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
FLOAT_DTYPES = ("F32", "BF16", "F16")
"""Types a dense weight may be stored in."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a longer one is a forged length, not a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies: `offset` and `nbytes` are bytes in `file`, `name` is as stored."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Elements as stored (a packed quantised weight counts its words)."""
        return math.prod(self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, by stored name.

    Raises CheckpointError naming the file, and the tensor where it is one's fault.
    """
    try:
        with file.open("rb") as handle:
            size = file.stat().st_size
            head = handle.read(8)
            if len(head) < 8:
                raise CheckpointError(file, f"truncated: {size} bytes is no safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(file, _header_length_fault(head, length, size))
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from error
    entries = _parse(file, text)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()}
    _check_coverage(file, tensors, start=8 + length, size=size)
    return tensors


def read_floats(tensor: StoredTensor) -> NDArray[np.float32]:
    """Values of a tensor stored as F32, F16 or BF16. For small ones: reads it whole.

    Raises CheckpointError for any other type.
    """
    with tensor.file.open("rb") as handle:
        handle.seek(tensor.offset)
        raw = handle.read(tensor.nbytes)
    if tensor.dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        words = np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)
        values = words.view(np.float32)
    elif tensor.dtype in ("F16", "F32"):
        values = np.frombuffer(raw, "<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32)
    else:
        raise CheckpointError(
            tensor.file, f"{tensor.name} is {tensor.dtype}, not a float", tensors=(tensor.name,)
        )
    return values.reshape(tensor.shape)


def _header_length_fault(head: bytes, length: int, size: int) -> str:
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "is a pickle, not a safetensors file; pickles can run code and are never read"
    return f"truncated or corrupt: header of {length} bytes in a file of {size}"


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(file, f"corrupt header: {twice!r} appears twice")
        return dict(pairs)

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"corrupt header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(file, "corrupt header: not a JSON object")
    entries.pop("__metadata__", None)
    return entries


def _tensor(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    def naturals(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and naturals(shape) and naturals(span) and len(span) == 2):
        raise CheckpointError(file, f"corrupt header entry of {name}", tensors=(name,))
    if dtype not in ITEM_BYTES:
        raise CheckpointError(file, f"{name} has unknown dtype {dtype}", tensors=(name,))
    nbytes = span[1] - span[0]
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes != wanted:
        what = f"corrupt: {name} ({dtype} {shape}) needs {wanted} bytes, its offsets give {nbytes}"
        raise CheckpointError(file, what, tensors=(name,))
    return StoredTensor(
        file=file,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=start + span[0],
        nbytes=nbytes,
    )


def _check_coverage(file: Path, tensors: dict[str, StoredTensor], *, start: int, size: int) -> None:
    """The tensors must tile the data part exactly."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset + tensor.nbytes > size:
            what = (
                f"truncated: {tensor.name} ends at byte {tensor.offset + tensor.nbytes} of {size}"
            )
            raise CheckpointError(file, what, tensors=(tensor.name,))
        if tensor.offset != end:
            what = f"corrupt: {tensor.name} starts at byte {tensor.offset}, expected {end}"
            raise CheckpointError(file, what, tensors=(tensor.name,))
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(file, f"corrupt: {size - end} bytes after the last tensor")
