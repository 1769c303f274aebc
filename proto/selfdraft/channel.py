"""Connections of the clients: plain, TLS or mTLS, with or without a bearer token."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

DEFAULT_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
)
"""Channel options: a dead connection is noticed within 40 s even on a silent stream."""


class InsecureTokenError(ValueError):
    """A token would travel in plain text where others can read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a client trusts a server, and proves itself to it. All of it is PEM."""

    root_certificates: bytes | None = None
    """Whom to trust; None: the authorities that gRPC brings along."""
    certificate_chain: bytes | None = None
    """The client's own certificate, for servers that ask for one (mTLS)."""
    private_key: bytes | None = field(default=None, repr=False)
    """Its key."""
    server_name: str | None = None
    """Name the server's certificate must have; None: that of the target."""

    @classmethod
    def of_files(
        cls,
        *,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> Self:
        """The same from files. Raises OSError, and ValueError for one of cert and key alone."""
        if (cert is None) != (key is None):
            raise ValueError("cert and key: a client certificate needs both")
        chain, secret = (None if path is None else Path(path).read_bytes() for path in (cert, key))
        return cls(
            root_certificates=None if ca is None else Path(ca).read_bytes(),
            certificate_chain=chain,
            private_key=secret,
            server_name=server_name,
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """A channel and what goes along with every call on it."""

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def connect(
    target: str,
    *,
    tls: Tls | None = None,
    token: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    insecure_token: bool = False,
    options: Sequence[tuple[str, Any]] = DEFAULT_OPTIONS,
) -> Connection:
    """Opens a channel to `target`, "host:port" or another of gRPC's names.

    Over TLS gRPC itself adds the token, and never sends it in plain text. Without, it is sent to
    this machine only, or with `insecure_token` anywhere. Raises InsecureTokenError, and ValueError
    for both `tls` and `credentials`.
    """
    if tls is not None and credentials is not None:
        raise ValueError("tls and credentials: give one of them")
    if token is not None and not token.isascii():
        raise ValueError("token: must be ASCII")
    if tls is not None:
        credentials = grpc.ssl_channel_credentials(
            tls.root_certificates, tls.private_key, tls.certificate_chain
        )
        if tls.server_name is not None:
            options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    if credentials is not None:
        if token is not None:
            bearer = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, bearer)
        return Connection(grpc.aio.secure_channel(target, credentials, options=options))
    channel = grpc.aio.insecure_channel
    if token is None:
        return Connection(channel(target, options=options))
    if not (insecure_token or is_loopback(target)):
        raise InsecureTokenError(
            f"{target}: without TLS a token goes to this machine only, for others would read it"
        )
    # Nor by way of a proxy that the environment names.
    options = (*options, ("grpc.enable_http_proxy", 0))
    return Connection(channel(target, options=options), (("authorization", f"Bearer {token}"),))


def is_loopback(target: str) -> bool:
    """Whether a target is this machine by its very name; nothing is resolved, so no answer of a
    name server decides where a token goes."""
    scheme, found, rest = target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if found and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]  # dns://authority/host:port
    host = target.rpartition(":")[0] if _has_port(target) else target
    host = host.strip("[]").lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_port(target: str) -> bool:
    return target.count(":") == 1 or "]:" in target
