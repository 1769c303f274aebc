"""A selfdraft server as an operator starts it, on loopback, for tests that look from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anyio.from_thread import start_blocking_portal

from service.demo.process import ServerProcess, serving

MAX_ROWS = 4
MAX_QUEUE = 6


@contextmanager
def running_server() -> Iterator[ServerProcess]:
    """`selfdraft serve` on the bundled model, at most `MAX_ROWS` rows and `MAX_QUEUE` waiting, with
    a bound on gaps, so that there is something to see of it."""
    options = ["--max-rows", str(MAX_ROWS), "--max-queue", str(MAX_QUEUE), "--depth", "auto"]
    options += ["--max-token-gap", "0.5"]
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(options)) as server,
    ):
        yield server
