"""The files of this checkout as git sees them, for tests that read source instead of running it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

# Where git is missing (an unpacked archive), these hold nothing of ours.
_NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "node_modules"}


@cache
def files() -> tuple[PurePosixPath, ...]:
    """Every file that is tracked or would be: committed, staged, or new and not ignored."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listing = [
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if not _NOT_OURS.intersection(path.relative_to(ROOT).parts)
        ]
    # A file deleted but not yet staged is still listed.
    return tuple(
        PurePosixPath(name) for name in sorted(listing) if name and (ROOT / name).is_file()
    )


def python_files() -> tuple[PurePosixPath, ...]:
    return tuple(path for path in files() if path.suffix == ".py")


def read(path: PurePosixPath) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
