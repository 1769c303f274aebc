"""The first phase: every row running at once, the queue full at once, and more refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.calls import Book, Clients, generate
from tests.benchmarks.soak.scale import Scale
from tests.benchmarks.soak.traffic import TEXTS

PATIENCE_S: Final = 600.0
"""For a machine with other work: prompts of 256 rows take a while."""

SHORT: Final = 8
"""Tokens of those that wait."""

Scrape = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What was seen, from metrics."""

    running: int
    waiting: int
    refused: int
    """Calls for which the full queue had no place."""


async def gather(clients: Clients, book: Book, scale: Scale, scrape: Scrape) -> Crowd:
    """Fills rows and queue. Those that run, and most that wait, then leave by their own will
    or by an `Abort`; the others are served. Returns when all have ended."""
    ends: list[asyncio.Task[None]] = []

    def send(kind: str, **how: Any) -> str:
        length = scale.crowd_tokens if kind == "crowd-run" else SHORT
        sampling = pb.SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.7)
        request = pb.GenerateRequest(text=TEXTS[0], sampling_params=sampling)
        call = book.call(kind)
        ends.append(asyncio.create_task(generate(clients, book, call, request, **how)))
        return call.request_id

    async def seen(name: str, least: int, seconds: float) -> int:
        """The most of a gauge, once it has been `least`, or when time is up."""
        most, until = 0, time.monotonic() + seconds
        while most < least and time.monotonic() < until:
            now = await asyncio.to_thread(scrape)
            most = max(most, int(now[f"selfdraft_{name}"]))
            await asyncio.sleep(0.2)
        return most

    runners = [send("crowd-run") for _ in range(scale.rows)]
    running = await seen("requests_running", scale.rows, PATIENCE_S)
    to_abort = [send("crowd-abort") for _ in range(scale.max_queue * 3 // 8)]
    leave = range(len(ends), len(ends) + scale.max_queue * 3 // 8)
    for _ in leave:
        send("crowd-leave")
    while len(ends) < scale.rows + scale.max_queue:
        send("crowd-wait")
    waiting = await seen("requests_waiting", scale.waiting, PATIENCE_S)
    for _ in range(max(scale.waiting // 10, 4)):
        send("crowd-over")
    await asyncio.sleep(1.0)
    for number in (*range(scale.rows // 2), *leave):
        ends[number].cancel()
    for request_id in (*runners[scale.rows // 2 :], *to_abort):
        await clients.inference.Abort(pb.AbortRequest(request_id=request_id))
    await asyncio.gather(*ends, return_exceptions=True)
    refused = sum(call.reason == "QUEUE_FULL" for call in book.calls)
    return Crowd(running=running, waiting=waiting, refused=refused)
