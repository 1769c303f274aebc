"""What a gateway asks before it sends anything: health, model, server, load, tokenizer."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import anyio
import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import (
    mlx_engine_pb2,
    mlx_engine_pb2_grpc,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
    trtllm_service_pb2,
    trtllm_service_pb2_grpc,
)
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common
from tokenizers import Tokenizer as RawTokenizer

from engine.config import EngineConfig
from engine.tiny import MODEL_DIR
from service.config import ServerConfig
from service.gateway.bundle import CHUNK_BYTES, FILES, chunks, tokenizer_zip
from service.gateway.servicer import SERVICE
from service.text.tokenizer import Tokenizer
from service.version import VERSION
from tests.service.gateway.calls import PROMPT, ask, connected, read, refusal
from tests.service.harness import running, service_config, tokenizer

pytestmark = pytest.mark.anyio


async def test_health_follows_the_servers_life() -> None:
    gate = threading.Event()

    def slow_tokenizer() -> Tokenizer:
        gate.wait(10)
        return tokenizer()

    async with (
        running(with_tokenizer=slow_tokenizer, ready=False, step_s=0.002) as up,
        connected(up) as stub,
    ):
        try:
            # Not an answer: whoever answers is registered, and asked for its model.
            error = await refusal(stub.HealthCheck(vllm.HealthCheckRequest()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            for call in (
                stub.GetModelInfo(vllm.GetModelInfoRequest()),
                stub.GetServerInfo(vllm.GetServerInfoRequest()),
                stub.GetLoads(vllm.GetLoadsRequest()),
                stub.GetTokenizer(common.GetTokenizerRequest()),
                stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()),
                stub.Generate(ask()),
            ):
                assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
        finally:
            gate.set()
        with anyio.fail_after(5):
            await up.server.ready.wait()
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert (health.healthy, health.message) == (True, "serving")
        generation = up.client.generate(text="x", max_tokens=2000, ignore_eos=True)
        await generation.request_id()
        up.server.stop.request()
        await anyio.sleep(0.05)
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "draining")
        assert (await refusal(stub.Generate(ask()))).code() is grpc.StatusCode.UNAVAILABLE
        generation.cancel()


async def test_other_engines_are_not_here() -> None:
    """The gateway asks for the health of several, and takes the first that answers."""
    others = (
        (sglang_scheduler_pb2_grpc.SglangSchedulerStub, sglang_scheduler_pb2),
        (trtllm_service_pb2_grpc.TrtllmServiceStub, trtllm_service_pb2),
        (tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub, tokenspeed_scheduler_pb2),
        (mlx_engine_pb2_grpc.MlxEngineStub, mlx_engine_pb2),
    )
    async with running() as up, grpc.aio.insecure_channel(up.target) as channel:
        for stub, messages in others:
            error = await refusal(stub(channel).HealthCheck(messages.HealthCheckRequest()))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_this_server_does_not_have() -> None:
    async with running() as up, connected(up) as stub:
        for call in (
            stub.Embed(vllm.EmbedRequest()),
            stub.FlushCache(common.FlushCacheRequest()),
            stub.StartProfile(common.StartProfileRequest()),
            stub.StopProfile(common.StopProfileRequest()),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "no such thing" in (error.details() or "")


async def test_model_and_server() -> None:
    config = replace(service_config(max_rows=3), model_name="org/name")
    config = replace(config, engine=EngineConfig(model=MODEL_DIR))
    async with running(config=config, max_rows=5, page_size=32) as up, connected(up) as stub:
        info = up.server._scheduler.info if up.server._scheduler else None
        assert info is not None
        model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (model.served_model_name, model.model_path) == ("org/name", "org/name")
        assert (model.model_type, list(model.architectures)) == (
            "qwen3_5",
            json.loads((MODEL_DIR / "config.json").read_text())["architectures"],
        )
        assert model.is_generation
        assert not model.supports_vision
        assert model.max_context_length == info.context_length
        assert model.vocab_size == info.vocab_size
        assert tuple(model.eos_token_ids) == tokenizer().eos_ids
        assert model.pad_token_id == 4093
        # Neither a folder of the gateway's machine nor a name on the hub.
        assert not Path(model.tokenizer_path).exists()
        assert ":" in model.tokenizer_path
        assert str(MODEL_DIR) not in str(model)
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.data_parallel_size, server.block_size, server.max_num_seqs) == (1, 32, 3)
        assert (server.active_requests, server.is_paused) == (0, False)
        assert server.constrained_decoding_start == "first_token"
        assert server.kv_connector == ""


async def test_loads() -> None:
    config = service_config(max_rows=1, prefill_chunk=16)
    async with (
        running(config=config, max_rows=1, step_s=0.002, boundaries=8) as up,
        connected(up) as stub,
    ):
        assert await up.works(token_ids=[7] * 200)
        await up.until_idle()
        response = await stub.GetLoads(vllm.GetLoadsRequest(include=["core", "memory"]))
        assert (response.version, response.dp_rank_count) == (VERSION, 1)
        assert response.timestamp.endswith("+00:00")
        [load] = response.loads
        assert up.statistics.pages_used == up.statistics.pages_cached > 0
        # A worker that looks full gets nothing more; kept prefixes make room for who comes.
        assert (load.token_usage, load.num_used_tokens) == (0, 0)
        call = stub.Generate(ask(max_tokens=900, ignore_eos=True))
        await call.read()
        waiting = up.client.generate(token_ids=PROMPT, max_tokens=5)
        with anyio.fail_after(5):
            while not up.statistics.queued_requests:
                await anyio.sleep(0.005)
        [load] = (await stub.GetLoads(vllm.GetLoadsRequest(dp_rank=0))).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert load.max_running_requests == 1
        assert load.num_waiting_uncached_tokens == len(PROMPT)
        assert 0 < load.token_usage < 1
        assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
        call.cancel()
        waiting.cancel()
        await up.until_idle()
        error = await refusal(stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))
        assert (error.details() or "").startswith("dp_rank: ")


async def test_the_tokenizer_comes_as_a_zip(tmp_path: Path) -> None:
    config = replace(service_config(), engine=EngineConfig(model=MODEL_DIR))
    async with running(config=config) as up, connected(up) as stub:
        parts = [part async for part in stub.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(part.data for part in parts)
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].sha256 == sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) <= set(FILES)
        archive.extractall(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (MODEL_DIR / path.name).read_bytes()
    text = "def f(x):\n    return x"
    theirs = RawTokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert tuple(theirs) == Tokenizer.load(MODEL_DIR).encode(text)


def test_only_the_tokenizers_files_are_in_it(tmp_path: Path) -> None:
    for name in (*FILES, "model.safetensors", ".env", "notes.txt", "modeling.py", "secret.json"):
        (tmp_path / name).write_text(name * 9)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.json").mkdir()
    first, second = tokenizer_zip(tmp_path), tokenizer_zip(tmp_path)
    assert first == second, "equal tokenizers are equal archives"
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert set(archive.namelist()) == set(FILES) - {"vocab.json"}


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 200_000])
def test_chunks(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    parts = list(chunks(data[:size]))
    assert b"".join(part.data for part in parts) == data[:size]
    assert len(parts) == -(-size // CHUNK_BYTES)
    assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
    assert parts[-1].sha256 == sha256(data[:size]).hexdigest()


async def test_health_service_and_reflection_know_it() -> None:
    async with running() as up, grpc.aio.insecure_channel(up.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = (
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        )
        listed, described = [a async for a in reflect.ServerReflectionInfo(iter(asked))]
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE, "selfdraft.v1.Inference"} <= names
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in described.file_descriptor_response.file_descriptor_proto
        ]
        assert any(file.package == "vllm.grpc.engine" for file in files)


async def test_it_can_be_turned_off() -> None:
    config = service_config(server=ServerConfig(gateway=False))
    async with running(config=config) as up, connected(up) as stub:
        error = await refusal(stub.HealthCheck(vllm.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(up.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            error = await refusal(health.Check(health_pb2.HealthCheckRequest(service=SERVICE)))
            assert error.code() is grpc.StatusCode.NOT_FOUND
        assert SERVICE not in (await up.client.server_info()).services
        assert await up.works()


async def test_both_protocols_at_once() -> None:
    async with running() as up, connected(up) as stub:
        _, [complete] = await read(stub.Generate(ask()))
        assert complete.finish_reason
        assert await up.works()


def test_the_gateways_pings_are_allowed() -> None:
    """Every 30 s, whether or not anything flows."""
    options = ServerConfig().grpc_options()
    assert dict(options)["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert dict(options)["grpc.keepalive_permit_without_calls"] == 1
