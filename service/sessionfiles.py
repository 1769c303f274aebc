"""The folder of exported sessions. What a request names is a name in it, never a path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.errors import Reason, ServiceError, Violation, invalid
from service.reload import FileError

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
"""No separator, and no dot in front: neither '..' nor a hidden file can be spelt."""

SUFFIX: Final = ".safetensors"
LEFTOVERS: Final = ".*.part"
"""What the engine writes before it renames it. After a crash such files are of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """One file that can be imported."""

    name: str
    bytes: int


class SessionFiles:
    """One folder, which this server alone writes to."""

    def __init__(self, folder: Path) -> None:
        """Nothing is touched before `prepare`."""
        self._folder = folder

    def prepare(self) -> None:
        """Makes the folder if it is not there and removes what a killed server left half written.

        Raises FileError when it cannot be written to.
        """
        folder = self._folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in folder.glob(LEFTOVERS):
                left.unlink()
            probe = folder / ".probe.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise FileError(f"session folder {folder}: {error.strerror}") from error

    def place(self, name: str) -> Path:
        """Where a file of this name stands. Raises ServiceError for what is no name."""
        if not NAME.fullmatch(name):
            limit = "must be 1 … 128 of A-Z a-z 0-9 . _ -, not beginning with a dot"
            raise invalid([Violation("name", limit)])
        return self._folder / f"{name}{SUFFIX}"

    def existing(self, name: str) -> Path:
        """A file to read. Raises ServiceError for what is no name, not there or a link out."""
        path = self.place(name)
        if path.is_symlink() or not path.is_file():
            raise ServiceError(Reason.NOT_FOUND, f"name: there is no session file {name!r}")
        return path

    def free(self, name: str, *, overwrite: bool) -> Path:
        """A place to write to. Raises ServiceError for what is no name, or taken."""
        path = self.place(name)
        if path.exists() and not overwrite:
            message = f"name: {name!r} exists; set overwrite to replace it"
            raise ServiceError(Reason.FILE_EXISTS, message)
        return path

    def list(self) -> list[SessionFile]:
        """By name. Raises OSError."""
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            name = path.name.removesuffix(SUFFIX)
            if NAME.fullmatch(name) and path.is_file():
                found.append(SessionFile(name=name, bytes=path.stat().st_size))
        return found
