"""Requests that are refused: every violation by its field and limit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selfdraft import SelfdraftError, Violation
from selfdraft.v1 import selfdraft_pb2 as pb

from service.validation import Violations
from tests.service.changes import refused, sound, with_chat, with_ids
from tests.service.harness import VOCAB, Running, running
from tests.service.test_validation_accepted import _with
from tests.service.wrong import WRONG

pytestmark = pytest.mark.anyio


async def test_each_violation_names_its_field_and_limit() -> None:
    async with running(context_length=200) as up:
        for name, (change, field, limit) in WRONG.items():
            request = sound()
            change(request)
            error = await refused(up, request)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert error.reason == "INVALID_ARGUMENT", name
            assert [v.field for v in error.violations] == [field], name
            assert limit in error.violations[0].description, (name, error.violations)
            assert field in error.message, name
        assert await up.works()
        assert up.statistics.submitted == 1
        lines = up.log_lines()
        assert [line["status"] for line in lines[:-1]] == ["INVALID_ARGUMENT"] * len(WRONG)


async def test_all_violations_come_at_once() -> None:
    async with running() as up:
        request = sound()
        for name in ("empty text", "top_p 0", "n 17", "depth 9", "empty request id", "logprobs"):
            WRONG[name][0](request)
        error = await refused(up, request)
        assert {v.field for v in error.violations} == {
            "text",
            "sampling_params.top_p",
            "sampling_params.n",
            "speculation.max_depth",
            "request_id",
            "sampling_params.logprobs",
        }
        assert "and 5 more" in error.message


async def check_values(up: Running, values: Mapping[str, tuple[Any, bool]]) -> None:
    """The fields whose value is no good, all of them and no others, are named. Raises
    AssertionError."""
    request = pb.GenerateRequest(text="x")
    request.sampling_params.max_tokens = 5
    for name, (value, _) in values.items():
        target: Any = request.sampling_params
        *path, field = name.split(".")
        for part in path:
            target = getattr(request, part)
        if field == "logit_bias":
            target.logit_bias.update(value)
        elif field in ("session_id", "request_id"):
            setattr(request, field, value)
        else:
            setattr(target, field, value)
    wrong = {name for name, (_, good) in values.items() if not good}
    if not wrong:
        await up.client.start(request).text()
        return
    named = [violation.field for violation in (await refused(up, request)).violations]
    prefixed = {n if n in TOP or "." in n else f"sampling_params.{n}" for n in wrong}
    assert {re.sub(r"\[.*", "", field) for field in named} == prefixed


TOP = ("session_id", "request_id")
FLOATS = st.floats(width=32)


def _values(strategy: st.SearchStrategy[Any], good: Callable[[Any], bool]) -> Any:
    return strategy.map(lambda value: (value, good(value)))


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "temperature": _values(FLOATS, lambda x: 0 <= x < math.inf),
        "top_p": _values(FLOATS, lambda x: 0 < x <= 1),
        "top_k": _values(st.integers(-5, 5), lambda k: k >= -1),
        "min_p": _values(FLOATS, lambda x: 0 <= x < 1),
        "frequency_penalty": _values(FLOATS, lambda x: -2 <= x <= 2),
        "presence_penalty": _values(FLOATS, lambda x: -2 <= x <= 2),
        "repetition_penalty": _values(FLOATS, lambda x: 0 < x <= 10),
        "min_tokens": _values(st.integers(0, 8), lambda n: n <= 5),
        "n": _values(st.integers(0, 20), lambda n: 1 <= n <= 16),
        "logprobs": _values(st.integers(0, 40), lambda n: n <= 20),
        "prompt_logprobs": _values(st.integers(0, 40), lambda n: n <= 20),
        "logit_bias": _values(
            st.dictionaries(st.integers(0, 2 * VOCAB), FLOATS, max_size=3),
            lambda bias: all(t < VOCAB and -100 <= x <= 100 for t, x in bias.items()),
        ),
        "speculation.max_depth": _values(st.integers(0, 20), lambda k: k <= 8),
        "request_id": _values(
            st.text(st.characters(codec="utf-8"), max_size=3),
            lambda s: bool(s) and all("!" <= c <= "~" for c in s),
        ),
    },
)


async def test_any_combination_of_values_reports_all_that_are_wrong() -> None:
    async with running() as up:
        examples: list[dict[str, tuple[Any, bool]]] = []

        @settings(max_examples=120, database=None, derandomize=True)
        @given(VALUES)
        def draw(values: dict[str, tuple[Any, bool]]) -> None:
            examples.append(values)

        draw()
        for values in examples:
            await check_values(up, values)
        bad = [sum(not good for _, good in values.values()) for values in examples]
        assert max(bad) >= 6
        assert min(bad) == 0


async def test_a_violation_that_hides_another_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: validation that stops at the first fault."""
    call = Violations.__call__

    def first_only(self: Violations, field: str, description: str) -> None:
        if not self.found:
            call(self, field, description)

    monkeypatch.setattr(Violations, "__call__", first_only)
    async with running() as up:
        await check_values(up, {"top_p": (2.0, False)})
        with pytest.raises(AssertionError):
            await check_values(up, {"top_p": (2.0, False), "n": (0, False)})


async def test_details_of_many_violations_fit_a_header() -> None:
    async with running() as up:
        request = _with(sound(), with_chat(*[("", "x")] * 300))
        error = await refused(up, request)
        assert len(error.violations) == 16
        assert "and 299 more" in error.message


async def test_unknown_fields_are_errors_at_every_depth() -> None:
    # Field 1000, a varint: a client of a newer version that sets what this server cannot know.
    unknown = b"\xc0\x3e\x01"
    places = {
        "1000": pb.GenerateRequest.FromString(sound().SerializeToString() + unknown),
        "sampling_params.1000": pb.GenerateRequest(
            text="x", sampling_params=pb.SamplingParams.FromString(unknown)
        ),
        "speculation.1000": pb.GenerateRequest(
            text="x", speculation=pb.Speculation.FromString(unknown)
        ),
        "chat.messages[1].1000": pb.GenerateRequest(
            chat=pb.ChatInput(
                messages=[
                    pb.ChatMessage(role="user", content="x"),
                    pb.ChatMessage.FromString(b"\x0a\x01u" + unknown),
                ]
            )
        ),
    }
    async with running() as up:
        for field, request in places.items():
            error = await refused(up, request)
            assert [v.field for v in error.violations] == [field]
            assert "not known to this server" in error.violations[0].description
        for message, call in (
            (pb.AbortRequest.FromString(b"\x0a\x01x" + unknown), "Abort"),
            (pb.TokenizeRequest.FromString(b"\x0a\x01x" + unknown), "Tokenize"),
            (pb.DetokenizeRequest.FromString(unknown), "Detokenize"),
            (pb.GetModelInfoRequest.FromString(unknown), "GetModelInfo"),
            (pb.ReleaseSessionRequest.FromString(b"\x0a\x01x" + unknown), "ReleaseSession"),
            (pb.ListSessionsRequest.FromString(unknown), "ListSessions"),
        ):
            with pytest.raises(SelfdraftError, match="INVALID_ARGUMENT"):
                await up.client._unary(call, message, 5)


async def test_tokenize_and_detokenize_are_checked_too() -> None:
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.tokenize()
        assert caught.value.violations == (Violation("input", "one of text and chat is required"),)
        with pytest.raises(SelfdraftError) as caught:
            await up.client.tokenize(text="")
        assert caught.value.violations[0].field == "text"
        with pytest.raises(SelfdraftError) as caught:
            await up.client.tokenize(messages=[("user", "x")], add_special_tokens=True)
        assert caught.value.violations[0].field == "add_special_tokens"
        with pytest.raises(SelfdraftError) as caught:
            await up.client.detokenize([1, VOCAB])
        assert caught.value.violations[0].field == "token_ids[1]"
        with pytest.raises(SelfdraftError) as caught:
            await up.client.abort("")
        assert caught.value.violations[0].field == "request_id"


async def test_kv_cache_smaller_than_the_context_is_the_limit_that_is_named() -> None:
    async with running(context_length=4096, pages=4, page_size=16) as up:
        error = await refused(up, _with(sound(), with_ids(*[5] * 64)))
        assert "KV cache size of 64" in error.violations[0].description


async def _raw(up: Running, method: str, payload: bytes) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(up.target) as channel:
        make: Any = channel.unary_unary  # bytes in, bytes out
        call = make(f"/selfdraft.v1.Inference/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(payload)
    return caught.value


async def test_bytes_that_are_no_message_are_refused_and_the_server_lives() -> None:
    async with running() as up:
        for payload in (b"\x12\x02\xff\xfe", b"\x12\xff\xff\xff\x7f", b"\xff" * 40):
            error = await _raw(up, "Generate", payload)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await _raw(up, "Nothing", b"")).code() is grpc.StatusCode.UNIMPLEMENTED
        assert await up.works()
