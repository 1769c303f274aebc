"""From what a person typed to a checkpoint directory: a folder, a hub id, or the bundled model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt")
"""All a checkpoint needs. No pickles and no code are ever fetched."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelNotFoundError(Exception):
    """There is no checkpoint of this name; the text says where was looked."""


def resolve(model: str | None, *, revision: str | None = None, download: bool = True) -> Path:
    """The checkpoint's directory. `None` is the bundled model; a hub id is downloaded unless the
    hub's cache has it, with a progress bar on a terminal; with `download` off it must be there. A
    local directory needs no network.

    Raises ModelNotFoundError.
    """
    if model is None:
        from engine.tiny import MODEL_DIR

        return _directory(MODEL_DIR, "the bundled model")
    path = Path(model).expanduser()
    if path.exists() or not _HUB_ID.fullmatch(model):
        return _directory(path, "the model")
    return _from_hub(model, revision, download=download)


def display_name(model: str | None) -> str | None:
    """The name to serve it under: a hub id as it is; None for a directory, whose own name will
    do, because a path would tell clients about this machine."""
    if model is None or Path(model).expanduser().exists():
        return None
    return model


def _directory(path: Path, what: str) -> Path:
    if not path.is_dir():
        raise ModelNotFoundError(f"{what}: {path} is no directory")
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{what}: {path} holds no config.json")
    return path


def _from_hub(hub_id: str, revision: str | None, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(FILES),
            local_files_only=not download,
        )
    except Exception as error:  # the hub and its transports raise dozens of kinds
        cause = str(error).strip().splitlines()
        why = cause[0] if cause else type(error).__name__
        raise ModelNotFoundError(
            f"{hub_id}: no such directory, and the hub did not give it: {why}"
        ) from error
    return _directory(Path(path), hub_id)
