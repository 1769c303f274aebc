"""Thousands of connections in one go."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time

from tests.benchmarks.soak.hostile.wire import PREFACE, Deeds, address, reset

HOLD_S = 5.0
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def attack(target: str, deeds: Deeds, until: float, round_s: float, many: int) -> None:
    """Opens `many`, half of them with a hello and half silent, holds them for seconds, and lets go.
    Twice at least, where there is time for it."""
    pause = 4 * round_s
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        await _flood(target, deeds, many, orderly=turn % 2 == 0)
        await asyncio.sleep(min(pause, max(until - time.monotonic(), 0)))


async def _flood(target: str, deeds: Deeds, many: int, *, orderly: bool) -> None:
    held: list[socket.socket] = []
    began = time.monotonic()
    try:
        for number in range(many):
            sock = socket.socket()
            held.append(sock)
            sock.setblocking(False)
            try:
                sock.connect(address(target))
            except BlockingIOError:
                pass
            except OSError:
                deeds.count("connections refused")
            if number % 200 == 199:
                await asyncio.sleep(0)
                for fresh in held[-200:-100]:
                    try:
                        fresh.send(PREFACE + SETTINGS)
                    except OSError:
                        deeds.count("closed before a word")
        deeds.count("connections opened", many)
        deeds.count("floods")
        await asyncio.sleep(HOLD_S)
        deeds.count("seconds to open and hold", round(time.monotonic() - began))
        deeds.count("still open after that", sum(map(_is_open, held)))
    finally:
        for sock in held:
            sock.close() if orderly else reset(sock)


def _is_open(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
