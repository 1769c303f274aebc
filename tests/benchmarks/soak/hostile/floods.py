"""Floods: rapid resets (CVE-2023-44487), pings, settings, headers without end, calls without a
message, handshakes that never finish. Bounded, for the machine is shared with the well-behaved."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import h2.exceptions

from tests.benchmarks.soak.hostile.wire import (
    PREFACE,
    Deeds,
    Http2,
    closed_by_server,
    connect,
    framed,
    reset,
)


async def attack(target: str, deeds: Deeds, until: float, round_s: float, size: int) -> None:
    """One flood of `size` frames after the other."""
    floods: tuple[Callable[[Http2, Deeds, int], Awaitable[None]], ...] = (
        resets,
        pings,
        settings,
        huge_headers,
        silent_calls,
    )
    late: list[asyncio.Task[None]] = []
    for turn in itertools.count():
        if time.monotonic() >= until:
            break
        flood = floods[turn % len(floods)]
        late.append(asyncio.create_task(half_preface(target, deeds)))
        try:
            sock = await connect(target)
        except OSError:
            deeds.count("connections refused")
        else:
            try:
                await flood(Http2(sock), deeds, size)
                deeds.count(f"{flood.__name__}: done")
            except (OSError, h2.exceptions.H2Error):
                deeds.count(f"{flood.__name__}: cut off by the server")
            finally:
                reset(sock)
        await asyncio.sleep(min(round_s / 6, max(until - time.monotonic(), 0)))
    await asyncio.gather(*late)


async def resets(wire: Http2, deeds: Deeds, size: int) -> None:
    """Calls that are reset as soon as they have begun."""
    for start in range(0, size, 50):
        for _ in range(min(50, size - start)):
            wire.h2.reset_stream(wire.headers(), error_code=8)
            deeds.count("calls reset at once")
        await wire.flush()
        await asyncio.sleep(0)


async def pings(wire: Http2, deeds: Deeds, size: int) -> None:
    for start in range(0, size, 50):
        for _ in range(50):
            wire.h2.ping(start.to_bytes(8, "big"))
        deeds.count("pings", 50)
        await wire.flush()
    await wire.answered(1, 0.5)


async def settings(wire: Http2, deeds: Deeds, size: int) -> None:
    for start in range(0, size, 50):
        for number in range(50):
            wire.h2.update_settings({3: 100 + number + start})
        deeds.count("settings", 50)
        await wire.flush()
    await wire.answered(1, 0.5)


async def huge_headers(wire: Http2, deeds: Deeds, size: int) -> None:
    """A call with a megabyte of metadata, in small pieces."""
    for number in range(8):
        more = tuple((f"x-{number}-{n}", "y" * 4000) for n in range(32))
        stream = wire.headers("/selfdraft.v1.Inference/GetLoads", more=more)
        wire.h2.send_data(stream, framed(b""), end_stream=True)
        await wire.flush()
        status = await wire.answered(stream, 5.0)
        deeds.count(f"huge headers: status {status}")
        if status in ("closed", "silence"):
            return


async def silent_calls(wire: Http2, deeds: Deeds, size: int) -> None:
    """Headers of calls, and no message, for as long as the server bears it, or some seconds."""
    for _ in range(min(size // 10, 100)):
        wire.headers()
        deeds.count("calls without a message")
    await wire.flush()
    await closed_by_server(wire.sock, 5.0)


async def half_preface(target: str, deeds: Deeds) -> None:
    """Begins to say hello, and stops."""
    try:
        sock = await connect(target)
        try:
            await asyncio.get_running_loop().sock_sendall(sock, PREFACE[:10])
            closed = await closed_by_server(sock, 40.0)
        finally:
            reset(sock)
        deeds.count(f"half a preface: {'closed' if closed else 'left open'}")
    except OSError:
        deeds.count("connections refused")
