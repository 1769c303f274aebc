"""Files that are written whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

_STALE_S: Final = 3600.0
"""A file beside its place that is this old has no writer any more."""


def write_whole(path: Path, text: str, *, mode: int | None = None) -> None:
    """Writes beside `path`, flushes to the disk and renames. `mode`: permissions, by default the
    owner's alone. Removes what killed writers have left beside it. Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            Path(name).chmod(mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _remove_stale(path)


def _remove_stale(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*"):
        try:
            if left.stat().st_mtime < time.time() - _STALE_S:
                left.unlink()
        except OSError:  # another writer was faster, or it is not ours
            continue
