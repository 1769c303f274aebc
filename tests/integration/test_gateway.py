"""The whole way: `openai` and `anthropic` clients, smg, two servers of the bundled model."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import anyio
import anyio.to_thread
import jsonschema
import openai
import pytest
from selfdraft import Client, SelfdraftError
from selfdraft.client import Generation
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.integration.processes import Gateway, Worker

MODEL = "tiny"
PROMPT: Any = [{"role": "user", "content": "def add(a, b):"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "new": {"type": "boolean"}},
    "required": ["size", "new"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "order", "description": "d", "parameters": SCHEMA}}
]
STICKY = ("--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0")
"""A request goes where its prefix is, also while a worker is new."""


class Fleet:
    """Two workers behind a gateway, and clients of it."""

    def __init__(self, workers: list[Worker], gateway: Gateway) -> None:
        self.workers = workers
        self.gateway = gateway
        self.openai = openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        self.anthropic = anthropic.Anthropic(
            base_url=gateway.url, api_key="none", max_retries=0, timeout=60
        )

    def chat(self, **options: Any) -> Any:
        asked = {"model": MODEL, "messages": PROMPT, "max_tokens": 16, "temperature": 0} | options
        return self.openai.chat.completions.create(**asked)

    def message(self, **options: Any) -> Any:
        asked = {"model": MODEL, "messages": PROMPT, "max_tokens": 16} | options
        return self.anthropic.messages.create(**asked)

    def loads(self) -> list[pb.GetLoadsResponse]:
        """Of each worker."""

        async def ask() -> list[pb.GetLoadsResponse]:
            answers = []
            for worker in self.workers:
                async with Client(worker.target) as client:
                    answers.append(await client.loads())
            return answers

        return anyio.run(ask, backend="asyncio")

    def until(self, holds: Callable[[list[pb.GetLoadsResponse]], bool]) -> None:
        """Waits for `loads` to be so."""
        deadline = time.monotonic() + 20
        while not holds(loads := self.loads()):
            assert time.monotonic() < deadline, loads
            time.sleep(0.05)

    def until_idle(self) -> None:
        self.until(lambda loads: not any(now.running_requests for now in loads))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    workers = [
        Worker("--max-rows", "3", "--max-queue", "2", "--kv-memory", "96MiB") for _ in range(2)
    ]
    gateway: Gateway | None = None
    try:
        for worker in workers:
            worker.wait()
        gateway = Gateway(*workers, options=STICKY)
        gateway.wait(workers=2)
        yield Fleet(workers, gateway)
    finally:
        for process in (*workers, *([gateway] if gateway else [])):
            process.stop()


def test_the_model_is_listed(fleet: Fleet) -> None:
    assert [model.id for model in fleet.openai.models.list().data] == [MODEL]


def test_a_chat_is_what_the_server_itself_says(fleet: Fleet) -> None:
    async def direct() -> tuple[str, pb.GenerateComplete]:
        async with Client(fleet.workers[0].target) as client:
            messages = [("user", PROMPT[0]["content"])]
            generation = client.generate(messages=messages, max_tokens=16, temperature=0)
            text = await generation.text()
            assert generation.complete is not None
            return text, generation.complete

    text, complete = anyio.run(direct, backend="asyncio")
    answer = fleet.chat()
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (text, "length")
    usage = answer.usage
    assert usage.prompt_tokens == complete.prompt_tokens
    assert usage.completion_tokens == complete.completion_tokens == 16
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens <= 2 * 15


def test_a_streamed_chat_is_the_same(fleet: Fleet) -> None:
    events = list(fleet.chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == fleet.chat().choices[0].message.content
    assert len([e for e in events if e.choices and e.choices[0].delta.content]) > 2
    ends = [e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason]
    assert ends == ["length"]
    usage = events[-1].usage
    assert (usage.completion_tokens, usage.total_tokens) == (16, usage.prompt_tokens + 16)
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(fleet: Fleet, stream: bool) -> None:
    whole = fleet.chat(max_tokens=24).choices[0].message.content
    stop = whole[10:14]
    answer = fleet.chat(max_tokens=24, stop=[stop], stream=stream)
    if stream:
        events = [event.choices[0] for event in answer]
        text = "".join(event.delta.content or "" for event in events)
        finish = events[-1].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == (whole[: whole.index(stop)], "stop")


def test_json_schema(fleet: Fleet) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    answer = fleet.chat(response_format=form, max_tokens=200, temperature=1, seed=3)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_tools(fleet: Fleet) -> None:
    """The model is too small to call one by itself: that it may, and that it must."""
    may = fleet.chat(tools=TOOLS)
    assert may.choices[0].finish_reason in ("length", "stop", "tool_calls")
    must = {"type": "function", "function": {"name": "order"}}
    for stream in (False, True):
        answer = fleet.chat(
            tools=TOOLS, tool_choice=must, max_tokens=200, temperature=1, seed=1, stream=stream
        )
        if stream:
            calls = [c for e in answer for c in e.choices[0].delta.tool_calls or ()]
        else:
            assert answer.choices[0].finish_reason == "tool_calls"
            calls = answer.choices[0].message.tool_calls
        assert [c.function.name for c in calls if c.function.name] == ["order"]
        arguments = "".join(call.function.arguments or "" for call in calls)
        jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("named", [False, True])
def test_tools_in_a_format_of_their_own(fleet: Fleet, named: bool) -> None:
    """smg asks for a call with Inkling's tags as structural tag, and reads it from the text."""
    gateway = Gateway(*fleet.workers, options=(*STICKY, "--tool-call-parser", "inkling"))
    try:
        gateway.wait(workers=2)
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        must: Any = {"type": "function", "function": {"name": "order"}} if named else "required"
        answer = client.chat.completions.create(
            model=MODEL, messages=PROMPT, tools=TOOLS, tool_choice=must, max_tokens=200, seed=1
        )
    finally:
        gateway.stop()
    calls = answer.choices[0].message.tool_calls
    assert calls, answer
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "order"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens, "drafts are held to it, not turned off"


def test_log_probabilities(fleet: Fleet) -> None:
    [choice] = fleet.chat(max_tokens=4, logprobs=True, top_logprobs=2).choices
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 2
        # Greedy: the token drawn is the most probable one.
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_a_seed_repeats_a_text(fleet: Fleet) -> None:
    def texts(**options: Any) -> list[str]:
        choices = fleet.chat(temperature=1.0, max_tokens=24, **options).choices
        return [choice.message.content for choice in choices]

    [first] = texts(seed=11)
    assert texts(seed=11) == [first] != texts(seed=12)
    several = texts(seed=11, n=2)
    assert several == [first, texts(seed=12)[0]], "sample i has the seed + i"


def test_completions(fleet: Fleet) -> None:
    answer = fleet.openai.completions.create(
        model=MODEL, prompt="def add(", max_tokens=8, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    yes = fleet.openai.completions.create(
        model=MODEL, prompt="Is it?", max_tokens=8, extra_body={"regex": "yes|no"}
    )
    assert yes.choices[0].text in ("yes", "no")


def test_anthropic_messages(fleet: Fleet) -> None:
    answer = fleet.message(system="You write Python.")
    [block] = answer.content
    assert block.type == "text"
    assert block.text
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 16)
    assert answer.usage.input_tokens > 10
    with fleet.anthropic.messages.stream(model=MODEL, max_tokens=16, messages=PROMPT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 16)
    stopped = fleet.message(stop_sequences=["add"], max_tokens=40)
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == "add"
    assert "add" not in "".join(block.text for block in stopped.content)


def test_anthropic_tools(fleet: Fleet) -> None:
    tool = {"name": "order", "description": "d", "input_schema": SCHEMA}
    must = {"type": "tool", "name": "order"}
    answer = fleet.message(tools=[tool], tool_choice=must, max_tokens=200)
    [use] = [block for block in answer.content if block.type == "tool_use"]
    assert (use.name, answer.stop_reason) == ("order", "tool_use")
    jsonschema.validate(use.input, SCHEMA)


def test_a_bad_request_names_its_field(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        fleet.chat(max_tokens=99_999)
    assert "sampling_params.max_tokens: must be at most" in str(refused.value)
    with pytest.raises(openai.BadRequestError) as refused:
        fleet.chat(extra_body={"regex": "("})
    assert "sampling_params.regex" in str(refused.value)


def test_a_client_that_leaves_frees_its_row(fleet: Fleet) -> None:
    before = sum(now.finished_requests["length"] for now in fleet.loads())
    stream = fleet.chat(max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    fleet.until(lambda loads: any(now.running_requests for now in loads))
    stream.close()
    fleet.until_idle()
    with pytest.raises(openai.APITimeoutError):
        fleet.chat(max_tokens=1900, timeout=0.7, extra_body={"ignore_eos": True})
    fleet.until_idle()
    assert sum(now.finished_requests["length"] for now in fleet.loads()) == before
    assert fleet.chat(max_tokens=2).choices


def test_a_prompt_goes_where_its_prefix_is(fleet: Fleet) -> None:
    """Also by way of a gateway that has seen none of them: it knows from the workers."""
    prompts = [f"# file {name}\n" + f"def {name}(x):\n    return x\n" * 10 for name in "abcd"]

    def ask(gateway: openai.OpenAI, prompt: str) -> int:
        answer = gateway.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    assert [ask(fleet.openai, prompt) for prompt in prompts] == [0, 0, 0, 0]
    assert all(now.kv_pages_cached for now in fleet.loads()), "both have some"
    fresh = Gateway(*fleet.workers, options=STICKY)
    try:
        fresh.wait(workers=2)
        client = openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="none", max_retries=0)
        cached = [ask(client, prompt) for prompt in prompts]
        assert all(tokens >= 64 for tokens in cached), cached
    finally:
        fresh.stop()


@contextmanager
def filled(workers: list[Worker]) -> Iterator[None]:
    """Every row and every place in the queue of `workers` is taken."""
    ready, done = threading.Event(), threading.Event()

    async def hold() -> None:
        clients = [Client(worker.target) for worker in workers]
        streams = [await take_a_place(client) for client in clients for _ in range(5)]
        ready.set()
        await anyio.to_thread.run_sync(done.wait)
        for stream in streams:
            stream.cancel()
        for client in clients:
            await client.close()

    async def take_a_place(client: Client) -> Generation:
        while True:
            stream = client.generate(text="x", max_tokens=1900, ignore_eos=True)
            try:
                await stream.request_id()
            except SelfdraftError:  # the queue is full until its first ones have a row
                await anyio.sleep(0.05)
            else:
                return stream

    thread = threading.Thread(target=lambda: anyio.run(hold, backend="asyncio"))
    thread.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        done.set()
        thread.join()


def test_a_full_worker_is_passed_over_and_a_full_fleet_refuses(fleet: Fleet) -> None:
    fleet.until_idle()
    with filled(fleet.workers[:1]):
        for _ in range(4):
            assert fleet.chat(max_tokens=2).choices
    with filled(fleet.workers), pytest.raises(openai.APIStatusError) as refused:
        fleet.chat(max_tokens=2)
    assert refused.value.status_code in (429, 503)
    fleet.until_idle()


def test_when_a_worker_dies_the_other_answers(fleet: Fleet) -> None:
    """The last one: there is one worker less after it."""
    victim, survivor = fleet.workers
    victim.process.kill()
    for number in range(6):
        answer = fleet.chat(messages=[{"role": "user", "content": f"{number} def f"}], max_tokens=2)
        assert answer.usage.completion_tokens == 2
    text = "".join(e.choices[0].delta.content or "" for e in fleet.chat(stream=True))
    assert text
    assert survivor.running()
    fleet.gateway.process.send_signal(signal.SIGTERM)
    assert fleet.gateway.process.wait(30) == 0
