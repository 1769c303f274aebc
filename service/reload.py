"""Files that an operator replaces while the server runs: the newest good content of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from service.logs import Logger

T = TypeVar("T")

_RACY_NS: Final = 2_000_000_000
"""A file this young may change again without a new time stamp, so its content is compared."""

MAX_FILE_BYTES: Final = 4 << 20
"""Certificates and token files are small; what is larger is something else."""


class FileError(Exception):
    """A file of the configuration cannot be used; the text names it and says why, and holds
    nothing of its content."""


class Reloading(Generic[T]):
    """What `parse` makes of some files, read again whenever they change.

    Files that cannot be read or parsed leave the last good value in place, with one log line for
    each such content: files that belong together are replaced one after the other, and an editor
    may be caught half way. Safe to use from any thread.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        parse: Callable[[Sequence[bytes]], T],
        *,
        what: str,
        logger: Logger,
    ) -> None:
        """`parse` is given the files' contents in order and raises FileError for bad ones.

        Raises FileError when there is no good value to begin with.
        """
        self._paths = tuple(paths)
        self._parse = parse
        self._what = what
        self._logger = logger
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._tried = self._read()
        """Content that was parsed last, well or badly."""
        self._value = parse(self._tried)
        self._complaint = ""
        self.outcomes = {"ok": 0, "failed": 0}
        """Changes since the start, by whether they could be used."""

    def current(self) -> T:
        """The newest good value. Costs a `stat` per file while nothing changes; never raises."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp or self._is_racy(stamp):
                    self._stamp = stamp
                    self._reload()
            except FileError as error:
                self._refuse(str(error))
            return self._value

    def _reload(self) -> None:
        contents = self._read()
        if contents == self._tried:
            return
        self._tried = contents
        self._value = self._parse(contents)
        self._complaint = ""
        self.outcomes["ok"] += 1
        self._logger.info("reloaded", what=self._what)

    def _refuse(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            self.outcomes["failed"] += 1
            self._logger.warning("not reloaded, the last good one stays", what=self._what, why=why)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [path.stat() for path in self._paths]
        except OSError as error:
            raise _unreadable(error) from error
        return tuple((at.st_mtime_ns, at.st_size, at.st_ino) for at in found)

    @staticmethod
    def _is_racy(stamp: tuple[tuple[int, int, int], ...]) -> bool:
        return max(at[0] for at in stamp) > time.time_ns() - _RACY_NS

    def _read(self) -> list[bytes]:
        contents = []
        for path in self._paths:
            try:
                with path.open("rb") as file:
                    contents.append(file.read(MAX_FILE_BYTES + 1))
            except OSError as error:
                raise _unreadable(error) from error
            if len(contents[-1]) > MAX_FILE_BYTES:
                raise FileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        return contents


def _unreadable(error: OSError) -> FileError:
    return FileError(f"{error.filename}: {error.strerror}")
