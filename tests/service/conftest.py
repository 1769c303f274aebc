"""Fixtures of the service tests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from service.logs import _Forward
from tests.service.books import Book


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """grpc.aio runs on asyncio only."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all tests, as a process has: grpc.aio's completion queue is global,
    and what a connection still has to say when its test ends must find its loop open."""
    yield
    await anyio.sleep(0.05)  # for what the last test's connections still have to say


@pytest.fixture(autouse=True)
def no_log_of_an_earlier_command() -> Iterator[None]:
    """A command that ran in this process must not get what libraries log in later tests: its
    stderr is closed by then."""
    yield
    for handler in list(logging.root.handlers):
        if isinstance(handler, _Forward):
            logging.root.removeHandler(handler)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)
