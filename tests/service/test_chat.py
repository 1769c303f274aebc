"""Conversations: what of them reaches the template, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from selfdraft import SelfdraftError
from selfdraft.messages import chat_input
from selfdraft.v1 import selfdraft_pb2 as pb

from service.text.template import ChatTemplate
from service.text.tokenizer import Tokenizer
from tests.service.harness import running, tokenizer

pytestmark = pytest.mark.anyio


def a_message(**values: object) -> pb.ChatInput:
    said = pb.ChatMessage(role="assistant", **values)  # type: ignore[arg-type]
    return pb.ChatInput(messages=[pb.ChatMessage(role="user"), said])


def with_tools(*tools: str) -> pb.ChatInput:
    return chat_input([("user", "x")], tools=tools)


def in_parts(*parts: tuple[str, str], content: str = "") -> pb.ChatInput:
    made = [pb.ContentPart(type=kind, text=text) for kind, text in parts]
    return a_message(content_parts=made, content=content)


def with_documents(*documents: str) -> pb.ChatInput:
    return chat_input([("user", "x")], documents=documents)


WRONG: dict[str, tuple[pb.ChatInput, str, str]] = {
    "an empty name": (a_message(name=""), "chat.messages[1].name", "must not be empty"),
    "a long name": (a_message(name="x" * 65), "chat.messages[1].name", "at most 64 characters"),
    "a long call id": (
        a_message(tool_call_id="x" * 129),
        "chat.messages[1].tool_call_id",
        "at most 128 characters, is 129",
    ),
    "calls that are no JSON": (
        a_message(tool_calls="[{]"),
        "chat.messages[1].tool_calls",
        "is not JSON: ",
    ),
    "calls that are no list": (
        a_message(tool_calls="{}"),
        "chat.messages[1].tool_calls",
        "must be a JSON array of objects",
    ),
    "no calls": (a_message(tool_calls="[]"), "chat.messages[1].tool_calls", "at least one"),
    "null calls": (a_message(tool_calls="null"), "chat.messages[1].tool_calls", "must be a JSON"),
    "large calls": (
        a_message(tool_calls=f'[{{"a": "{"x" * 4_000_000}"}}]'),
        "chat.messages",
        "at most 4000000 characters",
    ),
    "an image": (
        in_parts(("text", "a"), ("image_url", "")),
        "chat.messages[1].content_parts[1].type",
        "'image_url' is not supported: only text",
    ),
    "parts and content": (
        in_parts(("text", "a"), content="b"),
        "chat.messages[1].content",
        "must be empty beside content_parts",
    ),
    "too many parts": (
        in_parts(*[("text", "a")] * 257),
        "chat.messages[1].content_parts",
        "at most 256, are 257",
    ),
    "large parts": (
        in_parts(*[("text", "x" * 2_000_001)] * 2),
        "chat.messages",
        "at most 4000000 characters, are 4000002",
    ),
    "large thoughts": (
        a_message(reasoning_content="x" * 4_000_001),
        "chat.messages",
        "at most 4000000 characters, are 4000001",
    ),
    "large documents": (
        with_documents(*['{"text": "' + "x" * 2_000_000 + '"}'] * 2),
        "chat.messages",
        "at most 4000000 characters, are 40000",
    ),
    "too many documents": (
        with_documents(*["{}"] * 257),
        "chat.documents",
        "at most 256, are 257",
    ),
    "a document that is no object": (
        with_documents("{}", '"x"'),
        "chat.documents[1]",
        "must be a JSON object",
    ),
    "a tool that is no JSON": (with_tools("{}", "x"), "chat.tools[1]", "is not JSON: "),
    "a tool that is no object": (with_tools("[1]"), "chat.tools[0]", "must be a JSON object"),
    "a tool of no text": (with_tools('{"a": "\\ud800"}'), "chat.tools[0]", "is not JSON: "),
    "a tool with NaN": (with_tools('{"a": NaN}'), "chat.tools[0]", "NaN is not a JSON value"),
    "a tool with infinity": (with_tools('{"a": 1e999}'), "chat.tools[0]", "is not JSON: "),
    "a deep tool": (
        with_tools('{"a":' * 65 + "1" + "}" * 65),
        "chat.tools[0]",
        "nested at most 64 deep",
    ),
    "a bottomless tool": (with_tools("[" * 100_000), "chat.tools[0]", "nested at most 64 deep"),
    "too many tools": (with_tools(*["{}"] * 129), "chat.tools", "at most 128, are 129"),
    "large tools": (
        with_tools(*['{"a": "' + "x" * 100_000 + '"}'] * 3),
        "chat.tools",
        "at most 262144 characters, are 3000",
    ),
}


async def test_what_is_wrong_with_a_conversation() -> None:
    async with running() as up:
        for name, (chat, field, said) in WRONG.items():
            with pytest.raises(SelfdraftError) as caught:
                await up.client.start(pb.GenerateRequest(chat=chat), timeout=5).text()
            assert caught.value.reason == "INVALID_ARGUMENT", name
            (violation,) = caught.value.violations
            assert violation.field == field, name
            assert said in violation.description, name


async def test_all_of_it_is_reported_at_once() -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="", name="", tool_calls="{")], tools=["1"])
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client._unary("Tokenize", pb.TokenizeRequest(chat=chat), 5)
        at = "chat.messages[0]"
        expected = {f"{at}.role", f"{at}.name", f"{at}.tool_calls", "chat.tools[0]"}
        assert {violation.field for violation in caught.value.violations} == expected


async def test_at_the_limits_it_is_taken() -> None:
    deep = '{"a":' * 64 + "1" + "}" * 64
    async with running() as up:
        chat = with_tools(*[deep] * 128)
        chat.messages.append(
            pb.ChatMessage(role="x" * 64, name="x" * 64, tool_calls="[{}]", tool_call_id="x" * 128)
        )
        await up.client._unary("Tokenize", pb.TokenizeRequest(chat=chat), 5)


def test_a_message_field_there_is_none_of_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        chat_input([{"role": "user", "content": "x", "nonsense": 1}])


async def test_whole_numbers_among_variables_stay_whole() -> None:
    def shows() -> Tokenizer:
        own = tokenizer()
        own.chat_template = ChatTemplate("{{ n }} {{ deep.n }} {{ x }} {{ b }}", {})
        return own

    variables = {"n": 3, "deep": {"n": [1, -2]}, "x": 0.5, "b": True}
    async with running(with_tokenizer=shows) as up:
        ids = await up.client.tokenize(messages=[("user", "x")], template_variables=variables)
        assert await up.client.detokenize(ids) == "3 [1, -2] 0.5 True"


async def test_tools_and_calls_reach_the_template() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %} / {{ m.role }} {{ m.name }}"
        "|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}"
        "|{{ m.keys() | list }}{% endfor %}"
    )

    def shows() -> Tokenizer:
        own = tokenizer()
        own.chat_template = ChatTemplate(source, {})
        return own

    tool = {"type": "function", "function": {"name": "weather", "a": 1, "Z": [1, 2.5, None]}}
    call = {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages: list[Any] = [
        ("user", "x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
    ]
    expected = (
        json.dumps([tool, tool])
        + " / user |||['role', 'content']"
        + " / assistant ||Köln|['role', 'content', 'tool_calls']"
        + " / tool weather|c1||['role', 'content', 'name', 'tool_call_id']"
    )
    async with running(with_tokenizer=shows) as up:
        ids = await up.client.tokenize(messages=messages, tools=[tool, json.dumps(tool)])
        assert await up.client.detokenize(ids) == expected
        generation = up.client.generate(messages=messages, tools=[tool, tool], max_tokens=1)
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.prompt_tokens == len(ids)
        with pytest.raises(ValueError, match="tools, documents: need messages"):
            up.client.generate(text="x", tools=[tool])
        without = await up.client.tokenize(messages=[("user", "x")])
        assert (await up.client.detokenize(without)).startswith("null / user")


async def test_thoughts_parts_and_documents_reach_the_template() -> None:
    source = (
        "{% for d in documents or [] %}{{ d.title }}:{{ d.n }};{% endfor %}"
        "{% for m in messages %}{{ m.role[0] }}"
        "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}"
        "{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %}"
        "{% endfor %}"
    )

    def shows() -> Tokenizer:
        own = tokenizer()
        own.chat_template = ChatTemplate(source, {})
        return own

    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    messages: list[Any] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes", "reasoning_content": ""},
    ]
    documents: list[Any] = [{"title": "T", "n": 3}, '{"title": "U", "n": [1]}']
    async with running(with_tokenizer=shows) as up:
        ids = await up.client.tokenize(messages=messages, documents=documents)
        assert await up.client.detokenize(ids) == "T:3;U:[1];u[a][][b]ayes<>"
        generation = up.client.generate(messages=messages, documents=documents, max_tokens=1)
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.prompt_tokens == len(ids)
        plain = await up.client.tokenize(messages=[("user", "a")])
        assert await up.client.detokenize(plain) == "ua"
