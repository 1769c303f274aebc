"""The gateway's `Generate`: the same generation as our own, in other messages."""

from __future__ import annotations

import json
from typing import Any, cast

import anyio
import grpc
import jsonschema
import pytest
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.gateway.answer import Answer
from tests.service.gateway.calls import PROMPT, ask, connected, neutral, read, refusal
from tests.service.harness import (
    EOS,
    running,
    saying,
    service_config,
    tokenizer,
)

pytestmark = pytest.mark.anyio


async def test_a_stream_is_our_own_in_other_messages() -> None:
    async with running() as up, connected(up) as stub:
        ours = up.client.generate(
            token_ids=PROMPT, max_tokens=20, temperature=0.0, seed=1, ignore_eos=True
        )
        want = [token async for chunk in ours for token in chunk.token_ids]
        chunks, [complete] = await read(stub.Generate(ask(seed=1, ignore_eos=True)))
        assert [token for chunk in chunks for token in chunk.token_ids] == want
        assert all(chunk.prompt_tokens == len(PROMPT) for chunk in chunks)
        # The gateway adds these up.
        assert sum(chunk.completion_tokens for chunk in chunks) == 20
        assert all(chunk.token_ids for chunk in chunks)
        assert (complete.finish_reason, complete.completion_tokens) == ("length", 20)
        assert complete.prompt_tokens == len(PROMPT)
        assert complete.WhichOneof("matched_stop") is None
        assert ours.complete is not None
        assert complete.spec_draft_tokens == ours.complete.spec_draft_tokens > 0
        assert complete.spec_accepted_tokens == ours.complete.spec_accepted_tokens
        # What was streamed is not said again.
        assert not complete.output_ids


async def test_without_streaming_everything_is_in_complete() -> None:
    async with running() as up, connected(up) as stub:
        asked: dict[str, Any] = {"seed": 1, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
        chunks, _ = await read(stub.Generate(ask(**asked)))
        request = ask(stream=False, **asked)
        none, [complete] = await read(stub.Generate(request))
        assert none == []
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert list(complete.output_ids) == ids
        assert complete.completion_tokens == len(ids) == 20
        assert list(complete.output_logprobs.token_ids) == ids
        streamed = vllm.OutputLogProbs()
        for chunk in chunks:
            streamed.MergeFrom(chunk.output_logprobs)
        assert complete.output_logprobs == streamed
        assert complete.input_logprobs == chunks[0].input_logprobs
        assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])


async def test_log_probabilities() -> None:
    async with running() as up, connected(up) as stub:
        request = ask(ignore_eos=True, max_tokens=5, logprobs=3, prompt_logprobs=2)
        chunks, _ = await read(stub.Generate(request))
        first = chunks[0].input_logprobs
        assert list(first.token_ids) == list(PROMPT)
        assert [value.HasField("value") for value in first.token_logprobs] == [False, True, True]
        assert [len(top.token_ids) for top in first.top_logprobs] == [0, 2, 2]
        for chunk in chunks:
            found = chunk.output_logprobs
            assert list(found.token_ids) == list(chunk.token_ids)
            assert len(found.token_logprobs) == len(chunk.token_ids)
            assert all(len(top.values) == 3 for top in found.top_logprobs)


async def test_stop_strings_end_it_here() -> None:
    """The gateway looks for them as well; what counts is that the device is spared."""
    async with running(token=saying("hello world. ")) as up, connected(up) as stub:
        chunks, [complete] = await read(
            stub.Generate(ask(max_tokens=500, stop=["wor"], ignore_eos=True))
        )
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "wor")
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert tokenizer().decode(ids).startswith("hello wor")
        assert complete.completion_tokens == len(ids) < 20
        assert up.finished("stop_string") == 1


async def test_end_tokens_and_stop_tokens() -> None:
    async with running(token=saying("abc", then_eos=True)) as up, connected(up) as stub:
        _, [complete] = await read(stub.Generate(ask()))
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", EOS)
        b = tokenizer().encode("b")[0]
        _, [complete] = await read(stub.Generate(ask(stop_token_ids=[b])))
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", b)


@pytest.mark.parametrize("stream", [True, False])
async def test_several_sequences(stream: bool) -> None:
    async with running(boundaries=8) as up, connected(up) as stub:
        request = ask(stream=stream, n=3, temperature=1.0, seed=5, ignore_eos=True)
        chunks, completes = await read(stub.Generate(request))
        order = [complete.index for complete in completes]
        assert (sorted(order) if stream else order) == [0, 1, 2]
        assert all(complete.completion_tokens == 20 for complete in completes)
        texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for chunk in chunks:
            texts[chunk.index] += chunk.token_ids
        for complete in completes:
            texts[complete.index] += complete.output_ids
        assert [len(text) for text in texts.values()] == [20, 20, 20]
        seeds = [spec.sampling.seed for spec in up.engines[0].specs()]
        assert sorted(seeds) == [5, 6, 7]


async def test_samples_that_end_in_another_order_are_answered_in_theirs() -> None:
    """Answered at its end, the gateway takes the order of `complete`s for their index."""
    sent: list[Any] = []

    class Context:
        async def write(self, message: Any) -> None:
            sent.append(message.complete)

    answer = Answer(cast(Any, Context()), ask(stream=False, n=3))
    for index in (2, 0, 1):
        chunk = pb.GenerateStreamChunk(index=index, token_ids=[index, index])
        await answer.write(pb.GenerateResponse(chunk=chunk))
    for index in (1, 2, 0):
        assert not sent
        complete = pb.GenerateComplete(index=index, finish_reason="length")
        await answer.write(pb.GenerateResponse(complete=complete))
    assert [(c.index, list(c.output_ids)) for c in sent] == [(n, [n, n]) for n in range(3)]


async def test_neutral_values_mean_absent() -> None:
    """Those a gateway fills in, and those of a client that leaves every field alone."""
    async with running() as up, connected(up) as stub:
        await read(stub.Generate(ask(temperature=None)))
        bare = vllm.GenerateRequest(
            tokenized=vllm.TokenizedInput(input_ids=PROMPT),
            sampling_params=vllm.SamplingParams(max_tokens=3),
        )
        await read(stub.Generate(bare))
        for spec in up.engines[0].specs():
            sampling = spec.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
            assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
            assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.0, 0.0)
            assert not sampling.logit_bias
            assert not sampling.coupled, "no seed was given"


async def test_what_is_asked_for_reaches_the_engine() -> None:
    async with running() as up, connected(up) as stub:
        request = ask(
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.25,
            min_tokens=2,
            logit_bias={7: 1.5, 9: -100.0},
            seed=-3,
        )
        await read(stub.Generate(request))
        [spec] = up.engines[0].specs()
        sampling = spec.sampling
        assert sampling.temperature == pytest.approx(0.7)
        assert sampling.top_p == pytest.approx(0.9)
        assert sampling.top_k == 40
        assert sampling.min_p == pytest.approx(0.05)
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
        assert sampling.repetition_penalty == 1.25
        assert dict(sampling.logit_bias) == {7: 1.5, 9: -100.0}
        assert (sampling.seed, sampling.coupled) == (2**64 - 3, True)
        assert spec.min_tokens == 2


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


async def constrained(form: dict[str, Any], finish: str = "stop") -> str:
    async with running(boundaries=0) as up, connected(up) as stub:
        request = ask(stream=False, max_tokens=200, seed=1, **form)
        _, [complete] = await read(stub.Generate(request))
        assert complete.finish_reason in ("stop", finish)
        return tokenizer().decode(list(complete.output_ids))


async def test_forms() -> None:
    choice = vllm.ChoiceConstraint(choices=['say "yes"', "nö", "a\nb"])
    assert await constrained({"choice": choice}) in choice.choices
    jsonschema.validate(json.loads(await constrained({"json_schema": json.dumps(SCHEMA)})), SCHEMA)
    # Any object there is: the engine without a model may find no end to it.
    assert (await constrained({"json_object": True}, "length")).startswith("{")
    assert not (await constrained({"json_object": False}, "length")).startswith("{")
    assert await constrained({"regex": "[x]{3}"}) == "xxx"
    assert await constrained({"grammar": 'start: "lark"'}) == "lark"
    assert await constrained({"grammar": 'root ::= "ebnf"'}) == "ebnf"
    first = {"grammar": 'start: "x"', "grammar_from_first_token": True}
    assert await constrained(first) == "x"


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("mm_inputs", {"mm_inputs": vllm.MultimodalInputs()}),
    ("extra_mm_inputs", {"extra_mm_inputs": [vllm.MultimodalInputs()]}),
    ("media_refs", {"media_refs": vllm.MediaRefs()}),
    ("kv_transfer_params", {"kv_transfer_params": vllm.KvTransferParams()}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
    ("data_parallel_rank", {"data_parallel_rank": 1}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("logit_bias[-4]", {"logit_bias": {-4: 1.0}}),
    ("structural_tag.format", {"structural_tag": "{}"}),
    ("grammar", {"grammar": "root ::= ((("}),
    ("choice.choices", {"choice": vllm.ChoiceConstraint()}),
    ("choice.choices", {"choice": vllm.ChoiceConstraint(choices=["a", ""])}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 1.5}),
    ("n", {"n": 17}),
    ("max_tokens", {"max_tokens": 0}),
]


async def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    async with running() as up, connected(up) as stub:
        for field, parts in UNSUPPORTED:
            request = ask()
            request.MergeFrom(vllm.GenerateRequest(**parts))
            error = await refusal(stub.Generate(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert (error.details() or "").startswith(f"{field}: "), error.details()
        for field, sampling in REFUSED:
            error = await refusal(stub.Generate(ask(**sampling)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            assert (error.details() or "").startswith(f"sampling_params.{field}: "), error.details()
        unknown = ask().SerializeToString() + b"\xf8\x3f\x01"  # field 1023
        error = await refusal(stub.Generate(vllm.GenerateRequest.FromString(unknown)))
        assert "field number 1023" in (error.details() or "")
        error = await refusal(stub.Generate(vllm.GenerateRequest(sampling_params=neutral())))
        assert (error.details() or "").startswith("input: ")
        assert not up.engines[0].plans, "nothing of it reached the engine"
        assert len(up.log_lines()) == len(UNSUPPORTED) + len(REFUSED) + 2


async def test_all_violations_at_once() -> None:
    async with running() as up, connected(up) as stub:
        request = ask(top_p=2.0, truncate_prompt_tokens=1, logprobs=-1)
        error = await refusal(stub.Generate(request))
        assert "(and 2 more)" in (error.details() or "")


async def test_refused_when_full_before_anything_is_sent() -> None:
    """The gateway then tries another worker: its call must not have begun."""
    config = service_config(max_rows=1, max_queue=1)
    async with running(config=config, max_rows=1, step_s=0.002) as up, connected(up) as stub:
        calls = [stub.Generate(ask(max_tokens=1500, ignore_eos=True)) for _ in range(1)]
        await calls[0].read()
        waiting = ask(max_tokens=9)
        waiting.request_id = "chatcmpl-2"
        calls.append(stub.Generate(waiting))
        with anyio.fail_after(5):
            while not up.statistics.queued_requests:
                await anyio.sleep(0.005)
        one_more = ask()
        one_more.request_id = "chatcmpl-3"
        call = stub.Generate(one_more)
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not list(await call.initial_metadata() or ())
        for call in calls:
            call.cancel()
        await up.until_idle()


async def test_headers_wait_for_the_first_token() -> None:
    """Until they are there the gateway can take a request elsewhere."""
    async with running(step_s=0.3) as up, connected(up) as stub:
        call = stub.Generate(ask(ignore_eos=True))
        headers = anyio.Event()

        async def await_headers() -> None:
            await call.initial_metadata()
            headers.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(await_headers)
            with anyio.fail_after(5):
                while not up.statistics.running:
                    await anyio.sleep(0.005)
            assert not headers.is_set()
            with anyio.fail_after(5):
                await headers.wait()
            assert up.statistics.generated_tokens > 0
            call.cancel()
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_and_cancel_free_the_row(stream: bool) -> None:
    async with running(step_s=0.002) as up, connected(up) as stub:
        for end in ("abort", "cancel"):
            call = stub.Generate(ask(stream=stream, max_tokens=3000, ignore_eos=True))
            reading = anyio.Event()

            async def drain(call: Any = call, reading: Any = reading) -> None:
                reading.set()
                error = await refusal(call)
                assert error.code() is grpc.StatusCode.ABORTED

            with anyio.fail_after(5):
                async with anyio.create_task_group() as tasks:
                    if end == "abort":
                        tasks.start_soon(drain)
                        await reading.wait()
                    while not up.statistics.running:
                        await anyio.sleep(0.005)
                    if end == "abort":
                        ids = ["chatcmpl-1", "chatcmpl-none"]
                        await stub.Abort(vllm.AbortRequest(request_ids=ids))
                    else:
                        call.cancel()
            await up.until_idle()
        assert (up.finished("aborted"), up.finished("cancelled")) == (1, 1)
        error = await refusal(stub.Abort(vllm.AbortRequest(request_ids=["not an id"])))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
