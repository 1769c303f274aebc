"""Calls that are made again: which, when, how often, and as one request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import Client, Generation, Retry, SelfdraftError
from selfdraft.client import SESSION_HEADER
from selfdraft.retry import RETRYABLE, UNAVAILABLE, Attempts

from service.errors import Reason
from tests.service.harness import running, service_config
from tests.service.scripted import Act, refusal, scripted

pytestmark = pytest.mark.anyio

WELL = Act(chunks=["a", "b"])
QUICK = Retry(initial_delay_s=0.01, jitter=0.0)
LOST = Act(error=grpc.StatusCode.UNAVAILABLE)
"""As a proxy says it, or gRPC itself when the connection breaks: no ErrorInfo."""


# --- the policy, on a clock of its own --------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failure(reason: str = "QUEUE_FULL", after: float | None = None) -> SelfdraftError:
    code = grpc.StatusCode.UNAVAILABLE if reason in ("", "LOADING") else grpc.StatusCode.UNKNOWN
    return SelfdraftError(code, "no", reason=reason, retry_after_s=after)


def attempts(
    policy: Retry | None, timeout: float | None = None, share: float = 0.0
) -> tuple[Attempts, Clock]:
    clock = Clock()
    return Attempts(policy, timeout, clock=clock, share=lambda: share), clock


def test_delays_double_and_end() -> None:
    made, _ = attempts(Retry(attempts=6, initial_delay_s=0.5, max_delay_s=3.0))
    assert [made.delay_after(failure("")) for _ in range(6)] == [0.5, 1.0, 2.0, 3.0, 3.0, None]
    assert made.made == 6


def test_the_servers_delay_is_a_least_and_jitter_only_adds() -> None:
    for share, expected in ((0.0, 4.0), (0.5, 4.5), (0.999, 4.999)):
        made, _ = attempts(Retry(jitter=0.25), share=share)
        found = made.delay_after(failure(after=4.0))
        assert found is not None
        assert 4.0 <= found == pytest.approx(expected, rel=1e-3)


def test_a_delay_beyond_the_policys_is_not_cut_but_declined() -> None:
    made, _ = attempts(Retry(max_delay_s=10.0))
    assert made.delay_after(failure(after=10.5)) is None
    assert made.delay_after(failure(after=10.0)) == 10.0


def test_the_timeout_covers_waits_and_attempts() -> None:
    made, clock = attempts(Retry(attempts=9), timeout=10.0)
    assert made.remaining() == 10.0
    assert made.delay_after(failure(after=4.0)) == 4.0
    clock.now += 7.0
    assert made.remaining() == 3.0
    assert made.delay_after(failure(after=3.0)) is None
    assert made.delay_after(failure(after=2.5)) == 2.5


def test_reasons_are_those_of_the_policy() -> None:
    for reason in Reason:
        for policy in (Retry(), Retry(reasons=frozenset({"DRAINING"})), None):
            made, _ = attempts(policy)
            retried = made.delay_after(failure(reason, after=0.1)) is not None
            assert retried == (policy is not None and reason in policy.reasons), reason
    assert {reason.value for reason in Reason} & RETRYABLE == RETRYABLE - {UNAVAILABLE}


def test_a_duplicate_is_ours_only_after_an_attempt_without_an_answer() -> None:
    made, _ = attempts(Retry())
    assert made.delay_after(failure("DUPLICATE_REQUEST")) is None
    assert made.delay_after(failure("QUEUE_FULL")) is not None
    assert made.delay_after(failure("DUPLICATE_REQUEST")) is None
    assert made.delay_after(failure("")) is not None
    assert made.delay_after(failure("DUPLICATE_REQUEST")) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", 0),
        ("max_delay_s", -1.0),
        ("max_delay_s", float("nan")),
        ("initial_delay_s", float("inf")),
        ("jitter", 1.5),
        ("reasons", frozenset({"ROW_FAULT"})),
    ],
)
def test_a_bad_policy_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}: "):
        Retry(**{field: value})


# --- over a connection ------------------------------------------------------------------------


async def check_one_request(policy: Retry) -> None:
    """Refused, unheard, still there, then served: one id, one text. Raises AssertionError."""
    acts = (refusal(Reason.QUEUE_FULL, 0.02), LOST, refusal(Reason.DUPLICATE_REQUEST), WELL)
    async with scripted(*acts) as script, Client(script.target, retry=policy) as client:
        generation = client.generate(text="x")
        assert await generation.text() == "ab"
        assert len(script.seen) == generation.attempts == 4
        assert len(script.ids) == 1
        assert "" not in script.ids


async def test_a_retried_generation_is_one_request() -> None:
    await check_one_request(QUICK)


@pytest.mark.parametrize("reason", [Reason.LOADING, Reason.DRAINING, Reason.TENANT_LIMIT])
async def test_waits_as_long_as_it_was_told(reason: Reason) -> None:
    async with (
        scripted(refusal(reason, 0.3), WELL) as script,
        Client(script.target, retry=QUICK) as client,
    ):
        started = time.monotonic()
        assert await client.generate(text="x", request_id="mine").text() == "ab"
        assert time.monotonic() - started >= 0.3
        assert script.ids == {"mine"}


async def read_into(shown: list[str], generation: Generation) -> None:
    async for chunk in generation:
        shown.append(chunk.text)


async def check_never_after_the_first_chunk() -> None:
    """What has begun ends with its error. Raises AssertionError."""
    for error in (refusal(Reason.DRAINING, 0.01).error, LOST.error):
        begun = Act(chunks=["a"], error=error)
        async with scripted(begun) as script, Client(script.target, retry=QUICK) as client:
            shown: list[str] = []
            with pytest.raises(SelfdraftError) as caught:
                await read_into(shown, client.generate(text="x"))
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert (shown, len(script.seen)) == (["a"], 1)


async def test_never_after_the_first_chunk() -> None:
    await check_never_after_the_first_chunk()


async def check_deadline() -> None:
    """The timeout is of all attempts: none gets more than is left, and no wait outlasts it.
    Raises AssertionError."""
    patient = Retry(attempts=6, jitter=0.0)
    async with (
        scripted(refusal(Reason.QUEUE_FULL, 0.15)) as script,
        Client(script.target, retry=patient) as client,
    ):
        started = time.monotonic()
        with pytest.raises(SelfdraftError) as caught:
            await client.generate(text="x", timeout=0.4).text()
        assert caught.value.reason == "QUEUE_FULL"
        assert time.monotonic() - started <= 0.4
        left = [seen.left_s for seen in script.seen]
        assert len(left) == 3
        assert left[0] is not None
        assert left[1] is not None
        assert left[1] <= left[0] - 0.14


async def test_the_deadline_is_of_all_attempts() -> None:
    await check_deadline()


async def test_without_a_policy_each_call_is_made_once() -> None:
    async with (
        scripted(refusal(Reason.LOADING, 0.01)) as script,
        Client(script.target, retry=None) as client,
    ):
        for call in (client.generate(text="x").text(), client.model_info()):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert (caught.value.reason, caught.value.retry_after_s) == ("LOADING", 0.01)
        assert len(script.seen) == 2
        assert script.seen[0].request.request_id == ""


async def test_other_calls_are_made_again_too() -> None:
    async with (
        scripted(refusal(Reason.LOADING, 0.01), LOST, Act()) as script,
        Client(script.target, retry=QUICK) as client,
    ):
        await client.model_info(timeout=5)
        assert len(script.seen) == 3


async def test_the_request_id_is_that_of_the_attempt_that_was_admitted() -> None:
    async with (
        scripted(refusal(Reason.QUEUE_FULL, 0.02), WELL) as script,
        Client(script.target, retry=QUICK) as client,
    ):
        generation = client.generate(text="x")
        first, text = await asyncio.gather(generation.request_id(), generation.text())
        assert text == "ab"
        assert {first} == script.ids
        assert len(script.seen) == 2


@pytest.mark.parametrize("leave", [Generation.cancel, None])
async def test_leaving_while_it_waits_ends_at_once(
    leave: Callable[[Generation], None] | None,
) -> None:
    async with scripted(refusal(Reason.QUEUE_FULL, 20)) as script:
        client = Client(script.target)
        generation = client.generate(text="x")
        read = asyncio.create_task(generation.text())
        with anyio.fail_after(5):
            while not script.seen:
                await anyio.sleep(0.01)
            await anyio.sleep(0.05)
            if leave is not None:
                leave(generation)
                assert await read == ""
            else:
                read.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await read
            await client.close()
        assert len(script.seen) == 1


async def test_a_closed_client_makes_no_further_attempt() -> None:
    async with scripted(refusal(Reason.QUEUE_FULL, 0.1)) as script:
        client = Client(script.target)
        read = asyncio.create_task(client.generate(text="x").text())
        while not script.seen:
            await anyio.sleep(0.01)
        await client.close()
        with pytest.raises(SelfdraftError, match="closed"):
            await read
        with pytest.raises(SelfdraftError, match="closed"):
            client.generate(text="x")
        assert len(script.seen) == 1


# --- and with the real server -----------------------------------------------------------------


async def test_a_full_queue_is_waited_for() -> None:
    config = service_config(max_queue=1)
    retry = Retry(attempts=20, initial_delay_s=0.05)
    async with running(config=config, step_s=0.002, max_rows=1, client={"retry": retry}) as up:
        asked = [
            up.client.generate(text="x", max_tokens=30, ignore_eos=True, timeout=30)
            for _ in range(4)
        ]
        texts = await asyncio.gather(*(generation.text() for generation in asked))
        assert all(texts)
        assert max(generation.attempts for generation in asked) > 1
        await up.until_idle()
        assert up.finished("length") == 4
        assert up.statistics.generated_tokens == 4 * 30


async def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    retry = Retry(attempts=40, initial_delay_s=0.1, max_delay_s=0.2)
    client = Client(f"127.0.0.1:{port}", retry=retry)
    early = asyncio.create_task(client.generate(text="x", max_tokens=3, ignore_eos=True).text())
    await anyio.sleep(0.15)
    assert not early.done()
    async with scripted(WELL, port=port):
        assert await asyncio.wait_for(early, 15) == "ab"
    await client.close()


async def test_the_sessions_name_goes_along() -> None:
    async with scripted(WELL) as script, Client(script.target) as client:
        own = ((SESSION_HEADER, "elsewhere"),)
        await client.generate(text="x", session_id="chat-7").text()
        await client.generate(text="x").text()
        await client.generate(text="x", session_id="chat-7", metadata=own).text()
        await client.generate(text="x", session_id="no header: é").text()
        found = [seen.metadata.get(SESSION_HEADER) for seen in script.seen]
        assert found == ["chat-7", None, "elsewhere", None]
        await client.release_session("chat-7", timeout=5)
        assert script.seen[4].metadata[SESSION_HEADER] == "chat-7"


async def test_a_bad_session_id_is_the_servers_to_refuse() -> None:
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", session_id="two words").text()
        assert caught.value.violations[0].field == "session_id"


# --- planted faults ---------------------------------------------------------------------------


async def test_a_retry_after_the_first_chunk_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Attempts, "begun", never, raising=False)
    with pytest.raises(AssertionError):
        await check_never_after_the_first_chunk()


async def test_a_timeout_per_attempt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempts, "remaining", lambda self: 0.4)
    with pytest.raises(AssertionError):
        await check_deadline()


async def test_forgetting_unheard_attempts_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = Attempts._worth

    def forgetful(self: Attempts, error: SelfdraftError, policy: Retry) -> bool:
        found = worth(self, error, policy)
        self._unanswered = False
        return found

    monkeypatch.setattr(Attempts, "_worth", forgetful)
    with pytest.raises(SelfdraftError):
        await check_one_request(QUICK)
