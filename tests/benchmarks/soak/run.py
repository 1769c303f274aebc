"""One soak from the start of its server to its report."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.calls import Book, Clients
from tests.benchmarks.soak.crowd import gather
from tests.benchmarks.soak.ledger import Call, Log, checks
from tests.benchmarks.soak.probe import Probe
from tests.benchmarks.soak.process import Served
from tests.benchmarks.soak.report import Report
from tests.benchmarks.soak.samples import Sample, growth, look, watch
from tests.benchmarks.soak.scale import Scale
from tests.benchmarks.soak.traffic import Traffic

REST_S: Final = 120.0
"""In which a server must come to rest after the last client has left."""


def soak(scale: Scale) -> Report:
    """Starts a server, soaks it, stops it."""
    server = Served(scale)
    try:
        server.wait()
        return asyncio.run(_soak(server, scale))
    finally:
        server.stop()


async def _soak(server: Served, scale: Scale) -> Report:
    began = time.monotonic()
    idle = look(server, began)
    samples: list[Sample] = [idle]
    book, probe, clients = Book(), Probe(), Clients(server.target)
    watching = [
        asyncio.create_task(watch(server, began, scale.sample_s, samples)),
        asyncio.create_task(probe.run(server.target)),
    ]
    try:
        crowd = await gather(clients, book, scale, server.metrics)
        _say(began, f"{crowd}; now mixed traffic")
        mixed = len(samples)
        traffic = Traffic(clients, book, scale)
        until = max(began + scale.seconds, time.monotonic() + scale.round_s)
        hostile, _ = await asyncio.gather(_hostile(server.target, scale, until), traffic.run(until))
    finally:
        for task in watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    _say(began, f"{len(book.calls)} calls; now at rest")
    late = await probe.newcomer(server.target, timeout=10.0)
    at_rest = await _rest(server, clients, idle, began)
    await clients.close()
    theirs = [Call(**call) for kind in hostile.values() for call in kind["calls"]]
    return Report(
        scale=scale,
        seconds=round(time.monotonic() - began, 1),
        crowd=crowd,
        calls=[*book.calls, *theirs],
        well_behaved=len(book.calls),
        first_token_s=book.first_token_s,
        probe=probe,
        newcomer_after=late,
        unexpected=[*traffic.unexpected, *_defects(server)],
        hostile={kind: deeds["counts"] for kind, deeds in hostile.items()},
        samples=samples,
        idle=idle,
        at_rest=at_rest,
        growth=growth(samples[mixed:]),
        checks=checks([*book.calls, *theirs], Log.of(server.lines()), server.metrics()),
    )


def _say(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:.0f} s: {what}", file=sys.stderr, flush=True)


async def _hostile(target: str, scale: Scale, until: float) -> dict[str, Any]:
    """What the other process did."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.soak.hostile", "--target", target),
        *("--seconds", str(until - time.monotonic()), "--round", str(scale.round_s)),
        *("--slow-readers", str(scale.slow_readers), "--big-bytes", str(scale.big_bytes)),
        *("--connections", str(scale.connections)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the hostile clients failed with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


async def _rest(server: Served, clients: Clients, idle: Sample, began: float) -> Sample:
    """Waits until no call is answered and connections have gone; the sample then, or the last."""
    until = time.monotonic() + REST_S
    while True:
        info = await clients.inference.GetServerInfo(pb.GetServerInfoRequest())
        now = await asyncio.to_thread(look, server, began)
        quiet = not (info.active_calls or now.running or now.waiting)
        # The connections of these clients are open, those of the metrics page come and go.
        if quiet and now.files <= idle.files + len(clients.channels) + 4:
            await asyncio.sleep(1.5)  # lines that count a flood are written a second after it
            return await asyncio.to_thread(look, server, began)
        if time.monotonic() > until:
            return now
        await asyncio.sleep(0.5)


def _defects(server: Served) -> Sequence[str]:
    """Log lines that no client, however bad, may cause."""
    return [
        f"log: {line['event']}: {line.get('message', line.get('exception', ''))}"
        for line in server.lines()
        if line["level"] in ("error", "critical") or line["event"] == "library message"
    ]
