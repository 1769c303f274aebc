"""Bearer tokens: made here, shown once, stored as hashes, looked up in constant time.

    [[token]]
    tenant = "search"                  # 1 … 64 of A-Z a-z 0-9 . _ -
    hash = "sha256:9f86d0…"            # of the token; `selfdraft token new` prints this line
    admin = true                       # may use selfdraft.v1.Admin; default false
    expires = 2027-01-01T00:00:00Z     # with its time zone; default never

A tenant may have several tokens: that is how one is replaced without a gap. One that is withdrawn
or expires opens no further call; streams that run are finished.

Why plain SHA-256: a slow, salted hash protects secrets that people choose, which an attacker can
guess offline. These are 256 random bits. Whoever steals the file would have to try 2^255 of them,
and no factor of slowness changes that; it would only hand every caller a way to burn our CPU.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from service.auth import Identity
from service.logs import Logger
from service.reload import FileError, Reloading
from service.whole import write_whole

TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of tenants. They hold no '/', which separates a tenant from what is its own."""

PREFIX: Final = "sd_"
"""Begins every token, so that scanners for leaked secrets can know one."""

_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS: Final = frozenset({"tenant", "hash", "admin", "expires"})
_MAX_TOKEN_CHARS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """One line of the file."""

    identity: Identity
    digest: str = field(repr=False)
    expires: datetime | None = None


def new_token() -> str:
    """A fresh secret of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """What the file holds of a token."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def entry_text(
    token: str, *, tenant: str, admin: bool = False, expires: datetime | None = None
) -> str:
    """The lines to put in the file. Raises FileError for a name that is none."""
    if not TENANT.fullmatch(tenant):
        raise FileError("tenant: must be 1 … 64 of A-Z a-z 0-9 . _ -")
    lines = ["[[token]]", f'tenant = "{tenant}"', f'hash = "{digest_of(token)}"']
    lines += ["admin = true"] if admin else []
    lines += [f"expires = {expires.isoformat(timespec='seconds')}"] if expires else []
    return "\n".join(lines) + "\n"


def append_entry(path: Path, text: str) -> None:
    """Adds an entry to a token file, whole or not at all, and keeps its mode; a new file is the
    owner's alone. Raises FileError when the file cannot be used or the result would not do."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
        after = f"{before.rstrip()}\n\n{text}" if before.strip() else text
        read_entries(after.encode(), path)
        write_whole(path, after, mode=mode)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def _now() -> datetime:
    return datetime.now(UTC)


class Tokens:
    """The tokens of one server; the file is read again when it changes."""

    def __init__(self, path: Path, logger: Logger, clock: Callable[[], datetime] = _now) -> None:
        """Raises FileError for a file that cannot be used: before a model is loaded."""
        self._path = path
        self._clock = clock
        self._entries: Reloading[tuple[TokenEntry, ...]] = Reloading(
            [path], lambda contents: read_entries(contents[0], path), what="tokens", logger=logger
        )

    @property
    def entries(self) -> tuple[TokenEntry, ...]:
        """The newest good ones."""
        return self._entries.current()

    @property
    def reloads(self) -> Mapping[str, int]:
        """Changes of the file so far, up to this moment: `ok` and `failed`."""
        self._entries.current()
        return self._entries.outcomes

    def identify(self, token: str) -> Identity | None:
        """Whose token it is; None when it is nobody's, or no longer.

        Every entry is compared, each in constant time: how long this takes says nothing of which
        came close. (What is compared are hashes, whose bytes an attacker cannot steer anyway.)
        """
        if len(token) > _MAX_TOKEN_CHARS or not token.isascii():
            return None
        digest, found = digest_of(token), None
        for entry in self.entries:
            if hmac.compare_digest(digest, entry.digest):
                found = entry
        if found is None or self._expired(found):
            return None
        return found.identity

    def warnings(self) -> list[str]:
        """What an operator should know of the file, one line each."""
        found = [
            f"{self._path}: {entry.identity.tenant!r}'s token with hash {entry.digest[:15]}… "
            f"expired on {entry.expires:%Y-%m-%d}"
            for entry in self.entries
            if entry.expires is not None and self._expired(entry)
        ]
        if not self.entries:
            found.append(f"{self._path}: holds no token, so nobody can call")
        mode = self._path.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            found.append(
                f"{self._path}: others than its owner can write it ({stat.filemode(mode)}), "
                "and so let themselves in; chmod 640 it"
            )
        return found

    def _expired(self, entry: TokenEntry) -> bool:
        return entry.expires is not None and self._clock() >= entry.expires


def read_entries(content: bytes, path: Path) -> tuple[TokenEntry, ...]:
    """The entries of a token file. Raises FileError, which names what is at fault in `path` and
    quotes nothing of it."""
    try:
        table = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{path}: is not TOML ({error})") from error
    if unknown := table.keys() - {"token"}:
        raise FileError(f"{path}: {sorted(unknown)[0]}: there is only [[token]]")
    listed = table.get("token", [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise FileError(f"{path}: token: must be [[token]] tables")
    entries = []
    for index, entry in enumerate(listed):
        try:
            entries.append(_entry(entry))
        except FileError as fault:
            raise FileError(f"{path}: token[{index}].{fault}") from fault
    if len({entry.digest for entry in entries}) < len(entries):
        raise FileError(f"{path}: two entries have the same hash")
    return tuple(entries)


def _entry(table: dict[str, Any]) -> TokenEntry:
    if unknown := table.keys() - _FIELDS:
        raise FileError(f"{sorted(unknown)[0]}: must be one of {', '.join(sorted(_FIELDS))}")
    tenant, digest = table.get("tenant"), table.get("hash")
    admin, expires = table.get("admin", False), table.get("expires")
    if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
        raise FileError("tenant: must be 1 … 64 of A-Z a-z 0-9 . _ -")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise FileError("hash: must be sha256: and 64 hexadecimal digits, never a token itself")
    if not isinstance(admin, bool):
        raise FileError("admin: must be true or false")
    if expires is not None and not (isinstance(expires, datetime) and expires.tzinfo):
        raise FileError("expires: must be a time with its zone, e.g. 2027-01-01T00:00:00Z")
    identity = Identity(tenant=tenant, admin=admin)
    return TokenEntry(identity=identity, digest=digest, expires=expires)
