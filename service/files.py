"""File descriptors: as many as the system lets this process have, and connections to fit."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Final

from service.config import ServiceConfig
from service.logs import Logger

RESERVE: Final = 128
"""Descriptors that are no connections: files, the engine's, those of the metrics page."""


def fit_files(config: ServiceConfig, logger: Logger) -> ServiceConfig:
    """Raises the process's limit of open files as far as needed and allowed, and bounds
    `max_connections` to what that leaves: a server without a free descriptor accepts nobody."""
    wanted = config.server.max_connections + RESERVE
    had, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    have = had if _enough(had, wanted) else _raise_to(wanted, had, limit)
    if _enough(have, wanted):
        return config
    fits = max(have - RESERVE, have // 2, 1)
    logger.warning(
        "few open files allowed: fewer connections", max_connections=fits, open_files=have
    )
    return replace(config, server=replace(config.server, max_connections=fits))


def _enough(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _raise_to(wanted: int, had: int, limit: int) -> int:
    """Sets the soft limit to `wanted`, or the hard `limit` below it. Returns what it then is."""
    target = wanted if _enough(limit, wanted) else limit
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, limit))
    except (ValueError, OSError):  # macOS has a limit of its own below the one it reports
        return had
    return target
