"""Requests with one thing wrong: the change, the field and what its limit is called."""

from __future__ import annotations

import math

from selfdraft.v1 import selfdraft_pb2 as pb

from tests.service.changes import (
    Change,
    with_chat,
    with_ids,
    with_input,
    with_sampling,
    with_speculation,
)
from tests.service.harness import VOCAB

WRONG: dict[str, tuple[Change, str, str]] = {
    "no input": (lambda r: r.ClearField("text"), "input", "is required"),
    "empty text": (with_input(text=""), "text", "must not be empty"),
    "too many messages": (
        with_chat(*[("user", "")] * 4097),
        "chat.messages",
        "at most 4096, are 4097",
    ),
    "a long role": (
        with_chat(("x" * 65, "y")),
        "chat.messages[0].role",
        "at most 64 characters, is 65",
    ),
    "large variables": (
        with_chat(("user", "x"), chat_template_kwargs={"a": "x" * 70_000}),
        "chat.chat_template_kwargs",
        "at most 65536 bytes, are 700",
    ),
    "empty ids": (with_ids(), "tokenized.input_ids", "at least one"),
    "id too large": (with_ids(1, VOCAB), "tokenized.input_ids[1]", f"0 … {VOCAB - 1}"),
    "id huge": (with_ids(2**32 - 1), "tokenized.input_ids[0]", f"0 … {VOCAB - 1}"),
    "prompt too long": (with_ids(*[5] * 200), "tokenized", "context length of 200"),
    "original text": (
        with_input(tokenized=pb.TokenizedInput(input_ids=[1], original_text="x" * 4_000_001)),
        "tokenized.original_text",
        "at most 4000000 characters, is 4000001",
    ),
    "no messages": (with_chat(), "chat.messages", "at least one"),
    "no role": (with_chat(("user", "a"), ("", "b")), "chat.messages[1].role", "not be empty"),
    "request id with space": (
        lambda r: setattr(r, "request_id", "a b"),
        "request_id",
        "without spaces",
    ),
    "empty request id": (lambda r: setattr(r, "request_id", ""), "request_id", "1 … 128"),
    "long request id": (lambda r: setattr(r, "request_id", "x" * 129), "request_id", "1 … 128"),
    "temperature < 0": (with_sampling(temperature=-0.1), "sampling_params.temperature", ">= 0"),
    "temperature nan": (
        with_sampling(temperature=math.nan),
        "sampling_params.temperature",
        "finite",
    ),
    "temperature inf": (
        with_sampling(temperature=math.inf),
        "sampling_params.temperature",
        "finite",
    ),
    "top_p 0": (with_sampling(top_p=0.0), "sampling_params.top_p", "(0, 1]"),
    "top_p 1.5": (with_sampling(top_p=1.5), "sampling_params.top_p", "(0, 1]"),
    "top_p nan": (with_sampling(top_p=math.nan), "sampling_params.top_p", "(0, 1]"),
    "top_k -2": (with_sampling(top_k=-2), "sampling_params.top_k", ">= 1, or 0 or -1"),
    "min_p < 0": (with_sampling(min_p=-0.5), "sampling_params.min_p", "[0, 1)"),
    "min_p 1": (with_sampling(min_p=1.0), "sampling_params.min_p", "[0, 1)"),
    "min_p nan": (with_sampling(min_p=math.nan), "sampling_params.min_p", "[0, 1)"),
    "max_tokens 0": (with_sampling(max_tokens=0), "sampling_params.max_tokens", ">= 1"),
    "max_tokens too many": (
        with_sampling(max_tokens=200),
        "sampling_params.max_tokens",
        "context length 200",
    ),
    "17 stop strings": (with_sampling(stop=["x"] * 17), "sampling_params.stop", "at most 16"),
    "empty stop": (with_sampling(stop=["a", ""]), "sampling_params.stop[1]", "1 … 256"),
    "long stop": (with_sampling(stop=["a" * 257]), "sampling_params.stop[0]", "1 … 256"),
    "64 stop ids": (
        with_sampling(stop_token_ids=range(100, 164)),
        "sampling_params.stop_token_ids",
        "at most 64",
    ),
    "stop id too large": (
        with_sampling(stop_token_ids=[3, VOCAB]),
        "sampling_params.stop_token_ids[1]",
        "vocab_size",
    ),
    "frequency > 2": (
        with_sampling(frequency_penalty=2.5),
        "sampling_params.frequency_penalty",
        "must be in [-2, 2], is 2.5",
    ),
    "frequency nan": (
        with_sampling(frequency_penalty=math.nan),
        "sampling_params.frequency_penalty",
        "must be in [-2, 2], is nan",
    ),
    "presence < -2": (
        with_sampling(presence_penalty=-2.5),
        "sampling_params.presence_penalty",
        "must be in [-2, 2], is -2.5",
    ),
    "repetition 0": (
        with_sampling(repetition_penalty=0.0),
        "sampling_params.repetition_penalty",
        "must be in (0, 10], is 0",
    ),
    "repetition 11": (
        with_sampling(repetition_penalty=11.0),
        "sampling_params.repetition_penalty",
        "must be in (0, 10], is 11",
    ),
    "repetition nan": (
        with_sampling(repetition_penalty=math.nan),
        "sampling_params.repetition_penalty",
        "(0, 10]",
    ),
    "min_tokens": (
        with_sampling(min_tokens=3),
        "sampling_params.min_tokens",
        "must be at most max_tokens 2, is 3",
    ),
    "min_tokens without max_tokens": (
        lambda r: r.sampling_params.CopyFrom(pb.SamplingParams(min_tokens=5000)),
        "sampling_params.min_tokens",
        "the default of max_tokens here, is 5000",
    ),
    "n 0": (with_sampling(n=0), "sampling_params.n", "must be in 1 … 16, is 0"),
    "n 17": (with_sampling(n=17), "sampling_params.n", "must be in 1 … 16, is 17"),
    "logprobs": (
        with_sampling(logprobs=21),
        "sampling_params.logprobs",
        "must be in 0 … 20, is 21",
    ),
    "prompt_logprobs": (
        with_sampling(prompt_logprobs=2**32 - 1),
        "sampling_params.prompt_logprobs",
        "must be in 0 … 20, is 4294967295",
    ),
    "logit_bias id": (
        with_sampling(logit_bias={VOCAB: 1.0}),
        f"sampling_params.logit_bias[{VOCAB}]",
        f"0 … {VOCAB - 1} (vocab_size)",
    ),
    "logit_bias value": (
        with_sampling(logit_bias={7: 100.5}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is 100.5",
    ),
    "logit_bias inf": (
        with_sampling(logit_bias={7: -math.inf}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is -inf",
    ),
    "logit_bias nan": (
        with_sampling(logit_bias={7: math.nan}),
        "sampling_params.logit_bias[7]",
        "must be in [-100, 100], is nan",
    ),
    "301 biases": (
        with_sampling(logit_bias=dict.fromkeys(range(301), 0.5)),
        "sampling_params.logit_bias",
        "at most 300 entries, are 301",
    ),
    "json_schema": (
        with_sampling(json_schema='{"type": "thing"}'),
        "sampling_params.json_schema",
        "Invalid type: thing",
    ),
    "json_schema text": (
        with_sampling(json_schema=""),
        "sampling_params.json_schema",
        "is not JSON",
    ),
    "regex": (with_sampling(regex="(a"), "sampling_params.regex", "unclosed group"),
    "grammar": (with_sampling(grammar="x"), "sampling_params.grammar", "Expected token ':'"),
    "long grammar": (
        with_sampling(grammar="x" * 131_073),
        "sampling_params.grammar",
        "at most 131072 characters, is 131073",
    ),
    "structural": (
        with_sampling(structural_tag="x"),
        "sampling_params.structural_tag",
        "is not JSON",
    ),
    "structural inside": (
        with_sampling(structural_tag='{"format": {"type": "any_tokens"}}'),
        "sampling_params.structural_tag.format.type",
        "'any_tokens' is not supported: const_string, ",
    ),
    "form without an end": (
        with_sampling(regex="a", ignore_eos=True),
        "sampling_params.ignore_eos",
        "must be absent or false with regex",
    ),
    "form with a least length": (
        with_sampling(json_schema="{}", min_tokens=1),
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
    "depth 9": (with_speculation(max_depth=9), "speculation.max_depth", "0 … 8"),
    "unknown mode": (with_speculation(mode=99), "speculation.mode", "99 is not a mode"),
    "off with depth": (
        with_speculation(mode=pb.SPECULATION_MODE_OFF, max_depth=2),
        "speculation.max_depth",
        "mode is off",
    ),
    "coupled without depth": (
        with_speculation(mode=pb.SPECULATION_MODE_COUPLED, max_depth=0),
        "speculation.max_depth",
        "mode is coupled",
    ),
    "on without depth": (
        with_speculation(mode=pb.SPECULATION_MODE_REJECTION, max_depth=0),
        "speculation.max_depth",
        "mode is rejection",
    ),
}
