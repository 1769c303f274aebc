"""A real server on the bundled model: what a client reads beside others is what it reads alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from engine.config import EngineConfig
from engine.load import load_engine
from engine.plan import Engine
from engine.tiny import MODEL_DIR
from service.text.tokenizer import Tokenizer
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Read:
    """What one client read."""

    text: str
    ids: tuple[int, ...]
    reason: str
    stop: str


ASKS: list[dict[str, Any]] = [
    {"text": "def read_lines(path):\n", "temperature": 0.0, "max_tokens": 24},
    {"text": "import os\nimport ", "temperature": 0.0, "max_tokens": 9},
    {"text": "class Stack:\n    def push", "temperature": 0.0, "max_tokens": 40, "stop": ["\n"]},
    {"text": "# größer als 日本 🚀\nvalue = ", "temperature": 0.0, "max_tokens": 16},
    {"messages": [("user", "Write a loop.")], "temperature": 0.0, "max_tokens": 20},
    {"text": "x", "temperature": 0.8, "seed": 5, "max_depth": 0, "max_tokens": 20},
    {"text": "for i in range(", "temperature": 1.0, "seed": 6, "max_depth": 0, "max_tokens": 12},
    {
        "text": "def f(x):\n    return",
        "temperature": 0.0,
        "max_tokens": 30,
        "stop": ["return", "def"],
    },
]


def _engine() -> Engine:
    return load_engine(
        EngineConfig(
            model=MODEL_DIR, blas="reference", mtp_gate="off", max_rows=8, kv_memory=1 << 25
        )
    )


async def _read(up: Running, ask: dict[str, Any]) -> Read:
    text, ids = "", list[int]()
    async with up.client.generate(**ask) as generation:
        async for chunk in generation:
            text += chunk.text
            ids += chunk.token_ids
    complete = generation.complete
    assert complete is not None
    assert complete.completion_tokens == len(ids)
    return Read(
        text=text,
        ids=tuple(ids),
        reason=str(complete.finish_reason),
        stop=complete.matched_stop_str if complete.HasField("matched_stop_str") else "",
    )


async def test_text_beside_others_is_text_alone() -> None:
    config = service_config(depth=3, prefill_chunk=16)
    async with running(
        engine=_engine, config=config, with_tokenizer=lambda: Tokenizer.load(MODEL_DIR)
    ) as up:
        alone = [await _read(up, ask) for ask in ASKS]
        together: dict[int, Read] = {}

        async def read(index: int, delay: float) -> None:
            await anyio.sleep(delay)
            together[index] = await _read(up, ASKS[index])

        async with anyio.create_task_group() as group:
            for index in range(len(ASKS)):
                group.start_soon(read, index, 0.12 * (index % 3))
        assert [together[i] for i in range(len(ASKS))] == alone
        await up.until_idle()
    assert all(found.ids for found in alone)
    assert {found.reason for found in alone} >= {"length", "stop"}
    tokenizer = Tokenizer.load(MODEL_DIR)
    for ask, found in zip(ASKS, alone, strict=True):
        if "stop" not in ask:
            assert tokenizer.decode(found.ids).startswith(found.text.rstrip("\ufffd"))
