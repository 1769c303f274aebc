"""Bearer tokens in the gateway's protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from selfdraft import AdminClient, Client
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2

from scheduler.config import SchedulerConfig
from service.gate import NO_GATEWAY
from service.tenant import TENANT_KEY
from service.tokens import digest_of
from tests.service.books import Book
from tests.service.gateway.calls import ask, connected, read, refusal
from tests.service.harness import running, service_config

pytestmark = pytest.mark.anyio


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def rest(call: Any) -> None:
    while await call.read():
        pass


async def test_a_gateway_needs_a_token_and_acts_for_its_tenant(book: Book) -> None:
    config = replace(book.config(), scheduler=SchedulerConfig(prefill_chunk=16))
    async with running(config=config, boundaries=8, step_s=0.003) as up, connected(up) as gateway:
        for call in (
            gateway.HealthCheck(vllm.HealthCheckRequest()),
            gateway.Generate(ask()),
            gateway.Abort(vllm.AbortRequest(request_ids=["chatcmpl-1"])),
            gateway.GetLoads(vllm.GetLoadsRequest()),
        ):
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        endless = ask(max_tokens=3000, ignore_eos=True)
        hers, his = (gateway.Generate(endless, metadata=bearer(t)) for t in (book.ada, book.bob))
        await hers.read()
        await his.read()  # the same id is no clash
        abort = vllm.AbortRequest(request_ids=["chatcmpl-1", "ada/chatcmpl-1"])
        await gateway.Abort(abort, metadata=bearer(book.bob))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(his)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert up.statistics.running + up.statistics.queued_requests == 1
        hers.cancel()
        await up.idle()
        assert {line["tenant"] for line in up.log_lines()} == {"ada", "bob"}
        assert {line["request_id"] for line in up.log_lines()} == {"chatcmpl-1"}
        others = (*bearer(book.ada), (TENANT_KEY, "bob"))
        error = await refusal(gateway.Generate(ask(), metadata=others))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_gateways_tenants_share_no_prefixes_and_admins_see_all(book: Book) -> None:
    config = replace(book.config(), scheduler=SchedulerConfig(prefill_chunk=16))
    async with running(config=config, boundaries=8) as up, connected(up) as gateway:
        prompt = ask(ids=(7,) * 100, max_tokens=3, ignore_eos=True)
        cached = []
        for token in (book.ada, book.ada, book.bob):
            _, [complete] = await read(gateway.Generate(prompt, metadata=bearer(token)))
            cached.append(complete.cached_tokens > 0)
            await up.until_idle()
        assert cached == [False, True, False]
        subscription = common_pb2.SubscribeKvEventsRequest()
        for token in (book.ada, book.bob):
            call = gateway.SubscribeKvEvents(subscription, metadata=bearer(token))
            assert (await refusal(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        events = gateway.SubscribeKvEvents(subscription, metadata=bearer(book.root))
        batch = await events.read()
        stored = [event.stored for event in batch.events if event.HasField("stored")]
        first = [chain for chain in stored if not chain.HasField("parent_block_hash")]
        assert len({chain.blocks[0].block_hash for chain in first}) == 2, "one of each tenant"
        assert {tuple(chain.blocks[0].token_ids) for chain in first} == {(7,) * 16}
        events.cancel()


async def test_what_a_gateway_needs_is_said_at_the_start(book: Book) -> None:
    for tokens, gateway in ((True, True), (True, False), (False, True)):
        config = book.config() if tokens else service_config()
        config = replace(config, server=replace(config.server, gateway=gateway))
        async with running(config=config) as up:
            notes = [line["note"] for line in up.log_lines("security")]
            assert notes == ([NO_GATEWAY] if tokens and gateway else [])


async def test_no_secret_is_in_what_a_server_says_of_itself(book: Book) -> None:
    async with running(config=book.config()) as up, connected(up) as gateway:
        async with (
            Client(up.target, token=book.ada) as client,
            AdminClient(up.target, token=book.root) as admin,
        ):
            asked = vllm.GetServerInfoRequest(), vllm.GetModelInfoRequest()
            told = [
                str(await client.server_info()),
                str(await client.loads()),
                str(await gateway.GetServerInfo(asked[0], metadata=bearer(book.ada))),
                str(await gateway.GetModelInfo(asked[1], metadata=bearer(book.ada))),
            ]
            everything = [*told, str(await admin.config())]
        tokens = (book.ada, book.bob, book.root)
        secrets = (*tokens, *(digest_of(token).removeprefix("sha256:") for token in tokens))
        for text in everything:
            assert not [secret for secret in secrets if secret in text]
        assert not [text for text in told if str(book.path.parent) in text]
