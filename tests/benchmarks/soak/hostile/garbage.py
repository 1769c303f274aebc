"""Bytes that are no HTTP/2, frames that are no gRPC, messages that are no protobuf."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.hostile.wire import (
    GENERATE,
    PREFACE,
    Deeds,
    Http2,
    closed_by_server,
    connect,
    framed,
    reset,
)
from tests.benchmarks.soak.ledger import Call

PATIENCE_S = 30.0
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def attack(target: str, deeds: Deeds, until: float, round_s: float) -> None:
    """Each kind once a round."""
    chance = random.Random(5)
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        async with asyncio.TaskGroup() as tasks:
            for bytes_ in _streams(chance):
                tasks.create_task(_pour(target, deeds, *bytes_))
            for name, body in _bodies(chance, deeds.call("garbage", turn)):
                tasks.create_task(_call(target, deeds, name, body))
        await asyncio.sleep(min(round_s / 4, max(until - time.monotonic(), 0)))


def _streams(chance: random.Random) -> list[tuple[str, bytes]]:
    """What is sent instead of HTTP/2; the server has to close."""
    data = (100).to_bytes(3, "big") + bytes([0, 0]) + bytes(4) + chance.randbytes(100)
    return [
        ("random bytes", chance.randbytes(512)),
        ("HTTP/1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(506)),
        ("random frames", PREFACE + SETTINGS + chance.randbytes(4096)),
        ("data of stream 0", PREFACE + SETTINGS + data),
        ("frame above the limit", PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"),
        ("headers that do not decode", PREFACE + SETTINGS + _headers(chance.randbytes(200))),
    ]


def _headers(block: bytes) -> bytes:
    return len(block).to_bytes(3, "big") + b"\x01\x05" + (1).to_bytes(4, "big") + block


async def _pour(target: str, deeds: Deeds, name: str, data: bytes) -> None:
    try:
        sock = await connect(target)
    except OSError:
        deeds.count("connections refused")
        return
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        closed = await closed_by_server(sock, PATIENCE_S)
    except OSError:
        closed = True
    finally:
        reset(sock)
    deeds.count(f"{name}: {'closed' if closed else 'left open'}")


def _bodies(chance: random.Random, call: Call) -> list[tuple[str, bytes]]:
    """What is sent as the body of a call; the server has to answer. Only `call` can be read."""
    request = pb.GenerateRequest(request_id=call.request_id)
    unknown = b"\xc2\x3e\x7f" + chance.randbytes(127)  # field 1000, 127 bytes
    return [
        ("no message", b""),
        ("half a header", b"\x00\x00"),
        ("message shorter than said", framed(b"x", length=1000)),
        ("message larger than allowed", framed(b"x", length=2**31)),
        ("compressed, with what?", framed(b"\xff" * 100, compressed=1)),
        ("bad flag", framed(b"\xff" * 100, compressed=77)),
        ("no protobuf", framed(b"\xff" * 64)),
        ("a field nobody knows", framed(request.SerializeToString() + unknown)),
        ("two messages", framed(b"\xff" * 8) + framed(b"\xff" * 8)),
    ]


async def _call(target: str, deeds: Deeds, name: str, body: bytes) -> None:
    try:
        sock = await connect(target)
    except OSError:
        deeds.count("connections refused")
        return
    try:
        wire = Http2(sock)
        # gRPC makes an empty message of one whose flag it does not know: it is for a method whose
        # calls nobody counts.
        path = GENERATE.replace("Generate", "Tokenize") if name == "bad flag" else GENERATE
        status = await wire.answered(await wire.call(body, path=path), PATIENCE_S)
    except OSError:
        status = "closed"
    finally:
        reset(sock)
    deeds.count(f"{name}: status {status}")
