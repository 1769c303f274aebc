"""One line per request, with every number and none of its text."""

from __future__ import annotations

import io
import json
import logging

import pytest

from service.logs import capture_stdlib, make_logger
from tests.service.harness import running, saying

pytestmark = pytest.mark.anyio

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_the_line_has_every_number_and_no_text() -> None:
    async with running(token=saying("a generated secret ", then_eos=True)) as up:
        generation = up.client.generate(
            text="a prompt that is secret",
            request_id="r-1",
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=11,
            max_depth=2,
            metadata=(("traceparent", TRACE),),
        )
        assert "secret" in await generation.text()
        await up.idle()
        (line,) = up.log_lines()
        done = generation.complete
        assert done is not None
        expected = {
            "event": "request",
            "level": "info",
            "request_id": "r-1",
            "status": "OK",
            "reason": "stop",
            "input": "text",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.0,
            "seed": 11,
            "n": 1,
            "speculation": "coupled",
            "depth_cap": 2,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": done.completion_tokens,
            "delivered_tokens": done.completion_tokens,
            "cycles": done.spec_cycles,
            "preemptions": 0,
            "spec_draft_tokens": done.spec_draft_tokens,
            "spec_accepted_tokens": done.spec_accepted_tokens,
            "spec_draft_tokens_per_pos": list(done.spec_draft_tokens_per_pos),
            "spec_accepted_tokens_per_pos": list(done.spec_accepted_tokens_per_pos),
            "queue_s": pytest.approx(done.queue_seconds, abs=1e-5),
            "ttft_s": pytest.approx(done.time_to_first_token_seconds, abs=1e-5),
            "e2e_s": pytest.approx(done.e2e_seconds, abs=1e-5),
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
            "parent_span_id": "00f067aa0ba902b7",
        }
        assert {key: line[key] for key in expected} == expected
        assert line["peer"].startswith("ipv4:127.0.0.1")
        assert "secret" not in up.log.getvalue()


async def test_rare_options_are_in_the_line_when_they_were_given() -> None:
    async with running() as up:
        await up.client.generate(
            text="x",
            max_tokens=9,
            min_tokens=2,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=0.25,
            logit_bias={3: 1.0, 4: -1.0},
            logprobs=0,
        ).text()
        await up.client.generate(text="x", max_tokens=9, presence_penalty=0.0).text()
        await up.idle()
        given, bare = up.log_lines()
        rare = {
            "min_tokens": 2,
            "repetition_penalty": 1.5,
            "frequency_penalty": -0.5,
            "presence_penalty": 0.25,
            "logit_bias_tokens": 2,
            "logprobs": 0,
        }
        assert {key: given[key] for key in rare} == rare
        assert not (rare.keys() | {"constraint", "session_id"}) & bare.keys()


async def test_a_refused_request_is_logged_without_its_id_when_that_is_absurd() -> None:
    async with running() as up:
        for request_id in ("x" * 10_000, "bad id"):
            generation = up.client.generate(text="x", request_id=request_id)
            with pytest.raises(Exception, match="INVALID_ARGUMENT"):
                await generation.text()
        await up.idle()
        assert [line["request_id"] for line in up.log_lines()] == ["(refused)", "bad id"]
        assert len(up.log.getvalue()) < 4000


def test_library_messages_come_through_the_same_logger() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    try:
        capture_stdlib(make_logger("json", out))
        logging.getLogger("some.library").warning("careful: %d", 3)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = json.loads(out.getvalue())
    assert (line["library"], line["message"]) == ("some.library", "careful: 3")


def test_pretty_lines_are_for_people() -> None:
    out = io.StringIO()
    make_logger("pretty", out).info("serving", address="127.0.0.1:1")
    assert "serving" in out.getvalue()
    assert "address=127.0.0.1:1" in out.getvalue()
