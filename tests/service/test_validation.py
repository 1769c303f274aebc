"""Everything a request can get wrong, as a client sees it."""

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
    "too many messages": (_chat(*[("user", "")] * 4097), "chat.messages", "at most 4096, are 4097"),
    "a long role": (
        _chat(("x" * 65, "y")),
        "chat.messages[0].role",
        "at most 64 characters, is 65",
    ),
    "large variables": (
        _chat(("user", "x"), chat_template_kwargs={"a": "x" * 70_000}),
        "chat.chat_template_kwargs",
        "at most 65536 bytes, are 700",
    ),
    "empty ids": (_ids(), "tokenized.input_ids", "at least one"),
    "id too large": (_ids(1, VOCAB), "tokenized.input_ids[1]", f"0 … {VOCAB - 1}"),
    "id huge": (_ids(2**32 - 1), "tokenized.input_ids[0]", f"0 … {VOCAB - 1}"),
    "prompt too long": (_ids(*[5] * 200), "tokenized", "context length of 200"),
    "original text": (
        _input(tokenized=pb.TokenizedInput(input_ids=[1], original_text="x" * 4_000_001)),
        "tokenized.original_text",
        "at most 4000000 characters, is 4000001",
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
    "frequency > 2": (
        _sampling(frequency_penalty=2.5),
        "sampling_params.frequency_penalty",
        "must be in [-2, 2], is 2.5",
    ),
    "frequency nan": (
        _sampling(frequency_penalty=math.nan),
        "sampling_params.frequency_penalty",
        "must be in [-2, 2], is nan",
    ),
    "presence < -2": (
        _sampling(presence_penalty=-2.5),
        "sampling_params.presence_penalty",
        "must be in [-2, 2], is -2.5",
    ),
    "repetition 0": (
        _sampling(repetition_penalty=0.0),
        "sampling_params.repetition_penalty",
        "must be in (0, 10], is 0",
    ),
    "repetition 11": (
        _sampling(repetition_penalty=11.0),
        "sampling_params.repetition_penalty",
        "must be in (0, 10], is 11",
    ),
    "repetition nan": (
        _sampling(repetition_penalty=math.nan),
        "sampling_params.repetition_penalty",
        "(0, 10]",
    ),
    "min_tokens": (
        _sampling(min_tokens=3),
        "sampling_params.min_tokens",
        "must be at most max_tokens 2, is 3",
    ),
    "min_tokens without max_tokens": (
        lambda r: r.sampling_params.CopyFrom(pb.SamplingParams(min_tokens=5000)),
        "sampling_params.min_tokens",
        "the default of max_tokens here, is 5000",
    ),
    "n 0": (_sampling(n=0), "sampling_params.n", "must be in 1 … 16, is 0"),
    "n 17": (_sampling(n=17), "sampling_params.n", "must be in 1 … 16, is 17"),
    "logprobs": (_sampling(logprobs=21), "sampling_params.logprobs", "must be in 0 … 20, is 21"),
    "prompt_logprobs": (
        _sampling(prompt_logprobs=2**32 - 1),
        "sampling_params.prompt_logprobs",
        "must be in 0 … 20, is 4294967295",
    ),
    "logit_bias id": (
        _sampling(logit_bias={VOCAB: 1.0}),
        f"sampling_params.logit_bias[{VOCAB}]",
        f"0 … {VOCAB - 1} (vocab_size)",
    ),
    "logit_bias value": (
        _sampling(logit_bias={7: 100.5}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is 100.5",
    ),
    "logit_bias inf": (
        _sampling(logit_bias={7: -math.inf}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is -inf",
    ),
    "logit_bias nan": (
        _sampling(logit_bias={7: math.nan}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is nan",
    ),
    "301 biases": (
        _sampling(logit_bias=dict.fromkeys(range(301), 0.5)),
        "sampling_params.logit_bias",
        "at most 300 entries, are 301",
    ),
    "json_schema": (
        _sampling(json_schema='{"type": "thing"}'),
        "sampling_params.json_schema",
        "Invalid type: thing",
    ),
    "json_schema text": (_sampling(json_schema=""), "sampling_params.json_schema", "is not JSON"),
    "regex": (_sampling(regex="(a"), "sampling_params.regex", "unclosed group"),
    "grammar": (_sampling(grammar="x"), "sampling_params.grammar", "Expected token ':'"),
    "long grammar": (
        _sampling(grammar="x" * 131_073),
        "sampling_params.grammar",
        "at most 131072 characters, is 131073",
    ),
    "structural": (
        _sampling(structural_tag="x"),
        "sampling_params.structural_tag",
        "is not JSON",
    ),
    "structural inside": (
        _sampling(structural_tag='{"format": {"type": "any_tokens"}}'),
        "sampling_params.structural_tag.format.type",
        "'any_tokens' is not supported: const_string, ",
    ),
    "form without an end": (
        _sampling(regex="a", ignore_eos=True),
        "sampling_params.ignore_eos",
        "must be absent or false with regex",
    ),
    "form with a least length": (
        _sampling(json_schema="{}", min_tokens=1),
        "sampling_params.min_tokens",
        "must be absent or 0 with json_schema",
    ),
    "session id": (
        lambda r: setattr(r, "session_id", "a\nb"),
        "session_id",
        "1 … 128 printable ASCII characters without spaces",
    ),
    "empty session id": (lambda r: setattr(r, "session_id", ""), "session_id", "1 … 128"),
    "long session id": (lambda r: setattr(r, "session_id", "x" * 129), "session_id", "1 … 128"),
    "session without prefix": (
        lambda r: r.MergeFrom(pb.GenerateRequest(session_id="s", reuse_prefix=False)),
        "reuse_prefix",
        "must be absent or true with session_id",
    ),
    "session of several": (
        lambda r: r.MergeFrom(
            pb.GenerateRequest(session_id="s", sampling_params=pb.SamplingParams(n=2))
        ),
        "sampling_params.n",
        "must be absent or 1 with session_id",
    ),
    "depth 9": (_speculation(max_depth=9), "speculation.max_depth", "0 … 8"),
    "unknown mode": (_speculation(mode=99), "speculation.mode", "99 is not a mode"),
    "off with depth": (
        _speculation(mode=pb.SPECULATION_MODE_OFF, max_depth=2),
        "speculation.max_depth",
        "mode is off",
    ),
    "coupled without depth": (
        _speculation(mode=pb.SPECULATION_MODE_COUPLED, max_depth=0),
        "speculation.max_depth",
        "mode is coupled",
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
    spaces_between_special_tokens=False,
    ignore_eos=False,
    n=1,
    include_stop_str_in_output=False,
    seed=2**64 - 1,
    logit_bias={5: 0.0},
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


ACCEPTED: dict[str, tuple[Change, dict[str, Any]]] = {
    "frequency": (_sampling(frequency_penalty=-2.0), {"frequency_penalty": -2.0}),
    "presence": (_sampling(presence_penalty=2.0), {"presence_penalty": 2.0}),
    "repetition": (_sampling(repetition_penalty=10.0), {"repetition_penalty": 10.0}),
    "bias": (
        _sampling(logit_bias={VOCAB - 1: -100.0, 3: 100.0, 9: 0.0}),
        {"logit_bias": ((3, 100.0), (VOCAB - 1, -100.0))},
    ),
    "seed": (_sampling(seed=7), {"seed": 7, "coupled": True}),
    "no seed": (lambda r: None, {"coupled": False}),
}


async def test_values_at_their_limits_reach_the_engine() -> None:
    async with running() as up:
        for name, (change, expected) in ACCEPTED.items():
            request = sound()
            change(request)
            await up.client.start(request).text()
            sampling = up.engines[0].specs()[-1].sampling
            assert {key: getattr(sampling, key) for key in expected} == expected, name


async def test_row_options_reach_the_engine() -> None:
    async with running() as up:
        generation = up.client.generate(
            text="def add", max_tokens=9, min_tokens=9, logprobs=20, prompt_logprobs=0
        )
        await generation.text()
        spec = up.engines[0].specs()[-1]
        assert (spec.min_tokens, spec.max_tokens) == (9, 9)
        assert (spec.logprobs, spec.prompt_logprobs) == (20, 0)
        assert spec.constraint is None
        await up.client.generate(text="x", max_tokens=9, regex="[ab]{2}").text()
        assert up.engines[0].specs()[-1].constraint is not None


Seed = int | None
MODES: list[tuple[str, int | None, Seed, str, bool, bool]] = [
    # asked mode, max_depth, seed, mode used, coupled noise, drafts
    ("auto", None, None, "REJECTION", False, True),
    ("auto", None, 5, "COUPLED", True, True),
    ("auto", 0, None, "OFF", True, False),
    ("auto", 0, 5, "OFF", True, False),
    ("auto", 2, 5, "COUPLED", True, True),
    ("off", None, None, "OFF", True, False),
    ("off", None, 5, "OFF", True, False),
    ("coupled", None, None, "COUPLED", True, True),
    ("coupled", None, 5, "COUPLED", True, True),
    ("rejection", None, 5, "REJECTION", False, True),
    ("rejection", None, None, "REJECTION", False, True),
]


async def test_speculation_modes() -> None:
    async with running() as up:
        for mode, depth, seed, used, coupled, drafts in MODES:
            options: dict[str, Any] = {} if seed is None else {"seed": seed}
            generation = up.client.generate(
                text="x",
                speculation=mode,  # type: ignore[arg-type]
                max_depth=depth,
                max_tokens=30,
                ignore_eos=True,
                **options,
            )
            await generation.text()
            done = generation.complete
            assert done is not None
            case = (mode, depth, seed)
            assert pb.SpeculationMode.Name(done.speculation_mode).endswith(used), case
            assert (done.spec_draft_tokens > 0) is drafts, case
            sampling = up.engines[0].specs()[-1].sampling
            assert sampling.coupled is coupled, case
            assert sampling.seed == done.seed, case
            assert seed is None or done.seed == seed, case


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
            (pb.ReleaseSessionRequest.FromString(b"\x0a\x01x" + unknown), "ReleaseSession"),
            (pb.ListSessionsRequest.FromString(unknown), "ListSessions"),
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
