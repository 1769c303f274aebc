"""Who can reach an address: a server does not listen to the world in plain text by accident."""

from __future__ import annotations

import ipaddress
import socket

from service.config import ServiceConfig, SettingError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name counts when all it resolves to is loopback.

    Raises SettingError for a name that does not resolve.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingError("host", f"{host!r} does not resolve to an address") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return bool(addresses) and all(address.is_loopback for address in addresses)


def check_exposure(config: ServiceConfig) -> None:
    """Raises SettingError for an address that others reach, without TLS and without the operator's
    word that this is meant."""
    server = config.server
    if config.security.tls is not None or server.insecure or is_loopback(server.host):
        return
    raise SettingError(
        "host",
        f"{server.host} can be reached from other machines, and there is no TLS: give --tls-cert "
        "and --tls-key, listen on 127.0.0.1, or say --insecure if something in front encrypts",
    )


def metrics_host(config: ServiceConfig) -> str:
    """Where the Prometheus endpoint listens. It is plain HTTP, so beyond loopback it goes only
    where it is told to, or along with a gRPC port that is plain on purpose."""
    server = config.server
    if server.metrics_host is not None:
        return server.metrics_host
    if server.insecure or is_loopback(server.host):
        return server.host
    return "127.0.0.1"
