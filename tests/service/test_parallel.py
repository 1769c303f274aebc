"""n sequences of one prompt in one stream: each whole, all or none admitted, one end for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import Client, Generation, SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.loop import RequestHandle, Scheduler
from scheduler.request import GenerationRequest, QueueFullError, Usage
from service.logs import total
from service.relay import Relay
from tests.scheduler.fake_engine import expected_tokens
from tests.service.harness import VOCAB, Running, running, saying, service_config, tokenizer

pytestmark = pytest.mark.anyio

PROMPT = (5, 6, 7)


async def collect(
    generation: Generation,
) -> tuple[dict[int, list[int]], dict[int, str], list[pb.GenerateStreamChunk]]:
    """Tokens and text by index, and all chunks."""
    ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    chunks = [chunk async for chunk in generation]
    for chunk in chunks:
        ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        text[chunk.index] = text.get(chunk.index, "") + chunk.text
        assert chunk.completion_tokens == len(ids[chunk.index])
    return ids, text, chunks


async def test_each_sequence_is_that_of_its_own_seed() -> None:
    """Sample i is what a request with seed + i gets alone, also past the largest seed."""
    seed = 2**64 - 2
    async with running(step_s=0.001) as up:
        generation = up.client.generate(
            token_ids=PROMPT, n=4, seed=seed, max_tokens=30, ignore_eos=True
        )
        ids, text, _ = await collect(generation)
        assert sorted(ids) == sorted(generation.completes) == [0, 1, 2, 3]
        for index in range(4):
            own = (seed + index) % 2**64
            expected = expected_tokens(PROMPT, seed=own, max_tokens=30, vocab_size=VOCAB)
            assert ids[index] == expected
            assert text[index] == tokenizer().decode(expected)
            done = generation.completes[index]
            assert done.index == index
            assert done.seed == seed
            assert (done.finish_reason, done.completion_tokens) == ("length", 30)
            assert done.prompt_tokens == len(PROMPT)
            alone = up.client.generate(token_ids=PROMPT, seed=own, max_tokens=30, ignore_eos=True)
            assert await alone.text() == text[index]
        assert generation.complete == generation.completes[0]
        assert len({tuple(x) for x in ids.values()}) == 4
        await up.until_idle()


async def test_the_sequences_really_run_side_by_side() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(text="x", n=3, max_tokens=60, ignore_eos=True)
        _, _, chunks = await collect(generation)
        order = [chunk.index for chunk in chunks]
        assert order != sorted(order)
        assert {0, 1, 2} == set(order[:6])


async def test_sequences_end_each_in_its_own_way() -> None:
    async with running() as up:
        options: dict[str, Any] = {"token_ids": PROMPT, "max_tokens": 40, "ignore_eos": True}
        plain, _, _ = await collect(up.client.generate(n=2, seed=1, **options))
        at, stop = next((n, t) for n, t in enumerate(plain[1]) if t not in plain[0] and n > 3)
        generation = up.client.generate(n=2, seed=1, stop_token_ids=[stop], **options)
        ids, _, _ = await collect(generation)
        assert ids == {0: plain[0], 1: plain[1][: at + 1]}
        first, second = generation.completes[0], generation.completes[1]
        assert (first.finish_reason, second.finish_reason) == ("length", "stop")
        assert second.matched_token_id == stop
        await up.idle()
        assert up.log_lines()[-1]["reason"] == "length,stop"


async def test_a_stop_string_ends_a_sequence() -> None:
    async with running(token=saying("one two three "), acceptance=0.5) as up:
        generation = up.client.generate(text="x", n=2, stop=["three"], max_tokens=60)
        assert await generation.texts() == ["one two ", "one two "]
        assert {c.matched_stop_str for c in generation.completes.values()} == {"three"}
        await up.until_idle()
        assert up.finished("stop_string") == 2


async def test_one_group_and_ids_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as up:
        scheduler = up.server.door.look().scheduler
        asked: list[GenerationRequest] = []
        submit = scheduler.submit_together

        def ask(requests: Sequence[GenerationRequest]) -> tuple[RequestHandle, ...]:
            asked.extend(requests)
            return submit(requests)

        monkeypatch.setattr(scheduler, "submit_together", ask)
        generation = up.client.generate(
            text="x", n=3, request_id="mine", max_tokens=4, prompt_logprobs=1, logprobs=2
        )
        await generation.texts()
        assert [r.request_id for r in asked] == ["mine/0", "mine/1", "mine/2"]
        assert {r.group for r in asked} == {"mine"}
        assert [r.prompt_logprobs for r in asked] == [1, None, None]
        assert {r.logprobs for r in asked} == {2}
        asked.clear()
        await up.client.generate(text="x", request_id="one", max_tokens=4).text()
        assert [(r.request_id, r.group) for r in asked] == [("one", None)]


async def test_abort_ends_all_of_them() -> None:
    async with running(step_s=0.002) as up:
        generation = up.client.generate(
            text="x", n=4, request_id="four", max_tokens=3000, ignore_eos=True
        )
        assert await generation.request_id() == "four"
        assert await up.client.abort("four")
        with pytest.raises(SelfdraftError) as caught:
            await generation.text()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "ABORTED")
        await up.until_idle()
        assert up.finished("aborted") == 4
        assert not await up.client.abort("four")
        await up.idle()
        (line,) = up.log_lines()
        assert (line["request_id"], line["n"], line["status"]) == ("four", 4, "ABORTED")


async def test_a_live_id_is_taken_however_many_sequences_it_names() -> None:
    async with running(step_s=0.002) as up:
        group = up.client.generate(text="x", n=2, request_id="a", max_tokens=3000, ignore_eos=True)
        await group.request_id()
        for name, n in (("a", 1), ("a", 2), ("a/1", 1)):
            with pytest.raises(SelfdraftError) as caught:
                await up.client.generate(text="x", n=n, request_id=name).text()
            assert caught.value.reason == "DUPLICATE_REQUEST"
            assert caught.value.violations[0].field == "request_id"
        assert up.statistics.running + up.statistics.queued_requests == 2
        await up.client.abort("a")
        await up.until_idle()
        assert await up.works(request_id="a")


async def test_leaving_ends_all_of_them() -> None:
    async with running(step_s=0.002) as up:
        async with up.client.generate(
            text="x", n=4, max_tokens=3000, ignore_eos=True
        ) as generation:
            async for _ in generation:
                break
        await up.until_idle()
        assert up.finished("cancelled") == 4


async def test_the_deadline_ends_all_of_them() -> None:
    async with running(step_s=0.002, max_rows=2) as up:  # two of them wait
        generation = up.client.generate(
            text="x", n=4, max_tokens=3000, ignore_eos=True, timeout=0.3
        )
        with pytest.raises(SelfdraftError) as caught:
            await generation.text()
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await up.until_idle()
        assert up.finished("deadline") == 4


async def check_admission(up: Running) -> None:
    """Of n sequences with room for fewer none is left. Raises AssertionError."""
    first = up.client.generate(text="x", request_id="first", max_tokens=3000, ignore_eos=True)
    await first.request_id()
    with anyio.fail_after(2):
        while not up.statistics.running:
            await anyio.sleep(0.005)
    waiting = up.client.generate(text="x", request_id="waiting", max_tokens=9)
    await waiting.request_id()
    with pytest.raises(SelfdraftError) as caught:
        await up.client.generate(text="x", n=3, request_id="many").text()
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_after_s is not None
    left = up.statistics
    await up.client.abort("first")
    await up.client.abort("waiting")
    assert (left.queued_requests, left.submitted, left.finished) == (1, 2, {})
    assert left.refused == {"max_queue": 1}
    # Its id is free again.
    assert not await up.client.abort("many")


async def test_all_are_admitted_or_none() -> None:
    async with running(config=service_config(max_queue=3), step_s=0.002, max_rows=1) as up:
        await check_admission(up)
        await up.until_idle()
        assert await up.works(request_id="many")


async def test_admission_of_some_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: they are submitted one by one, and those before the refused one are cancelled."""

    def one_by_one(self: Scheduler, requests: Any) -> tuple[RequestHandle, ...]:
        handles: list[RequestHandle] = []
        try:
            for request in requests:
                handles += together(self, (request,))
        except QueueFullError:
            for handle in handles:
                handle.cancel()
            raise
        return tuple(handles)

    together = Scheduler.submit_together
    monkeypatch.setattr(Scheduler, "submit_together", one_by_one)
    async with running(config=service_config(max_queue=3), step_s=0.002, max_rows=1) as up:
        with pytest.raises(AssertionError):
            await check_admission(up)


async def check_fault(up: Running, plan_fault: Callable[[], None]) -> None:
    """A fault of one ends the call and the others. Raises AssertionError."""
    plan_fault()
    generation = up.client.generate(
        token_ids=(9, 9), n=3, max_tokens=2000, ignore_eos=True, timeout=3.0
    )
    with pytest.raises(SelfdraftError) as caught:
        await generation.text()
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "ROW_FAULT")
    with anyio.fail_after(2):
        await up.until_idle()


def one_faults(up: Running) -> Callable[[], None]:
    """Makes the second row of the next request go bad, and no other one."""

    def plan() -> None:
        engine = up.engines[0]
        emit, rows = engine._emit, list[int]()

        def faulty(step: int, row: int, state: Any, **counts: int) -> Any:
            if row not in rows:
                rows.append(row)
            if rows.index(row) == 1:
                engine._faults = {(9, 9): 5}
            try:
                return emit(step, row, state, **counts)
            finally:
                engine._faults = {}

        engine._emit = faulty  # type: ignore[method-assign]

    return plan


async def test_a_fault_of_one_ends_the_others() -> None:
    async with running(step_s=0.001) as up:
        await check_fault(up, one_faults(up))
        assert up.finished("fault") == 1
        assert up.finished("cancelled") == 2
        assert await up.works()


async def test_a_fault_that_leaves_the_others_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: the other sequences are not told."""

    async def alone(self: Relay) -> None:
        async with anyio.create_task_group() as tasks:

            async def one(index: int) -> None:
                try:
                    await self._sequence(index)
                except Exception as error:
                    self._error = self._error or error

            for index in range(len(self._handles)):
                tasks.start_soon(one, index)
        if self._error is not None:
            raise self._error

    monkeypatch.setattr(Relay, "_side_by_side", alone)
    async with running(step_s=0.01) as up:
        with pytest.raises((AssertionError, SelfdraftError)):
            await check_fault(up, one_faults(up))


async def test_a_slow_reader_is_ended_with_all_its_sequences() -> None:
    config = service_config(slow_reader_timeout_s=0.3, stream_buffer=64)
    async with running(
        config=config, token=saying("x" * 50), context_length=100_000, pages=30_000
    ) as up:
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
        async with Client(up.target, options=window) as lazy:
            slow = lazy.generate(text="x", n=2, max_tokens=90_000, request_id="slow")
            assert await slow.request_id() == "slow"
            with anyio.fail_after(15):
                while not up.finished("slow_reader"):
                    await anyio.sleep(0.02)
            with pytest.raises(SelfdraftError) as caught:
                await slow.text()
            assert caught.value.reason == "SLOW_READER"
        await up.until_idle()
        assert up.finished("slow_reader") == 2


async def test_one_log_line_with_sums_and_metrics_of_each() -> None:
    async with running(metrics=True, step_s=0.001) as up:
        generation = up.client.generate(
            token_ids=PROMPT, n=3, seed=4, max_tokens=20, ignore_eos=True
        )
        await generation.texts()
        await up.idle()
        (line,) = up.log_lines()
        done = list(generation.completes.values())
        assert (line["n"], line["seed"], line["status"]) == (3, 4, "OK")
        for name, field in (
            ("prompt_tokens", "prompt_tokens"),
            ("completion_tokens", "completion_tokens"),
            ("delivered_tokens", "completion_tokens"),
            ("cycles", "spec_cycles"),
            ("spec_draft_tokens", "spec_draft_tokens"),
            ("spec_accepted_tokens", "spec_accepted_tokens"),
        ):
            assert line[name] == sum(getattr(c, field) for c in done), name
        assert sum(line["spec_draft_tokens_per_pos"]) == line["spec_draft_tokens"]
        now = await up.metrics()
        assert now['selfdraft_request_success_total{finish_reason="length"}'] == 3
        assert now["selfdraft_e2e_request_latency_seconds_count"] == 3
        assert now['selfdraft_spec_decode_requests_total{mode="coupled"}'] == 1


def test_usages_add_up() -> None:
    one = Usage(
        prompt_tokens=3,
        completion_tokens=5,
        preemptions=1,
        drafted_per_position=(4, 2),
        accepted_per_position=(3, 1),
        submitted_at=1.0,
        first_token_at=2.0,
        last_token_at=5.0,
        finished_at=5.0,
    )
    two = Usage(
        prompt_tokens=3,
        cached_tokens=2,
        completion_tokens=7,
        preemptions=2,
        drafted_per_position=(4, 2, 1),
        accepted_per_position=(3, 1, 0),
        submitted_at=1.0,
        started_at=1.5,
        finished_at=9.0,
    )
    both = total([one, two])
    assert (both.prompt_tokens, both.cached_tokens, both.completion_tokens) == (6, 2, 12)
    assert both.preemptions == 3
    assert both.drafted_per_position == (8, 4, 1)
    assert both.accepted_per_position == (6, 2, 0)
    assert (both.started_at, both.first_token_at) == (1.5, 2.0)
    assert (both.last_token_at, both.finished_at) == (5.0, 9.0)
    assert total([one]) is one
