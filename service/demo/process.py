"""A server as a process of its own, as an operator would start it."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 15.0


class ServerProcessError(Exception):
    """The server process did not start, or did not stop well."""


@dataclass
class ServerProcess:
    """A running `selfdraft serve`."""

    command: tuple[str, ...]
    grpc: str = ""
    metrics: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    """The newest lines of its log, for when something goes wrong."""


@asynccontextmanager
async def serving(arguments: Sequence[str]) -> AsyncIterator[ServerProcess]:
    """Runs `selfdraft serve` on free loopback ports for the length of the block, then stops it
    with SIGTERM. Raises ServerProcessError."""
    options = ["--port", "0", "--metrics-port", "0", "--log-format", "json", *arguments]
    server = ServerProcess(command=("selfdraft", "serve", *arguments))
    command = [sys.executable, "-m", "service.cli", "serve", *options]
    async with await anyio.open_process(command, stdin=None, stdout=None) as process:
        started = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_log, process, server, started)
            try:
                with anyio.move_on_after(START_LIMIT_S):
                    await started.wait()
                if not server.grpc:
                    raise ServerProcessError(_said(server, "the server did not start"))
                yield server
            finally:
                with anyio.CancelScope(shield=True):
                    await _stop(process)
                tasks.cancel_scope.cancel()
    if process.returncode:
        raise ServerProcessError(_said(server, f"the server ended with {process.returncode}"))


async def _read_log(process: Process, server: ServerProcess, started: anyio.Event) -> None:
    assert process.stderr is not None
    rest = ""
    async for text in TextReceiveStream(process.stderr, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.strip():
                _take(line, server, started)
    started.set()  # its log is closed: it will not start any more


def _take(line: str, server: ServerProcess, started: anyio.Event) -> None:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        entry = None
    if isinstance(entry, dict) and entry.get("event") == "serving":
        server.grpc, server.metrics = entry["address"], entry["metrics"]
        started.set()
    elif not (isinstance(entry, dict) and entry.get("event") == "request"):
        server.tail.append(line)


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with anyio.move_on_after(STOP_LIMIT_S):
        await process.wait()
        return
    process.kill()


def _said(server: ServerProcess, what: str) -> str:
    return f"{what}; it said: " + (" | ".join(server.tail) or "nothing")
