"""The limit of open files: raised where it may be, else connections fit it."""

from __future__ import annotations

import io
import resource

import pytest

from service.config import ServerConfig, ServiceConfig
from service.files import RESERVE, fit_files
from service.logs import make_logger
from tests.service.harness import service_config


class Limits:
    """Stands in for the system's; `stubborn` refuses every change."""

    def __init__(self, soft: int, hard: int, *, stubborn: bool = False) -> None:
        self.now = (soft, hard)
        self._stubborn = stubborn

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if self._stubborn:
            raise ValueError("current limit exceeds maximum limit")
        assert limits[1] == self.now[1]
        self.now = limits


def fitted(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> tuple[ServiceConfig, str]:
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    log = io.StringIO()
    config = service_config(server=ServerConfig(max_connections=1000))
    return fit_files(config, make_logger("json", log)), log.getvalue()


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(256, 100_000)
    config, log = fitted(limits, monkeypatch)
    assert limits.now == (1000 + RESERVE, 100_000)
    assert config.server.max_connections == 1000
    assert not log


@pytest.mark.parametrize("hard", [100_000, resource.RLIM_INFINITY])
def test_enough_is_left_alone(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(hard, hard)
    config, _ = fitted(limits, monkeypatch)
    assert limits.now == (hard, hard)
    assert config.server.max_connections == 1000


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(256, 600), 600 - RESERVE),
        (Limits(512, resource.RLIM_INFINITY, stubborn=True), 512 - RESERVE),
        (Limits(64, 64), 32),
    ],
)
def test_connections_fit_what_there_is(
    limits: Limits, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, log = fitted(limits, monkeypatch)
    assert config.server.max_connections == left
    assert "fewer connections" in log
