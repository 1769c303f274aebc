"""Texts that must have a form, over a real connection, with an engine that obeys constraints."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import anyio
import grpc
import jsonschema
import pytest
from selfdraft import SelfdraftError

from service.config import GrammarLimits, RequestLimits
from service.relay import Relay
from tests.service.harness import EOS, running, service_config

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 4},
    },
    "required": ["kind", "legs"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_schema_gives_such_json_and_stops(as_text: bool) -> None:
    async with running() as up:
        schema = json.dumps(SCHEMA) if as_text else SCHEMA
        for seed in range(4):
            generation = up.client.generate(
                text="An animal: ", json_schema=schema, seed=seed, max_tokens=80
            )
            jsonschema.validate(json.loads(await generation.text()), SCHEMA)
            done = generation.complete
            assert done is not None
            assert (done.finish_reason, done.matched_token_id) == ("stop", EOS)


async def test_several_sequences_keep_apart() -> None:
    async with running(step_s=0.001) as up:
        generation = up.client.generate(
            messages=[("user", "An animal")], json_schema=SCHEMA, n=6, seed=1, max_tokens=80
        )
        texts = await generation.texts()
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 1
        constraints = [spec.constraint for spec in up.engines[0].specs()]
        assert len({id(constraint) for constraint in constraints}) == 6


async def test_regex_and_grammar() -> None:
    async with running() as up:
        text = await up.client.generate(text="x", regex="(ab|é){3}", max_tokens=40).text()
        assert re.fullmatch("(ab|é){3}", text)
        lark = 'start: greeting " " NAME\ngreeting: "hi" | "bye"\nNAME: /[A-Z][a-z]{2}/'
        text = await up.client.generate(text="x", grammar=lark, max_tokens=40).text()
        assert re.fullmatch("(hi|bye) [A-Z][a-z]{2}", text)


async def test_max_tokens_and_stop_strings_cut_a_form_short() -> None:
    async with running() as up:
        cut = up.client.generate(text="x", regex="(ab){50}", max_tokens=5)
        assert await cut.text()
        assert cut.complete is not None
        assert cut.complete.finish_reason == "length"
        stopped = up.client.generate(text="x", regex="(ab){5}(cd){50}", stop=["cdc"], max_tokens=99)
        assert await stopped.text() == "ab" * 5
        assert stopped.complete is not None
        assert stopped.complete.matched_stop_str == "cdc"


async def check_dead_end() -> None:
    async with running() as up:
        generation = up.client.generate(
            text="x", grammar='start: "a" x\nx: x "b"', max_tokens=9, n=2, request_id="dead"
        )
        with pytest.raises(SelfdraftError) as caught:
            await generation.text()
        error = caught.value
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "GRAMMAR_LIMIT")
        assert error.retry_after_s is None
        assert "sampling_params.grammar: a dead end" in error.message
        await up.until_idle()
        assert await up.works()


async def test_a_dead_end_is_an_error_and_no_text() -> None:
    await check_dead_end()


async def test_a_hidden_dead_end_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: nobody asks whether the form could be finished."""
    monkeypatch.setattr(Relay, "_check_form", lambda self, index, stream: None)
    with pytest.raises(BaseExceptionGroup):
        await check_dead_end()


async def test_errors_name_the_field_and_come_with_the_others() -> None:
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", regex="(" * 100_000, top_p=2.0).text()
        found = {v.field: v.description for v in caught.value.violations}
        assert set(found) == {"sampling_params.regex", "sampling_params.top_p"}
        assert len(found["sampling_params.regex"]) <= 240
        assert up.statistics.submitted == 0


async def test_a_slow_compilation_disturbs_nobody_and_ends_in_time() -> None:
    config = service_config()
    limits = RequestLimits(grammar=GrammarLimits(timeout_s=0.8))
    object.__setattr__(config, "limits", limits)
    async with running(config=config, step_s=0.002) as up:
        gaps: list[float] = []

        async def watch() -> None:
            previous = time.monotonic()
            async for _ in up.client.generate(text="x", max_tokens=3000, ignore_eos=True):
                gaps.append(time.monotonic() - previous)
                previous = time.monotonic()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.sleep(0.1)
            began = time.monotonic()
            with pytest.raises(SelfdraftError, match=r"takes longer than 0\.8 s to compile"):
                await up.client.generate(
                    text="x", json_schema={"type": "integer", "multipleOf": 999_983}
                ).text()
            assert time.monotonic() - began < 3
            tasks.cancel_scope.cancel()
        assert len(gaps) > 50
        assert max(gaps[1:]) < 0.5


async def test_a_grammar_that_kills_its_compiler_leaves_the_server_alive() -> None:
    rules = "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(5000)), 'r5000: "x"'])
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", grammar=rules).text()
        assert caught.value.violations[0].field == "sampling_params.grammar"
        assert "too deeply nested" in caught.value.violations[0].description
        assert await up.works()


async def test_guided_requests_are_counted_and_logged() -> None:
    async with running(metrics=True) as up:
        await up.client.generate(text="x", regex="a", max_tokens=9).text()
        await up.client.generate(text="x", max_tokens=9).text()
        await up.idle()
        now = await up.metrics()
        assert now['selfdraft_guided_requests_total{form="regex"}'] == 1
        assert now['selfdraft_guided_requests_total{form="json_schema"}'] == 0
        first, second = up.log_lines()
        assert first["constraint"] == "regex"
        assert "constraint" not in second


async def test_a_call_between_its_tags() -> None:
    form = {
        "type": "triggered_tags",
        "triggers": ["<call="],
        "tags": [
            {
                "begin": "<call=order>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    }
    async with running(metrics=True) as up:
        for seed in range(3):
            generation = up.client.generate(
                text="x", structural_tag={"format": form}, seed=seed, max_tokens=120
            )
            found = re.fullmatch("<call=order>(.*)</call>", await generation.text(), re.DOTALL)
            assert found
            jsonschema.validate(json.loads(found[1]), SCHEMA)
            assert generation.complete is not None
            assert generation.complete.finish_reason == "stop"
        await up.idle()
        now = await up.metrics()
        assert now['selfdraft_guided_requests_total{form="structural_tag"}'] == 3
