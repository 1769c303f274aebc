"""`SubscribeKvEvents`: a router that follows the stream knows what is kept, and who is busy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from scheduler.kv_events import KvEventLog
from scheduler.statistics import Statistics
from service.gateway import events
from service.gateway.load import LoadRecords
from tests.service.gateway.calls import ask, connected, read, refusal
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio

PAGE = 16


class Router:
    """What a gateway knows of one worker."""

    def __init__(self) -> None:
        self.cursor = 0
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.batches: list[common.KvEventBatch] = []
        self.load = common.EngineLoad()

    def take(self, batch: common.KvEventBatch) -> None:
        self.batches.append(batch)
        assert batch.load.sample > self.load.sample, "records are ordered"
        self.load = batch.load
        if batch.load.load_only:
            assert not batch.events
            assert batch.sequence_number == self.cursor, "it repeats the last number"
            return
        assert self.cursor in (0, batch.sequence_number - 1), "a gap"
        self.cursor = batch.sequence_number
        for event in batch.events:
            self.apply(event)

    def apply(self, event: common.KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                self.blocks.clear()
            case "removed":
                for block in event.removed.block_hashes:
                    del self.blocks[block]
            case "stored":
                stored = event.stored
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.blocks
                for block in stored.blocks:
                    assert len(block.token_ids) == block.block_size == PAGE
                    self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                    parent = block.block_hash


def kept(up: Running) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The same from the cache itself."""
    assert up.server._scheduler is not None
    blocks = {}
    for chain in up.server._scheduler.kv_blocks():
        parent = None if chain.parent is None else events.block_number(chain.parent)
        for index, block in enumerate(chain.hashes):
            tokens = tuple(chain.tokens[index * PAGE : (index + 1) * PAGE].tolist())
            blocks[events.block_number(block)] = (parent, tokens)
            parent = events.block_number(block)
    return blocks


async def follow(call: Any, router: Router, until: Callable[[], bool]) -> None:
    """Reads until `until` holds after a batch, for at most 5 s."""
    with anyio.fail_after(5):
        async for batch in call:
            router.take(batch)
            if until():
                return
    raise AssertionError("the stream ended")


@asynccontextmanager
async def serving(**options: Any) -> Any:
    fake = {"boundaries": 8, "page_size": PAGE, **options}
    config = fake.pop("config", service_config(prefill_chunk=PAGE))
    async with running(config=config, **fake) as up, connected(up) as stub:
        yield up, stub


def subscribe(stub: Any, start: int = 0) -> Any:
    return stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(
            start_sequence_number=start, load_records_before_first_batch=True
        )
    )


async def test_a_router_follows_what_is_kept() -> None:
    async with serving() as (up, stub):
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: True)
        first = router.batches[0]
        assert first.events[0].WhichOneof("data") == "cleared", "an empty snapshot: it is new"
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
        for number in range(12):  # more than the engine holds, so that some go
            await read(stub.Generate(ask(ids=(number + 2,) * 100, max_tokens=3, ignore_eos=True)))
        await up.until_idle()
        await follow(call, router, lambda: router.blocks == kept(up))
        assert len(router.blocks) > 12
        assert any(e.WhichOneof("data") == "removed" for b in router.batches for e in b.events)
        assert all(batch.dp_rank == 0 and batch.timestamp > 1e9 for batch in router.batches)
        call.cancel()


async def test_a_late_router_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SNAPSHOT_BLOCKS", 3)
    async with serving() as (up, stub):
        for number in range(4):
            await read(stub.Generate(ask(ids=(number + 2,) * 100, max_tokens=3, ignore_eos=True)))
        await up.until_idle()
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: router.load.load_only)
        parts = [batch.snapshot for batch in router.batches if batch.HasField("snapshot")]
        assert [part.index for part in parts] == list(range(parts[0].count))
        assert len(parts) > 2
        assert {part.blocks for part in parts} == {len(router.blocks)}
        assert router.blocks == kept(up)
        assert not any(part.unknown_before for part in parts)
        # What comes next follows on without a gap.
        await read(stub.Generate(ask(ids=(99,) * 100, max_tokens=3, ignore_eos=True)))
        await up.until_idle()
        await follow(call, router, lambda: router.blocks == kept(up))
        call.cancel()


async def test_a_router_that_comes_back_goes_on_where_it_was() -> None:
    async with serving() as (up, stub):
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: True)
        call.cancel()
        for number in range(3):
            await read(stub.Generate(ask(ids=(number + 2,) * 100, max_tokens=3, ignore_eos=True)))
        await up.until_idle()
        again = subscribe(stub, router.cursor)
        router.load = common.EngineLoad()  # samples are counted per stream
        await follow(again, router, lambda: router.blocks == kept(up))
        assert not any(batch.HasField("snapshot") for batch in router.batches[1:])
        again.cancel()


async def test_numbers_of_another_life_are_refused() -> None:
    async with serving() as (up, stub):
        await read(stub.Generate(ask(ids=(7,) * 100, max_tokens=3, ignore_eos=True)))
        await up.until_idle()
        assert up.server._scheduler is not None
        assert up.server._scheduler.newest_kv_event >= 1
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: True)
        # A server that was here before may have come as far as this one: to 1, say.
        for start in (1, 17, router.cursor - 1000, router.cursor + 1, 2**63):
            error = await refusal(subscribe(stub, start))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE, start
            assert "start_sequence_number" in (error.details() or "")
        call.cancel()


async def test_a_slow_router_is_told_that_it_missed_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (up, stub):
        assert up.server._scheduler is not None
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: True)
        # A log of one event: the next poll finds that more than that have passed.
        cache = up.server._scheduler._core.keeping.cache
        log = KvEventLog(max_events=1)
        log.newest = cache.events.newest
        monkeypatch.setattr(cache, "events", log)
        monkeypatch.setattr(events, "POLL_S", 0.1)
        for number in range(4):
            await read(stub.Generate(ask(ids=(number + 2,) * 100, max_tokens=1)))
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.DATA_LOSS
        again = Router()
        fresh = subscribe(stub)
        await follow(fresh, again, lambda: again.blocks == kept(up) != {})
        fresh.cancel()


async def test_load_records_flow_while_a_prompt_is_prefilled() -> None:
    """Chunks of a long prompt are steps: the stream of tokens is silent, the engine is not."""
    async with serving(step_s=0.02) as (_, stub):
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: True)
        generation = stub.Generate(ask(ids=(5,) * 1000, max_tokens=3, ignore_eos=True))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, generation)
            await follow(call, router, lambda: router.load.running_requests == 1)
            seen = len(router.batches)
            assert 0 < router.load.prefill_pending_tokens <= 1000
            assert router.load.active_token_usage > 0
            await follow(call, router, lambda: router.load.running_requests == 0)
        during = [b.load for b in router.batches[seen - 1 : -1] if b.load.running_requests]
        assert len(during) >= 1
        pending = [load.prefill_pending_tokens for load in during]
        assert pending == sorted(pending, reverse=True), "what is done is not ahead"
        assert all(load.engine_silence_ms < 500 for load in during)
        assert all(load.engine_reports_steps for load in during)
        assert not router.load.HasField("engine_silence_ms"), "nobody waits for it"
        call.cancel()


async def test_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.2)
    async with serving() as (_, stub):
        router = Router()
        call = subscribe(stub)
        await follow(call, router, lambda: len(router.batches) == 4)
        beats = [batch.load for batch in router.batches[1:]]
        assert all(load.load_only for load in beats)
        assert all(load.HasField("memory") and load.HasField("speculative") for load in beats)
        assert beats[0].memory.token_capacity == beats[0].max_total_num_tokens > 0
        times = [batch.timestamp for batch in router.batches]
        assert times[3] - times[0] > 0.5, "an idle server says little"
        call.cancel()


async def test_a_wedged_engine_is_told_by_its_silence() -> None:
    async with running() as up:
        idle = up.statistics
        info = up.server._scheduler.info if up.server._scheduler else None
        assert info is not None
    records = LoadRecords(info)

    def at(time: float, **change: Any) -> common.EngineLoad:
        now: Statistics = replace(idle, at=time, **change)
        records.observe(now)
        return records.record(now, load_only=True, telemetry=False)

    assert not at(10).HasField("engine_silence_ms")
    assert at(20, running=1, steps=1).engine_silence_ms == 0, "the wait before is not its"
    assert at(21, running=1, steps=1).engine_silence_ms == 1000
    assert at(24, running=1, steps=1).engine_silence_ms == 4000
    assert at(24.5, running=1, steps=2).engine_silence_ms == 0
    assert not at(25, steps=2).HasField("engine_silence_ms")
    assert at(30, queued_requests=1, steps=2).engine_silence_ms == 0, "it had nothing to do"


async def test_a_dead_engine_ends_the_stream() -> None:
    async with serving(dies_at=5) as (_, stub):
        call = subscribe(stub)
        router = Router()
        await follow(call, router, lambda: True)
        await refusal(stub.Generate(ask(max_tokens=50, ignore_eos=True)))
        error = await refusal(call)
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_subscribers_leave_nothing_behind() -> None:
    async with serving() as (up, stub):
        calls = [subscribe(stub) for _ in range(5)]
        for call in calls:
            await call.read()
            call.cancel()
        assert await up.works()
        health = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert health.healthy
