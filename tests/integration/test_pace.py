"""The real scheduler over the bundled model: prompts cut in pieces beside streams give the same
tokens as whole chunks, bit for bit."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engine.config import EngineConfig
from engine.load import load_engine
from engine.plan import Engine, PrefillChunk, SamplingParams, StepPlan
from engine.tiny import MODEL_DIR
from scheduler import GenerationRequest, Scheduler, SchedulerConfig, Tokens
from service.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

CODE = 'def load(path):\n    with open(path) as file:\n        return json.load(file)["rows"]\n\n\n'
PROMPTS = (31, 70, 129, 200)
"""Tokens."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def engine() -> Engine:
    return load_engine(
        EngineConfig(
            model=MODEL_DIR, blas="reference", mtp_gate="off", max_rows=8, kv_memory=1 << 25
        )
    )


class Watched:
    """An engine that notes the lengths of chunks."""

    def __init__(self, lengths: set[int]) -> None:
        self._engine = engine()
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, plan: StepPlan) -> None:
        chunks: tuple[PrefillChunk, ...] = plan.prefill
        self._lengths |= {len(chunk.tokens) for chunk in chunks if not chunk.last}
        self._engine.submit(plan)


async def run(config: SchedulerConfig, lengths: set[int]) -> dict[str, list[int]]:
    """Two streams, and prompts that come while they run."""
    ids = list(Tokenizer.load(MODEL_DIR).encode(CODE * 20))
    got: dict[str, list[int]] = {}
    begun = anyio.Event()

    async def one(s: Scheduler, name: str, prompt: list[int], tokens: int, seed: int) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.9, seed=seed, coupled=True),
            max_tokens=tokens,
        )
        got[name] = []
        async with s.submit(request) as handle:
            async for event in handle:
                if isinstance(event, Tokens):
                    got[name] += event.ids
                    if len(got[name]) > 8:
                        begun.set()

    def build() -> Engine:
        watched: Any = Watched(lengths)
        return watched  # type: ignore[no-any-return]

    async with (
        Scheduler(engine_factory=build, config=config) as s,
        anyio.create_task_group() as group,
    ):
        for number in range(2):
            group.start_soon(one, s, f"stream{number}", ids[number : number + 9], 90, number)
        await begun.wait()
        for number, length in enumerate(PROMPTS):
            prompt = ids[10 + number : 10 + number + length]
            group.start_soon(one, s, f"prompt{number}", prompt, 6, 40 + number)
    return got


async def test_pieces_change_no_token() -> None:
    whole: set[int] = set()
    pieces: set[int] = set()
    expected = await run(SchedulerConfig(depth=2, prefill_chunk=64), whole)
    # Cycles alone take longer than this gap: prompts live on their share, in the smallest pieces.
    config = SchedulerConfig(depth=2, prefill_chunk=64, max_token_gap_s=0.001, prefill_share=0.4)
    assert await run(config, pieces) == expected
    assert whole == {64}
    assert 16 in pieces
