"""Requests that do not end well: who is told what, and that nothing of them remains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import anyio
import grpc
import grpc.aio
import pytest
from selfdraft import Client, Generation, SelfdraftError

from service.config import ServerConfig
from tests.service.harness import Running, running, saying, service_config

pytestmark = pytest.mark.anyio


async def first_chunk(
    up: Running, request_id: str, *, client: Client | None = None, timeout: float | None = None
) -> Generation:
    """Starts an endless request and returns once it streams."""
    generation = (client or up.client).generate(
        text="x", max_tokens=3000, ignore_eos=True, request_id=request_id, timeout=timeout
    )
    assert await generation.request_id() == request_id
    chunks = generation.__aiter__()
    await chunks.__anext__()
    up.streams[request_id] = chunks
    return generation


async def rest(up: Running, request_id: str) -> SelfdraftError:
    """The error the stream ends with."""
    chunks = up.streams[request_id]
    with pytest.raises(SelfdraftError) as caught:
        async for _ in chunks:
            pass
    return caught.value


async def test_closing_the_stream_frees_everything() -> None:
    async with running(step_s=0.002) as up:
        call = await first_chunk(up, "a")
        assert up.statistics.running == 1
        call.cancel()
        await up.until_idle()
        assert up.finished("cancelled") == 1
        (line,) = up.log_lines()
        assert (line["status"], line["reason"]) == ("CANCELLED", "CANCELLED")
        assert 0 < line["completion_tokens"] < 3000
        assert line["e2e_s"] > 0


async def test_leaving_the_block_cancels() -> None:
    async with running(step_s=0.002) as up:
        async with up.client.generate(text="x", max_tokens=3000, ignore_eos=True) as generation:
            async for _ in generation:
                break
        await up.until_idle()
        assert up.statistics.generated_tokens < 3000


async def test_a_client_that_vanishes_frees_everything() -> None:
    async with running(step_s=0.002) as up:
        gone = Client(up.target)
        for n in range(5):
            await first_chunk(up, str(n), client=gone)
        assert up.statistics.running == 5
        await gone.close()
        await up.until_idle()
        assert up.finished("cancelled") == 5


async def test_cancel_while_queued_and_before_the_first_token() -> None:
    async with running(step_s=0.002, max_rows=1) as up:
        await first_chunk(up, "running")
        waiting = up.client.generate(text="x", request_id="waiting")
        assert await waiting.request_id() == "waiting"
        assert up.statistics.queued_requests == 1
        waiting.cancel()
        with anyio.fail_after(2):
            while up.statistics.queued_requests:
                await anyio.sleep(0.005)
        assert up.statistics.running == 1
        assert await up.client.abort("running")
        await up.until_idle()


async def test_abort_ends_the_stream_of_another_client() -> None:
    async with running(step_s=0.002) as up, Client(up.target) as other:
        await first_chunk(up, "mine")
        assert await other.abort("mine")
        error = await rest(up, "mine")
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        assert not await other.abort("mine")
        assert not await other.abort("never-was")
        await up.until_idle()


async def test_duplicate_live_id_is_refused_and_a_finished_one_is_free() -> None:
    async with running(step_s=0.002) as up:
        await first_chunk(up, "twice")
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", request_id="twice").text()
        assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
        assert caught.value.reason == "DUPLICATE_REQUEST"
        assert caught.value.violations[0].field == "request_id"
        assert up.statistics.running == 1
        await up.client.abort("twice")
        await rest(up, "twice")
        assert await up.works(request_id="twice")


async def test_deadline_ends_running_and_queued_requests() -> None:
    async with running(step_s=0.002, max_rows=1) as up:
        await first_chunk(up, "running", timeout=0.4)
        started = time.monotonic()
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", request_id="queued", timeout=0.2).text()
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        error = await rest(up, "running")
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 2
        await up.until_idle()
        with anyio.fail_after(2):
            while len(up.log_lines()) < 2:
                await anyio.sleep(0.01)
        assert {line["status"] for line in up.log_lines()} == {"DEADLINE_EXCEEDED"}


async def test_full_queue_refuses_with_a_delay() -> None:
    config = service_config(max_queue=2)
    async with running(config=config, step_s=0.002, max_rows=1) as up:
        await first_chunk(up, "running")
        for name in ("one", "two"):
            assert await up.client.generate(text="x", request_id=name).request_id() == name
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x").text()
        error = caught.value
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        assert "max_queue" in error.message
        for name in ("running", "one", "two"):
            await up.client.abort(name)
        await up.until_idle()


async def test_a_fault_costs_one_request_only() -> None:
    async with running(step_s=0.001, faults={(9, 9): 5}) as up:
        good = up.client.generate(token_ids=[8], max_tokens=60, ignore_eos=True)
        bad = up.client.generate(token_ids=[9, 9], max_tokens=60, ignore_eos=True)
        with pytest.raises(SelfdraftError, match="scripted fault") as caught:
            await bad.text()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "ROW_FAULT")
        await good.text()
        assert good.complete is not None
        assert good.complete.completion_tokens == 60
        await up.until_idle()


async def test_a_slow_reader_is_ended_and_the_others_go_on() -> None:
    config = service_config(slow_reader_timeout_s=0.3, stream_buffer=64)
    config = replace(config, server=replace(config.server, write_timeout_s=1.0))
    async with running(
        config=config, token=saying("x" * 50), context_length=200_000, pages=20_000
    ) as up:
        # No reads at all: the client's window and then the stream's buffer fill up.
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
        async with Client(up.target, options=window) as lazy:
            slow = lazy.generate(text="x", max_tokens=150_000, request_id="slow")
            assert await slow.request_id() == "slow"
            with anyio.fail_after(10):
                while not up.finished("slow_reader"):
                    await anyio.sleep(0.02)
            quick = up.client.generate(text="x", max_tokens=50, ignore_eos=True)
            assert await quick.text()
            with pytest.raises(SelfdraftError) as caught:
                await slow.text()
            assert caught.value.reason == "SLOW_READER"
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await up.until_idle()


async def test_oversized_message_is_refused_before_it_is_read() -> None:
    config = service_config(server=ServerConfig(max_message_bytes=2048))
    async with running(config=config) as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x" * 5000).text()
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await up.works()


async def test_garbage_on_the_socket_leaves_the_server_alive() -> None:
    async with running() as up:
        host, port = up.target.split(":")
        for payload in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x00" * 1000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
            bytes(range(256)) * 20,
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(payload)
            with anyio.move_on_after(0.2):
                await reader.read()
            writer.close()
        assert await up.works()


async def test_a_defect_of_ours_is_internal_and_named_in_the_log() -> None:
    async with running() as up:
        up.defects_expected = True
        backend = up.server.door.look()

        def broken(text: str, **_: object) -> tuple[int, ...]:
            raise KeyError("a secret of the implementation")

        backend.tokenizer.encode = broken  # type: ignore[method-assign]
        for call in (up.client.generate(text="x").text(), up.client.tokenize(text="x")):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.INTERNAL,
                "INTERNAL",
            )
            assert "secret" not in caught.value.message
        assert "secret" in up.log.getvalue()
        assert await up.works(token_ids=[5])


async def test_random_cancels_leave_nothing_behind() -> None:
    async with running(step_s=0.001, max_rows=4) as up:

        async def one(n: int) -> None:
            with anyio.move_on_after(0.01 * (n % 13)):
                async with up.client.generate(
                    text="def " * (1 + n % 5), max_tokens=5 + 20 * (n % 7), ignore_eos=True
                ) as generation:
                    async for _ in generation:
                        if n % 5 == 0:
                            return

        async with anyio.create_task_group() as tasks:
            for n in range(60):
                tasks.start_soon(one, n)
        await up.until_idle()
        # Nobody is left, and the server still works.
        assert await up.works()
        await up.until_idle()
        with anyio.fail_after(2):
            await up.idle()
