"""The client: what its user gets to see when a call ends in an unusual way."""

from __future__ import annotations

import asyncio

import anyio
import grpc
import pytest
from selfdraft import Client, SelfdraftError

from tests.service.harness import running

pytestmark = pytest.mark.anyio


async def test_iteration_ends_after_ones_own_cancel() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(text="x", max_tokens=3000, ignore_eos=True)
        seen = 0
        async for _ in generation:
            seen += 1
            if seen == 3:
                generation.cancel()
                generation.cancel()
        assert seen >= 3
        assert generation.complete is None
        await up.until_idle()


async def test_closing_the_client_ends_its_streams_with_an_error() -> None:
    async with running(step_s=0.002) as up:
        client = Client(up.target)
        generation = client.generate(text="x", max_tokens=3000, ignore_eos=True)
        await generation.request_id()
        read = asyncio.create_task(generation.text())
        await anyio.sleep(0.05)
        await client.close()
        await client.close()
        with pytest.raises(SelfdraftError) as caught:
            await read
        assert caught.value.code is grpc.StatusCode.CANCELLED
        await up.until_idle()


async def test_cancelling_the_task_cancels_the_generation() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(text="x", max_tokens=3000, ignore_eos=True)
        await generation.request_id()
        with anyio.move_on_after(0.05) as limit:
            await generation.text()
        assert limit.cancelled_caught
        await up.until_idle()
        task = asyncio.create_task(
            up.client.generate(text="x", max_tokens=3000, ignore_eos=True).text()
        )
        await anyio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await up.until_idle()


async def test_no_server_is_an_error_without_a_reason() -> None:
    async with Client("127.0.0.1:1") as client:
        for call in (client.model_info(), client.generate(text="x").text()):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason == ""
            assert caught.value.retry_after_s is None


async def test_a_message_may_be_built_by_hand() -> None:
    from selfdraft.client import chat_input
    from selfdraft.v1 import selfdraft_pb2 as pb

    async with running() as up:
        request = pb.GenerateRequest(chat=chat_input([("user", "x")], {"depth": {"of": [1, 2]}}))
        request.sampling_params.max_tokens = 3
        request.sampling_params.ignore_eos = True
        generation = up.client.start(request)
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.completion_tokens == 3
