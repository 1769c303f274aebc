"""TLS of the gRPC port: certificates that are checked before they are used, and reloaded.

Every new connection gets the newest good pair: gRPC asks for it before each handshake. Connections
that stand keep the certificate they began with, until their maximal age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from service.config import TlsFiles
from service.logs import Logger
from service.reload import FileError, Reloading

EXPIRY_WARNING_DAYS: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """One consistent set of what the files hold."""

    server: grpc.ServerCertificateConfiguration
    names: tuple[str, ...]
    """Names and addresses the certificate is for."""
    expires: datetime


class Tls:
    """The certificates of one server."""

    def __init__(self, files: TlsFiles, logger: Logger) -> None:
        """Raises FileError for files that cannot be used: before a model is loaded."""
        self._files = files
        paths = [files.cert, files.key, *([files.client_ca] if files.client_ca else [])]
        self._loaded: Reloading[Certificates] = Reloading(
            paths, self._parse, what="TLS certificate", logger=logger
        )
        self._handed_out = self._loaded.current()

    @property
    def certificates(self) -> Certificates:
        """The newest good ones."""
        return self._loaded.current()

    @property
    def reloads(self) -> Mapping[str, int]:
        """Changes of the files so far, up to this moment: `ok` and `failed`."""
        self._loaded.current()
        return self._loaded.outcomes

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""
        fetch: Any = self._fetch
        return grpc.dynamic_ssl_server_credentials(
            self._handed_out.server,
            fetch,
            require_client_authentication=self._files.client_ca is not None,
        )

    def warnings(self, now: datetime | None = None) -> list[str]:
        """What an operator should know of the certificate, one line each."""
        left = self.certificates.expires - (now or datetime.now(UTC))
        if left.total_seconds() < 0:
            return [f"{self._files.cert}: expired on {self.certificates.expires:%Y-%m-%d}"]
        if left.days < EXPIRY_WARNING_DAYS:
            return [f"{self._files.cert}: expires in {left.days} days"]
        return []

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on a thread of its own, before each handshake; None: no change."""
        newest = self._loaded.current()
        if newest is self._handed_out:
            return None
        self._handed_out = newest
        return newest.server

    def _parse(self, contents: Sequence[bytes]) -> Certificates:
        chain_pem, key_pem, *rest = contents
        files = self._files
        try:
            leaf = x509.load_pem_x509_certificates(chain_pem)[0]
        except ValueError as error:
            raise FileError(f"{files.cert}: holds no PEM certificate") from error
        try:
            key = load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            # The library's own text might quote what it read.
            raise FileError(f"{files.key}: holds no PEM private key without a password") from error
        if _public(key.public_key()) != _public(leaf.public_key()):
            raise FileError(f"{files.key}: is not the key of the certificate in {files.cert}")
        if rest:
            _check_authorities(rest[0], files)
        return Certificates(
            server=grpc.ssl_server_certificate_configuration(
                [(key_pem, chain_pem)], root_certificates=rest[0] if rest else None
            ),
            names=_names(leaf),
            expires=leaf.not_valid_after_utc,
        )


def _public(key: Any) -> bytes:
    """A public key of whatever kind, comparable."""
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _check_authorities(pem: bytes, files: TlsFiles) -> None:
    try:
        x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise FileError(f"{files.client_ca}: holds no PEM certificate") from error


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in found)
