"""All that guards a server's port, read and checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from service.config import ServiceConfig
from service.exposure import check_exposure, is_loopback
from service.logs import Logger
from service.sessionfiles import SessionFiles
from service.tls import Tls
from service.tokens import Tokens

NO_GATEWAY: Final = (
    "the gateway's protocol needs a token like every other, and smg sends none: behind smg serve "
    "without --tokens on a network of your own, elsewhere with --no-gateway"
)
"""Told at the start of a server that has tokens and speaks the gateway's protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What guards a server's port, read and checked."""

    tls: Tls | None
    tokens: Tokens | None
    files: SessionFiles | None
    admin: bool
    """Whether the Admin service is offered: where tokens tell an admin from others, or where only
    this machine can call."""

    @classmethod
    def of(cls, config: ServiceConfig, logger: Logger) -> Self:
        """Raises SettingError and FileError."""
        check_exposure(config)
        security = config.security
        tls = Tls(security.tls, logger) if security.tls else None
        tokens = Tokens(security.tokens, logger) if security.tokens else None
        files = SessionFiles(security.session_dir) if security.session_dir else None
        if files is not None:
            files.prepare()
        gate = cls(
            tls=tls,
            tokens=tokens,
            files=files,
            admin=tokens is not None or is_loopback(config.server.host),
        )
        for warning in gate.warnings():
            logger.warning("security", note=warning)
        if tokens is not None and config.server.gateway:
            logger.info("security", note=NO_GATEWAY)
        return gate

    def warnings(self) -> list[str]:
        """What an operator should know, one line each."""
        parts = [part for part in (self.tls, self.tokens) if part is not None]
        return [warning for part in parts for warning in part.warnings()]
