"""What is long about a request happens on another thread than the streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from selfdraft.v1 import selfdraft_pb2 as pb

from service import prompt, relay
from service.aside import LARGE
from service.text.grammar import Grammars
from service.text.tokenizer import Tokenizer
from tests.service.harness import VOCAB, Running, running, tokenizer

pytestmark = pytest.mark.anyio

Asked = pb.GenerateRequest
LONG = 5_000
"""Tokens: beyond every threshold."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Name of a piece of work to the threads it ran on."""
    seen: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("check_known", "read_chat", "_given_ids"):
        watch(prompt, name)
    watch(relay, "add_input")
    watch(Tokenizer, "encode")
    watch(Tokenizer, "decode")
    watch(Grammars, "_check_size")
    return seen


def chat(messages: int) -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(role="user", content="word")] * messages)


def schema(fields: int) -> str:
    return json.dumps({"type": "object", "properties": {f"f{n}": {} for n in range(fields)}})


def params(**more: Any) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=2, **more)


def ids(count: int) -> pb.TokenizedInput:
    return pb.TokenizedInput(input_ids=[5 + n % 100 for n in range(count)])


CASES: dict[str, tuple[Callable[[int], Message], int, set[str]]] = {
    "text": (
        lambda n: Asked(text="word " * n, sampling_params=params()),
        LONG // 5,
        {"check_known", "encode"},
    ),
    "chat": (
        lambda n: Asked(chat=chat(n), sampling_params=params()),
        400,
        {"check_known", "read_chat", "encode"},
    ),
    "ids": (
        lambda n: Asked(tokenized=ids(n), sampling_params=params()),
        LONG,
        {"check_known", "_given_ids"},
    ),
    "prompt_logprobs": (
        lambda n: Asked(tokenized=ids(n), sampling_params=params(prompt_logprobs=20)),
        LONG,
        {"check_known", "_given_ids", "add_input"},
    ),
    "schema": (
        lambda n: Asked(tokenized=ids(2), sampling_params=params(json_schema=schema(n))),
        400,
        {"check_known", "_check_size"},
    ),
    "detokenize": (
        lambda n: pb.DetokenizeRequest(token_ids=ids(n).input_ids),
        LONG,
        {"check_known", "decode"},
    ),
}


async def ask(up: Running, request: Message) -> None:
    """Sends it as it is. Raises what the call raises."""
    if isinstance(request, pb.DetokenizeRequest):
        await up.client._stub.Detokenize(request)
        return
    async for _ in up.client._stub.Generate(request):
        pass


@pytest.mark.parametrize("case", CASES)
async def test_long_work_is_on_another_thread(case: str, threads: dict[str, set[int]]) -> None:
    make, large, work = CASES[case]
    request = make(large)
    assert request.ByteSize() > LARGE
    async with running(
        vocab_size=VOCAB, context_length=4 * LONG, pages=2 * LONG, with_tokenizer=tokenizer
    ) as up:
        threads.clear()
        await ask(up, request)
        for name in work:
            assert threads[name], name
            assert threading.get_ident() not in threads[name], name


@pytest.mark.parametrize("case", CASES)
async def test_short_work_waits_for_no_thread(case: str, threads: dict[str, set[int]]) -> None:
    make, _, work = CASES[case]
    async with running(vocab_size=VOCAB) as up:
        threads.clear()
        await ask(up, make(2))
        for name in work:
            assert threads[name] == {threading.get_ident()}, name
