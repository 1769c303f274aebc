"""Everything a request can get wrong, as a client sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from selfdraft import SelfdraftError, Violation
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.service.harness import VOCAB, Running, running

pytestmark = pytest.mark.anyio

Change = Callable[[pb.GenerateRequest], object]


def _sampling(**values: object) -> Change:
    return lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(**values))  # type: ignore[arg-type]


def _speculation(**values: object) -> Change:
    return lambda r: r.speculation.MergeFrom(pb.Speculation(**values))  # type: ignore[arg-type]


def _input(**values: object) -> Change:
    def change(request: pb.GenerateRequest) -> None:
        request.ClearField("text")
        request.MergeFrom(pb.GenerateRequest(**values))  # type: ignore[arg-type]

    return change


def _chat(*messages: tuple[str, str], **more: object) -> Change:
    said = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return _input(chat=pb.ChatInput(messages=said, **more))  # type: ignore[arg-type]


def _ids(*ids: int) -> Change:
    return _input(tokenized=pb.TokenizedInput(input_ids=ids))


WRONG: dict[str, tuple[Change, str, str]] = {
    "no input": (lambda r: r.ClearField("text"), "input", "is required"),
    "empty text": (_input(text=""), "text", "must not be empty"),
    "empty ids": (_ids(), "tokenized.input_ids", "at least one"),
    "id too large": (_ids(1, VOCAB), "tokenized.input_ids[1]", f"0 … {VOCAB - 1}"),
    "id huge": (_ids(2**32 - 1), "tokenized.input_ids[0]", f"0 … {VOCAB - 1}"),
    "prompt too long": (_ids(*[5] * 200), "tokenized", "context length of 200"),
    "original text": (
        _input(tokenized=pb.TokenizedInput(input_ids=[1], original_text="x")),
        "tokenized.original_text",
        "not supported yet",
    ),
    "no messages": (_chat(), "chat.messages", "at least one"),
    "no role": (_chat(("user", "a"), ("", "b")), "chat.messages[1].role", "not be empty"),
    "request id with space": (
        lambda r: setattr(r, "request_id", "a b"),
        "request_id",
        "without spaces",
    ),
    "empty request id": (lambda r: setattr(r, "request_id", ""), "request_id", "1 … 128"),
    "long request id": (lambda r: setattr(r, "request_id", "x" * 129), "request_id", "1 … 128"),
    "temperature < 0": (_sampling(temperature=-0.1), "sampling_params.temperature", ">= 0"),
    "temperature nan": (_sampling(temperature=math.nan), "sampling_params.temperature", "finite"),
    "temperature inf": (_sampling(temperature=math.inf), "sampling_params.temperature", "finite"),
    "top_p 0": (_sampling(top_p=0.0), "sampling_params.top_p", "(0, 1]"),
    "top_p 1.5": (_sampling(top_p=1.5), "sampling_params.top_p", "(0, 1]"),
    "top_p nan": (_sampling(top_p=math.nan), "sampling_params.top_p", "(0, 1]"),
    "top_k -2": (_sampling(top_k=-2), "sampling_params.top_k", ">= 1, or 0 or -1"),
    "min_p < 0": (_sampling(min_p=-0.5), "sampling_params.min_p", "[0, 1)"),
    "min_p 1": (_sampling(min_p=1.0), "sampling_params.min_p", "[0, 1)"),
    "min_p nan": (_sampling(min_p=math.nan), "sampling_params.min_p", "[0, 1)"),
    "max_tokens 0": (_sampling(max_tokens=0), "sampling_params.max_tokens", ">= 1"),
    "max_tokens too many": (
        _sampling(max_tokens=200),
        "sampling_params.max_tokens",
        "context length 200",
    ),
    "17 stop strings": (_sampling(stop=["x"] * 17), "sampling_params.stop", "at most 16"),
    "empty stop": (_sampling(stop=["a", ""]), "sampling_params.stop[1]", "1 … 256"),
    "long stop": (_sampling(stop=["a" * 257]), "sampling_params.stop[0]", "1 … 256"),
    "64 stop ids": (
        _sampling(stop_token_ids=range(100, 164)),
        "sampling_params.stop_token_ids",
        "at most 64",
    ),
    "stop id too large": (
        _sampling(stop_token_ids=[3, VOCAB]),
        "sampling_params.stop_token_ids[1]",
        "vocab_size",
    ),
    "frequency": (_sampling(frequency_penalty=0.5), "sampling_params.frequency_penalty", "not sup"),
    "presence": (_sampling(presence_penalty=-1.0), "sampling_params.presence_penalty", "not sup"),
    "repetition": (
        _sampling(repetition_penalty=1.1),
        "sampling_params.repetition_penalty",
        "not supported yet: must be absent or 1",
    ),
    "repetition 0": (
        _sampling(repetition_penalty=0.0),
        "sampling_params.repetition_penalty",
        "not supported yet",
    ),
    "min_tokens": (_sampling(min_tokens=1), "sampling_params.min_tokens", "not supported yet"),
    "n": (_sampling(n=2), "sampling_params.n", "not supported yet"),
    "spaces": (
        _sampling(spaces_between_special_tokens=False),
        "sampling_params.spaces_between_special_tokens",
        "must be absent or true",
    ),
    "logprobs": (_sampling(logprobs=0), "sampling_params.logprobs", "must be absent"),
    "prompt_logprobs": (_sampling(prompt_logprobs=1), "sampling_params.prompt_logprobs", "absent"),
    "logit_bias": (_sampling(logit_bias={1: 0.0}), "sampling_params.logit_bias", "must be empty"),
    "json_schema": (_sampling(json_schema="{}"), "sampling_params.json_schema", "not supported"),
    "regex": (_sampling(regex=""), "sampling_params.regex", "not supported yet"),
    "grammar": (_sampling(grammar="x"), "sampling_params.grammar", "not supported yet"),
    "structural": (_sampling(structural_tag="x"), "sampling_params.structural_tag", "not supp"),
    "depth 9": (_speculation(max_depth=9), "speculation.max_depth", "0 … 8"),
    "coupled": (
        _speculation(mode=pb.SPECULATION_MODE_COUPLED),
        "speculation.mode",
        "not supported yet",
    ),
    "unknown mode": (_speculation(mode=99), "speculation.mode", "99 is not a mode"),
    "off with depth": (
        _speculation(mode=pb.SPECULATION_MODE_OFF, max_depth=2),
        "speculation.max_depth",
        "mode is off",
    ),
    "on without depth": (
        _speculation(mode=pb.SPECULATION_MODE_REJECTION, max_depth=0),
        "speculation.max_depth",
        "mode is rejection",
    ),
}

NEUTRAL = pb.SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    max_tokens=3,
    min_tokens=0,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    ignore_eos=False,
    n=1,
    include_stop_str_in_output=False,
    seed=2**64 - 1,
)


async def refused(up: Running, request: pb.GenerateRequest) -> SelfdraftError:
    with pytest.raises(SelfdraftError) as caught:
        await up.client.start(request).text()
    return caught.value


def sound() -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="def add")
    request.sampling_params.max_tokens = 2
    return request


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
        for name in ("empty text", "top_p 0", "n", "depth 9", "empty request id", "logprobs"):
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


async def test_details_of_many_violations_fit_a_header() -> None:
    async with running() as up:
        request = _with(sound(), _chat(*[("", "x")] * 300))
        error = await refused(up, request)
        assert len(error.violations) == 16
        assert "and 299 more" in error.message


def _with(request: pb.GenerateRequest, change: Change) -> pb.GenerateRequest:
    change(request)
    return request


async def test_neutral_values_mean_absent() -> None:
    async with running() as up:
        bare, spelt = sound(), sound()
        bare.sampling_params.CopyFrom(pb.SamplingParams(max_tokens=3, seed=2**64 - 1))
        spelt.sampling_params.CopyFrom(NEUTRAL)
        first, second = up.client.start(bare), up.client.start(spelt)
        assert await first.text() == await second.text()


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
        ):
            with pytest.raises(SelfdraftError, match="INVALID_ARGUMENT"):
                await up.client._unary(call, message, 5)


async def test_the_last_of_several_inputs_is_the_input() -> None:
    """Protobuf itself keeps one member of a oneof, so "both" cannot reach the server."""
    async with running() as up:
        both = sound().SerializeToString() + _with(sound(), _ids(9)).SerializeToString()
        generation = up.client.start(pb.GenerateRequest.FromString(both))
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.prompt_tokens == 1


async def test_chat_template_variables() -> None:
    async with running() as up:
        ok = up.client.generate(
            messages=[("user", "x")], template_variables={"enable_thinking": False}, max_tokens=1
        )
        await ok.text()
        for name in ("messages", "bos_token", "add_generation_prompt", "not a name"):
            bad = up.client.generate(messages=[("user", "x")], template_variables={name: 1})
            with pytest.raises(SelfdraftError) as caught:
                await bad.text()
            assert caught.value.violations[0].field == f"chat.chat_template_kwargs.{name}"


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
        error = await refused(up, _with(sound(), _ids(*[5] * 64)))
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
