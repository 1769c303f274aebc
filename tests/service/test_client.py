"""The client: what its user gets to see when a call ends in an unusual way."""

from __future__ import annotations

import asyncio
import json

import anyio
import grpc
import pytest
from selfdraft import Client, SelfdraftError
from selfdraft.messages import Sampling, chat_input, sampling_params
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.service.harness import EOS, running

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


async def test_leaving_the_loop_ends_the_generation() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(text="x", max_tokens=3000, ignore_eos=True)
        async for _ in generation:
            break
        await up.until_idle()
        assert up.finished("cancelled") == 1


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
    async with Client("127.0.0.1:1", retry=None) as client:
        for call in (client.model_info(), client.generate(text="x").text()):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason == ""
            assert caught.value.retry_after_s is None


def test_parameters_become_fields() -> None:
    schema = {"type": "object", "title": "é"}
    params = sampling_params(
        json_schema=schema, logit_bias={3: -1.5}, n=2, logprobs=0, repetition_penalty=1.25
    )
    assert json.loads(params.json_schema) == schema
    assert dict(params.logit_bias) == {3: -1.5}
    assert (params.n, params.HasField("logprobs"), params.repetition_penalty) == (2, True, 1.25)
    assert sampling_params(json_schema='{"a": 1}').json_schema == '{"a": 1}'
    assert json.loads(sampling_params(structural_tag={"format": {}}).structural_tag) == {
        "format": {}
    }
    # Every parameter there is can be given by name, and has its documentation in one place.
    fields = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert fields - Sampling.__annotations__.keys() == {"spaces_between_special_tokens"}
    assert Sampling.__annotations__.keys() <= fields


async def test_an_unknown_mode_is_told_before_anything_is_sent() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="speculation: must be one of auto, coupled"):
            client.generate(text="x", speculation="sometimes")  # type: ignore[arg-type]


async def test_texts_by_index_also_where_one_is_empty() -> None:
    async with running(token=lambda prompt, index: EOS) as up:
        generation = up.client.generate(text="x", n=3)
        assert await generation.texts() == ["", "", ""]
        assert sorted(generation.completes) == [0, 1, 2]


async def test_a_message_may_be_built_by_hand() -> None:
    async with running() as up:
        request = pb.GenerateRequest(chat=chat_input([("user", "x")], {"depth": {"of": [1, 2]}}))
        request.sampling_params.max_tokens = 3
        request.sampling_params.ignore_eos = True
        generation = up.client.start(request)
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.completion_tokens == 3
