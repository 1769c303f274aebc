"""`GetLoads` and `GetServerInfo`: one snapshot's numbers, and what requests are held to."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import SelfdraftError
from selfdraft.messages import Priority
from selfdraft.v1 import selfdraft_pb2 as pb

from service.loads import acceptance, hit_rate, kv_usage, loads
from service.text.tokenizer import Tokenizer
from service.version import VERSION
from tests.service.harness import Running, running, service_config, tokenizer

pytestmark = pytest.mark.anyio


async def until_running(up: Running, rows: int, queued: int) -> None:
    with anyio.fail_after(5):
        while (up.statistics.running, up.statistics.queued_requests) != (rows, queued):
            await anyio.sleep(0.005)


async def test_loads_tell_queue_rows_and_pages() -> None:
    config = service_config(max_rows=2)
    async with running(config=config, max_rows=2, step_s=0.002) as up:
        idle = await up.client.loads()
        assert (idle.running_requests, idle.queued_requests, idle.kv_usage) == (0, 0, 0)
        assert (idle.max_rows, idle.kv_pages) == (2, up.statistics.pages_total)
        streams = [
            up.client.generate(token_ids=[9] * 40, max_tokens=900, ignore_eos=True)
            for _ in range(3)
        ]
        await until_running(up, 2, 1)
        await anyio.sleep(0.1)
        busy = await up.client.loads()
        assert (busy.running_requests, busy.queued_requests, busy.queued_tokens) == (2, 1, 40)
        assert busy.oldest_wait_seconds > 0.05
        assert busy.tokens_per_second > 0
        assert 0 < busy.kv_pages_used <= busy.kv_pages
        assert busy.kv_usage == busy.kv_pages_used / busy.kv_pages
        for stream in streams:
            stream.cancel()
        await up.until_idle()
        after = await up.client.loads()
        assert dict(after.finished_requests) == {"cancelled": 3}
        assert (after.submitted_requests, after.kv_pages_used) == (3, 0)
        assert busy.kv_pages_used <= after.kv_pages_peak <= after.kv_pages
        assert after.generated_tokens == up.statistics.generated_tokens > 0


async def test_prompt_tokens_ahead_are_those_not_prefilled_yet() -> None:
    config = service_config(max_rows=1, prefill_chunk=16)
    async with running(config=config, max_rows=1, step_s=0.01) as up:
        generation = up.client.generate(token_ids=[9] * 400, max_tokens=900, ignore_eos=True)
        await until_running(up, 1, 0)
        seen = [await up.client.loads()]
        with anyio.fail_after(5):
            while seen[-1].prefilling_requests:
                seen.append(await up.client.loads())
        ahead = [now.prefilling_tokens for now in seen]
        assert ahead == sorted(ahead, reverse=True)
        assert ahead[-1] == 0
        assert len(set(ahead)) > 5
        assert 200 < ahead[0] <= 400
        generation.cancel()


async def test_loads_tell_who_waits() -> None:
    config = service_config(max_rows=1)
    async with running(config=config, max_rows=1, step_s=0.002) as up:
        ask: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
        kinds: tuple[Priority, ...] = ("batch", "default", "batch")
        streams = [up.client.generate(text="x", priority="interactive", **ask)]
        await until_running(up, 1, 0)
        streams += [up.client.generate(text="x", priority=kind, **ask) for kind in kinds]
        await until_running(up, 1, 3)
        now = await up.client.loads()
        assert dict(now.queued_by_priority) == {"batch": 2, "default": 1, "interactive": 0}
        assert (dict(now.preemptions), now.preempted_requests) == ({"pages": 0, "priority": 0}, 0)
        for stream in streams:
            stream.cancel()


async def test_preemptions_are_told() -> None:
    config = service_config(max_rows=1)
    async with running(config=config, max_rows=1, step_s=0.002) as up:
        ask: dict[str, Any] = {"text": "x", "max_tokens": 900, "ignore_eos": True}
        low = up.client.generate(priority="batch", **ask)
        await until_running(up, 1, 0)
        high = up.client.generate(priority="interactive", **ask)
        with anyio.fail_after(5):
            while not (now := await up.client.loads()).preempted_requests:
                await anyio.sleep(0.005)
        assert dict(now.preemptions) == {"pages": 0, "priority": 1}
        assert dict(now.queued_by_priority) == {"batch": 1, "default": 0, "interactive": 0}
        assert now.running_requests == 1
        for stream in (low, high):
            stream.cancel()


async def test_pages_of_kept_prefixes_are_not_load() -> None:
    async with running(config=service_config(prefill_chunk=16), boundaries=8) as up:
        assert await up.works(token_ids=[7] * 200)
        await up.until_idle()
        now = await up.client.loads()
        assert now.kv_pages_cached > 0
        assert (now.kv_pages_used, now.kv_usage) == (0, 0)
        assert await up.works(token_ids=[7] * 200)
        again = await up.client.loads()
        assert again.cached_tokens > 0
        assert hit_rate(up.statistics) == pytest.approx(
            again.cached_tokens / (again.cached_tokens + again.prompt_tokens)
        )


async def test_loads_are_those_of_one_snapshot() -> None:
    async with running(step_s=0.001) as up:
        async with up.client.generate(text="x", max_tokens=60, ignore_eos=True) as generation:
            async for _ in generation:
                pass
        snapshot = up.statistics
        message = loads(snapshot)
        assert message.spec_draft_tokens == snapshot.drafted > 0
        assert message.spec_accepted_tokens == snapshot.accepted
        assert tuple(message.spec_draft_tokens_per_pos) == snapshot.drafted_per_position
        assert acceptance(snapshot) == snapshot.accepted / snapshot.drafted
        assert kv_usage(snapshot) == message.kv_usage
        assert dict(message.finished_requests) == {"length": 1}


async def test_server_info() -> None:
    config = service_config(max_queue=7, max_rows=3, depth=2)
    async with running(config=config, max_rows=5, ready=True) as up:
        info = await up.client.server_info()
        assert (info.version, info.state, info.depth) == (VERSION, "serving", "2")
        assert info.model == (await up.client.model_info()).model
        assert 0 <= info.uptime_seconds < 60
        assert "selfdraft.v1.Inference" in info.services
        assert "vllm.grpc.engine.VllmEngine" in info.services
        assert (info.limits.max_queue, info.limits.max_rows, info.limits.max_n) == (7, 3, 7)
        assert info.limits.max_message_bytes == config.server.max_message_bytes
        assert info.limits.max_messages == config.limits.max_messages
        assert info.limits.max_template_bytes == config.limits.max_template_bytes
        assert info.limits.max_grammar_chars == config.limits.grammar.max_chars
        with pytest.raises(SelfdraftError) as refused:
            await up.client.generate(text="x", stop=["y"] * 17).text()
        assert f"at most {info.limits.max_stop_strings}" in refused.value.message


async def test_active_calls_and_draining() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(text="x", max_tokens=2000, ignore_eos=True)
        await generation.request_id()
        assert (await up.client.server_info()).active_calls == 1
        up.server.stop.request()
        await anyio.sleep(0.05)
        info = await up.client.server_info()
        assert (info.state, info.active_calls) == ("draining", 1)
        assert (await up.client.loads()).running_requests == 1
        generation.cancel()


async def test_unknown_fields_are_refused() -> None:
    async with running() as up:
        for method in ("GetLoads", "GetServerInfo"):
            call = up.client._channel.unary_unary(
                f"/selfdraft.v1.Inference/{method}",
                request_serializer=bytes,
                response_deserializer=pb.GetLoadsResponse.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"\x08\x01")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "field number 1" in (refused.value.details() or "")


async def test_before_the_model_is_there() -> None:
    gate = threading.Event()

    def slow_tokenizer() -> Tokenizer:
        gate.wait(10)
        return tokenizer()

    async with running(with_tokenizer=slow_tokenizer, ready=False) as up:
        for call in (up.client.loads, up.client.server_info):
            with pytest.raises(SelfdraftError) as refused:
                await call()
            assert refused.value.reason == "LOADING"
        gate.set()
        with anyio.fail_after(5):
            await up.server.ready.wait()
        assert (await up.client.loads()).running_requests == 0
