"""The tokenizer of a checkpoint as a zip archive: the gateway renders and tokenizes itself."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final

from smg_grpc_proto.generated import common_pb2 as common

FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tiktoken.model"),
    *("chat_template.json", "chat_template.jinja", "config.json", "generation_config.json"),
)
"""All that may be in it; config.json is there for the model's type and its end tokens."""

CHUNK_BYTES: Final = 64 * 1024
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""Times of files are left out: equal tokenizers are equal archives."""


def tokenizer_zip(directory: Path) -> bytes:
    """The archive; files that are not there are left out. Raises OSError when one cannot be
    read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            path = directory / name
            if path.is_file():
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[common.GetTokenizerChunk]:
    """`data` in messages; the last one carries the hash of all of it, in hexadecimal."""
    for start in range(0, len(data), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(data)
        yield common.GetTokenizerChunk(
            data=data[start : start + CHUNK_BYTES],
            sha256=sha256(data).hexdigest() if last else "",
        )
