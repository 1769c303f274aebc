"""For each guarantee of the gateway's protocol a planted fault, and proof that its test sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from scheduler.statistics import Statistics
from service import loads
from service.errors import ServiceError
from service.gateway import load, request, servicer
from service.gateway.answer import Answer
from service.gateway.events import KvSubscription
from service.gateway.load import LoadRecords
from tests.service import test_loads
from tests.service.gateway import test_events, test_generate, test_info

pytestmark = pytest.mark.anyio

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], Awaitable[None]]


def headers_are_sent_on_admission(patch: pytest.MonkeyPatch) -> None:
    async def send(self: Answer, metadata: Any) -> None:
        await self._context.send_initial_metadata(metadata)

    patch.setattr(Answer, "send_initial_metadata", send)


def samples_are_answered_as_they_end(patch: pytest.MonkeyPatch) -> None:
    async def end(self: Answer, complete: Any) -> None:
        await self._context.write(vllm.GenerateResponse(complete=complete))

    patch.setattr(Answer, "_end", end)


def counts_are_sums(patch: pytest.MonkeyPatch) -> None:
    def chunk(self: Answer, message: pb.GenerateStreamChunk) -> Any:
        made = chunk_well(self, message)
        made.completion_tokens = message.completion_tokens
        return made

    chunk_well = Answer._chunk
    patch.setattr(Answer, "_chunk", chunk)


def drafts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def complete(self: Answer, message: pb.GenerateComplete) -> Any:
        made = complete_well(self, message)
        made.ClearField("spec_accepted_tokens")
        return made

    complete_well = Answer._complete
    patch.setattr(Answer, "_complete", complete)


def some_fields_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_SAME", ("frequency_penalty", "presence_penalty", "top_k"))


def zero_is_a_value(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_SAME", (*request._SAME, *request._ZERO_IS_ABSENT))
    patch.setattr(request, "_ZERO_IS_ABSENT", ())


def media_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_UNSUPPORTED", ())


def kept_prefixes_count_as_load(patch: pytest.MonkeyPatch) -> None:
    def usage(now: Statistics) -> float:
        return now.pages_used / now.pages_total

    patch.setattr(loads, "kv_usage", usage)
    patch.setattr(load, "kv_usage", usage)


def numbers_begin_anew_with_the_server(patch: pytest.MonkeyPatch) -> None:
    def subscription(scheduler: Any, *, base: int, wall: Any) -> KvSubscription:
        return KvSubscription(scheduler, base=0, wall=wall)

    patch.setattr(servicer, "KvSubscription", subscription)


def records_without_events_count(patch: pytest.MonkeyPatch) -> None:
    def load_only(self: KvSubscription, now: Statistics) -> Any:
        batch = load_only_well(self, now)
        batch.sequence_number += 1
        return batch

    load_only_well = KvSubscription._load_only
    patch.setattr(KvSubscription, "_load_only", load_only)


def silence_is_never_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadRecords, "observe", lambda self, now: None)


def a_slow_router_is_left_in_the_dark(patch: pytest.MonkeyPatch) -> None:
    def poll(self: KvSubscription) -> list[Any]:
        try:
            return poll_well(self)
        except ServiceError:
            self._cursor = self._scheduler.newest_kv_event
            return []

    poll_well = KvSubscription.poll
    patch.setattr(KvSubscription, "poll", poll)


def the_hash_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(servicer, "chunks", lambda data: [common.GetTokenizerChunk(data=data)])


def it_is_healthy_while_it_loads(patch: pytest.MonkeyPatch) -> None:
    async def healthy(self: Any, request: Any, context: Any) -> Any:
        return vllm.HealthCheckResponse(healthy=True)

    patch.setattr(servicer.GatewayServicer, "HealthCheck", healthy)


async def heartbeats() -> None:
    with pytest.MonkeyPatch.context() as patch:
        await test_events.test_heartbeats(patch)


async def a_slow_router() -> None:
    with pytest.MonkeyPatch.context() as patch:
        await test_events.test_a_slow_router_is_told_that_it_missed_something(patch)


PLANTED: list[tuple[Patch, Check]] = [
    (headers_are_sent_on_admission, test_generate.test_headers_wait_for_the_first_token),
    (
        samples_are_answered_as_they_end,
        test_generate.test_samples_that_end_in_another_order_are_answered_in_theirs,
    ),
    (counts_are_sums, test_generate.test_a_stream_is_our_own_in_other_messages),
    (drafts_are_not_counted, test_generate.test_a_stream_is_our_own_in_other_messages),
    (some_fields_are_dropped, test_generate.test_what_is_asked_for_reaches_the_engine),
    (zero_is_a_value, test_generate.test_neutral_values_mean_absent),
    (media_are_ignored, test_generate.test_what_cannot_be_honoured_is_refused_by_name),
    (kept_prefixes_count_as_load, test_loads.test_pages_of_kept_prefixes_are_not_load),
    (kept_prefixes_count_as_load, test_info.test_loads),
    (numbers_begin_anew_with_the_server, test_events.test_numbers_of_another_life_are_refused),
    (records_without_events_count, heartbeats),
    (silence_is_never_told, test_events.test_a_wedged_engine_is_told_by_its_silence),
    (a_slow_router_is_left_in_the_dark, a_slow_router),
    (it_is_healthy_while_it_loads, test_info.test_health_follows_the_servers_life),
]


@pytest.mark.parametrize(
    ("patch", "check"), PLANTED, ids=[f"{p.__name__}-{n}" for n, (p, _) in enumerate(PLANTED)]
)
async def test_its_own_test_sees(
    patch: Patch, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises(BaseException) as seen:  # noqa: PT011
        await check()
    assert failed(seen.value), seen.value


async def test_a_forgotten_hash_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    the_hash_is_forgotten(monkeypatch)
    with pytest.raises(AssertionError):
        await test_info.test_the_tokenizer_comes_as_a_zip(tmp_path)


def failed(error: BaseException) -> bool:
    """A check said no: an assertion, a wait that was in vain, or a call that was refused."""
    if isinstance(error, BaseExceptionGroup):
        return any(failed(part) for part in error.exceptions)
    return isinstance(error, AssertionError | TimeoutError | grpc.aio.AioRpcError)
