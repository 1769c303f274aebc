"""Clients that are gone in the middle: connections reset, and such that are open and silent."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

from tests.benchmarks.soak.hostile.wire import Deeds, Http2, connect, framed, question, reset

LONG = 200


async def attack(target: str, deeds: Deeds, until: float, round_s: float) -> None:
    """Each round some connections with a few calls each are reset, others are left unread."""
    chance = random.Random(3)
    silent: list[Http2] = []
    for turn in itertools.count():
        if time.monotonic() >= until:
            break
        for number in range(4):
            wire = await _calls(target, deeds, f"reset-{turn}-{number}", chance.randint(1, 4))
            if wire is not None:
                await asyncio.sleep(chance.uniform(0.0, 1.5))
                reset(wire.sock)
                deeds.count("connections reset")
        if (wire := await _calls(target, deeds, f"silent-{turn}", 2)) is not None:
            silent.append(wire)
            deeds.count("connections left unread")
        if len(silent) > 3:
            reset(silent.pop(0).sock)
        await asyncio.sleep(min(round_s / 4, max(until - time.monotonic(), 0)))
    for wire in silent:
        reset(wire.sock)


async def _calls(target: str, deeds: Deeds, name: str, many: int) -> Http2 | None:
    try:
        wire = Http2(await connect(target))
        for number in range(many):
            call = deeds.call("vanish", f"{name}-{number}")
            await wire.call(framed(question(call, max_tokens=LONG)))
    except OSError:
        deeds.count("connections refused")
        return None
    return wire
