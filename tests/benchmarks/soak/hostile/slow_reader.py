"""Reads one byte a second, and has the server wait for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

from tests.benchmarks.soak.hostile.wire import Deeds, Http2, connect, framed, question, reset

Work = Callable[[str, Deeds, float, str], Awaitable[None]]

WINDOW = 64
LONG = 600
"""Tokens: more than the server holds for a reader."""


async def attack(target: str, deeds: Deeds, until: float, readers: int) -> None:
    """`readers` at once: half take bytes from the socket, half give the stream's window."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(readers):
            work = by_socket if number % 2 else by_window
            tasks.create_task(_again(work, target, deeds, until, number))


async def _again(work: Work, target: str, deeds: Deeds, until: float, number: int) -> None:
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        try:
            await work(target, deeds, until, f"{number}-{turn}")
        except OSError:
            deeds.count("ended by the server")
        await asyncio.sleep(1.0)


async def by_socket(target: str, deeds: Deeds, until: float, name: str) -> None:
    """The smallest buffer the kernel gives, and a byte of it each second."""
    sock = await connect(target, receive_buffer=1)
    wire = Http2(sock)
    try:
        await wire.call(framed(question(deeds.call("slow-socket", name), max_tokens=LONG)))
        while time.monotonic() < until:
            await wire.events(limit=1)
            await wire.flush()
            deeds.count("bytes read")
            await asyncio.sleep(1.0)
    finally:
        reset(sock)


async def by_window(target: str, deeds: Deeds, until: float, name: str) -> None:
    """All that comes is read, but the server may send one byte more each second."""
    sock = await connect(target)
    wire = Http2(sock, window=WINDOW)
    try:
        stream = await wire.call(framed(question(deeds.call("slow-window", name), max_tokens=LONG)))
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(1.0):
                    events = await wire.events()
            except TimeoutError:
                events = []
            if any(type(event).__name__ in ("StreamEnded", "StreamReset") for event in events):
                deeds.count("ended by the server")
                return
            wire.h2.increment_flow_control_window(1, stream)
            deeds.count("bytes granted")
            await wire.flush()
    finally:
        reset(sock)
