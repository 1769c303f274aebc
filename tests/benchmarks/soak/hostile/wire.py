"""HTTP/2 by hand: calls of gRPC over a socket that can be misused in every way."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import h2.config
import h2.connection
import h2.events
import h2.settings
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.benchmarks.soak.ledger import Call

GENERATE: Final = "/selfdraft.v1.Inference/Generate"
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ABRUPT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST."""


@dataclass(slots=True)
class Deeds:
    """What one kind of client did."""

    calls: list[Call] = field(default_factory=list)
    """`Generate` calls the server may have read."""
    counts: dict[str, int] = field(default_factory=dict)

    def call(self, kind: str, number: object) -> Call:
        call = Call(request_id=f"{kind}-{number}", kind=kind)
        self.calls.append(call)
        return call

    def count(self, what: str, many: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + many


def address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


async def connect(target: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A connected socket that does not block. Raises OSError."""
    sock = socket.socket()
    try:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address(target))
    except BaseException:
        sock.close()
        raise
    return sock


def reset(sock: socket.socket) -> None:
    """Closes with RST, as when a process is killed or a machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
    sock.close()


def framed(message: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    """A message with gRPC's five bytes before it."""
    return struct.pack(">BI", compressed, len(message) if length is None else length) + message


def question(call: Call, *, max_tokens: int) -> bytes:
    """A `Generate` request as bytes."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.7)
    request = pb.GenerateRequest(
        request_id=call.request_id, text="def endless():", sampling_params=sampling
    )
    return request.SerializeToString()


class Http2:
    """One connection. Nothing is read unless asked for. Raises OSError."""

    def __init__(self, sock: socket.socket, *, window: int | None = None) -> None:
        """`window`: bytes that the server may send on a stream before it is given more."""
        self.sock = sock
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        if window is not None:
            setting = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=setting)
        self.h2.initiate_connection()
        self._loop = asyncio.get_running_loop()

    async def flush(self) -> None:
        await self._loop.sock_sendall(self.sock, self.h2.data_to_send())

    def headers(self, path: str = GENERATE, *, more: tuple[tuple[str, str], ...] = ()) -> int:
        """Begins a call; returns its stream."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(
            stream,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "soak"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *more,
            ],
        )
        return stream

    async def call(self, body: bytes, *, path: str = GENERATE) -> int:
        """Sends headers and body; returns the stream."""
        stream = self.headers(path)
        self.h2.send_data(stream, body, end_stream=True)
        await self.flush()
        return stream

    async def events(self, limit: int = 65536) -> list[Any]:
        """What the next bytes hold; raises ConnectionError at their end."""
        data = await self._loop.sock_recv(self.sock, limit)
        if not data:
            raise ConnectionResetError("closed by the server")
        return list(self.h2.receive_data(data))

    async def answered(self, stream: int, seconds: float = 20.0) -> str:
        """Status that a stream ends with: gRPC's number, or how HTTP/2 ended it."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for event in await self.events():
                        if getattr(event, "stream_id", None) == stream:
                            headers = dict(getattr(event, "headers", None) or ())
                            if "grpc-status" in headers:
                                return str(headers["grpc-status"])
                            if isinstance(event, h2.events.StreamReset):
                                return "reset"
                    await self.flush()
        except TimeoutError:
            return "silence"
        except OSError:
            return "closed"


async def closed_by_server(sock: socket.socket, seconds: float) -> bool:
    """Reads until the server closes; False when it does not."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while await loop.sock_recv(sock, 65536):
                pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
