"""A token file and what is in it."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from service.config import SecurityConfig, ServiceConfig
from service.logs import make_logger
from service.tokens import entry_text, new_token
from tests.service.harness import service_config

PAST = datetime(2020, 1, 1, tzinfo=UTC)


class Book:
    """A token file and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.toml"
        self.text = ""
        self.ada = self.add("ada")
        self.bob = self.add("bob")
        self.root = self.add("root", admin=True)

    def add(self, tenant: str, **options: Any) -> str:
        token = new_token()
        self.text += entry_text(token, tenant=tenant, **options)
        self.write(self.text)
        return token

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def config(self, **security: Any) -> ServiceConfig:
        return service_config(security=SecurityConfig(tokens=self.path, **security))


def silent(log: io.StringIO | None = None) -> Any:
    return make_logger("json", log or io.StringIO())
