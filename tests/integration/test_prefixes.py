"""The real scheduler over the bundled model: what is reused, and that nobody can tell by the text.

Every row is sampled in coupled mode, so its tokens must be the same whether its prefix was computed
or restored, whatever ran beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.boundary import BoundaryStore
from engine.cache import RecurrentState
from engine.config import EngineConfig
from engine.load import load_engine
from engine.plan import Constraint, Engine, SamplingParams
from engine.tiny import MODEL_DIR
from scheduler import (
    FinishReason,
    GenerationRequest,
    Scheduler,
    SchedulerConfig,
    Tokens,
    Usage,
)
from service.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

END = 4093
TURNS = 3
TOKENS = 10
DIGITS = 5
SYSTEM = "# A helper that answers in Python.\nimport os\nimport sys\n\n\ndef main(argv):\n    "
ASKED = ["for name in argv:\n", "\n    if not name:\n", "\n    return os.path", "\n    print("]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)


class Digits:
    """So many tokens of digits, then the end."""

    def __init__(self, digits: frozenset[int], vocab: int) -> None:
        self._digits, self._vocab = digits, vocab
        self.said: list[int] = []

    def _next(self, count: int) -> frozenset[int]:
        return self._digits if count < DIGITS else frozenset([END])

    def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32] | None:
        count = len(self.said)
        for place, token in enumerate(drafted):
            if token not in self._next(count + place):
                return None
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        for token in self._next(count + len(drafted)):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def advance(self, tokens: Sequence[int]) -> None:
        self.said += tokens


@dataclass(frozen=True)
class Got:
    """What one request got."""

    tokens: list[int]
    usage: Usage
    reason: FinishReason


def _engine() -> Engine:
    return load_engine(
        EngineConfig(
            model=MODEL_DIR, blas="reference", mtp_gate="off", max_rows=8, kv_memory=1 << 25
        )
    )


def scheduler(*, prefix_cache: bool) -> Scheduler:
    config = SchedulerConfig(depth=3, prefill_chunk=32, prefix_cache=prefix_cache)
    return Scheduler(engine_factory=_engine, config=config)


async def ask(s: Scheduler, name: str, prompt: Sequence[int], seed: int, **options: Any) -> Got:
    request = GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(
            temperature=0.9, top_p=0.95, seed=seed, coupled=True, presence_penalty=0.4 * (seed % 2)
        ),
        max_tokens=TOKENS,
        **options,
    )
    tokens: list[int] = []
    async with s.submit(request) as handle:
        async for event in handle:
            if isinstance(event, Tokens):
                tokens += event.ids
    assert handle.finished is not None
    assert handle.finished.detail == ""
    return Got(tokens, handle.finished.usage, handle.finished.reason)


@dataclass
class Scene:
    """Two conversations, three samples of one prompt and a row of digits, all at once."""

    s: Scheduler
    tokenizer: Tokenizer
    got: dict[str, Got] = field(default_factory=dict)
    history: dict[str, list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    async def turn(self, who: str, seed: int, text: str) -> None:
        """One turn of a conversation, the whole of it as the prompt."""
        prompt = [*self.history.get(who, self.ids(SYSTEM)), *self.ids(text)]
        name = f"{who}/{sum(key.startswith(who) for key in self.got)}"
        got = await ask(self.s, name, prompt, seed, session_id=who)
        self.got[name], self.history[who] = got, [*prompt, *got.tokens]

    async def talk(self, who: str, seed: int) -> None:
        for turn in range(TURNS):
            await self.turn(who, seed + turn, ASKED[(turn + seed) % len(ASKED)])

    async def sample(self, number: int) -> None:
        prompt = self.ids("class Stack:\n    def __init__(self):\n        self.items = [")
        name = f"sample/{number}"
        self.got[name] = await ask(self.s, name, prompt, 70 + number, group="g")

    async def digits(self, constraint: Constraint) -> None:
        prompt = self.ids("values = [1, 20, 35]\ntotal = ")
        self.got["digits"] = await ask(
            self.s, "digits", prompt, 5, stop_ids=(END,), constraint=constraint
        )

    async def run(self) -> None:
        vocab = self.s.info.vocab_size
        digits = frozenset(i for d in "0123456789" for i in self.ids(d))
        constraint = Digits(digits, vocab)
        async with anyio.create_task_group() as group:
            group.start_soon(self.talk, "ada", 10)
            group.start_soon(self.talk, "bob", 21)
            group.start_soon(self.digits, constraint)
            for number in range(3):
                group.start_soon(self.sample, number)
        assert constraint.said == self.got["digits"].tokens
        assert set(constraint.said[:-1]) <= digits

    def tokens(self) -> dict[str, list[int]]:
        return {name: got.tokens for name, got in self.got.items()}


@pytest.fixture(scope="module")
def apart(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Everything without any reuse, and a last turn of one conversation."""

    async def run() -> dict[str, list[int]]:
        async with scheduler(prefix_cache=False) as s:
            scene = Scene(s, tokenizer)
            await scene.run()
            await scene.turn("ada", 99, ASKED[0])
            assert all(got.usage.cached_tokens == 0 for got in scene.got.values())
            assert sum(got.usage.accepted_tokens for got in scene.got.values()) > 20
            return scene.tokens()

    return asyncio.run(run())  # anyio.run takes the loop that tests share for a running one


async def test_reuse_is_in_the_counts_and_not_in_the_text(
    tokenizer: Tokenizer, apart: dict[str, list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "ada"
    async with scheduler(prefix_cache=True) as s:
        scene = Scene(s, tokenizer)
        await scene.run()
        assert scene.tokens() == {name: apart[name] for name in scene.got}
        cached = {name: got.usage.cached_tokens for name, got in scene.got.items()}
        for who in ("ada", "bob"):
            for turn in range(1, TURNS):
                before = scene.got[f"{who}/{turn - 1}"].usage
                assert cached[f"{who}/{turn}"] == before.prompt_tokens + TOKENS - 1
        assert sum(cached[f"sample/{number}"] > 0 for number in range(3)) == 2
        digits = scene.got["digits"]
        assert digits.reason is FinishReason.STOP
        assert len(digits.tokens) == DIGITS + 1
        info = await s.export_session("ada", path)
        assert info.tokens == len(scene.history["ada"]) - 1
    async with scheduler(prefix_cache=True) as s:
        assert (await s.import_session(path)).session_id == "ada"
        scene = Scene(s, tokenizer, scene.got, scene.history)
        await scene.turn("ada", 99, ASKED[0])
        got = scene.got[f"ada/{TURNS}"]
        assert got.usage.cached_tokens == info.tokens
        assert got.tokens == apart[f"ada/{TURNS}"]


async def test_a_prefix_restored_wrongly_is_seen(
    tokenizer: Tokenizer, apart: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states a little off."""
    right = BoundaryStore.__getitem__

    def off(self: BoundaryStore, boundary: int) -> Any:
        found = right(self, boundary)
        states = tuple(RecurrentState(s.conv, s.memory * 0.7) for s in found.states)
        return replace(found, states=states)

    monkeypatch.setattr(BoundaryStore, "__getitem__", off)
    async with scheduler(prefix_cache=True) as s:
        scene = Scene(s, tokenizer)
        await scene.talk("ada", 10)
        assert scene.got["ada/0"].tokens == apart["ada/0"]
        assert scene.tokens() != {name: apart[name] for name in scene.got}
