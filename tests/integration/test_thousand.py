"""The real scheduler over the real engine: nothing is left, each gets nobody's text but its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import anyio
import pytest

from engine.plan import Engine, RowSpec, SamplingParams
from engine.solo import generate
from scheduler import (
    Finished,
    FinishReason,
    GenerationRequest,
    QueueFullError,
    Scheduler,
    SchedulerConfig,
    Tokens,
)
from scheduler.config import LoopKind
from tests.engine.small import engine_over, small_model

pytestmark = pytest.mark.anyio

DEPTH = 2
LIMITS = (1, 3, 10, 24)
LONGEST = LIMITS[-1]
KINDS = 16


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Kind:
    """A prompt with its sampling, and the tokens it gets alone."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    alone: dict[int, tuple[int, ...]]
    """By max_tokens: in rejection mode the last burst, and so its noise, depends on the limit."""


def kinds() -> list[Kind]:
    """Half greedy, half sampled; each alone on an engine of its own thread, at the same depth."""
    chance = random.Random(8)
    made = []
    model = small_model()
    for seed in range(KINDS):
        prompt = tuple(chance.randrange(96) for _ in range(chance.choice([1, 3, 9, 20, 40])))
        temperature = 0.0 if seed % 2 else 20.0
        sampling = SamplingParams(temperature=temperature, top_k=30, seed=seed)
        alone = {}
        for limit in LIMITS:
            spec = RowSpec(sampling=sampling, max_tokens=limit)
            result = generate(engine_over(model, trace=False), [(prompt, spec)], depth=DEPTH)[0]
            alone[limit] = tuple(result.tokens)
        made.append(Kind(prompt=prompt, sampling=sampling, alone=alone))
    return made


@pytest.fixture(scope="module")
def known() -> list[Kind]:
    return kinds()


def _expected(kind: Kind, stop: int | None, limit: int) -> tuple[int, ...]:
    tokens = kind.alone[limit]
    return tokens[: tokens.index(stop) + 1] if stop is not None and stop in tokens else tokens


async def _one(scheduler: Scheduler, kind: Kind, index: int, chance: random.Random) -> FinishReason:
    """Run one request, maybe cancel it somewhere; checks what it got."""
    limit = chance.choice(LIMITS)
    stop = chance.choice(kind.alone[LONGEST]) if chance.random() < 0.3 else None
    cancel_after = chance.randint(0, LONGEST) if chance.random() < 0.3 else None
    request = GenerationRequest(
        request_id=f"r{index}",
        prompt_ids=kind.prompt,
        sampling=kind.sampling,
        max_tokens=limit,
        stop_ids=() if stop is None else (stop,),
    )
    while True:
        try:
            handle = scheduler.submit(request)
            break
        except QueueFullError:
            await anyio.sleep(0.01)
    tokens: list[int] = []
    async with handle:
        if cancel_after == 0:
            handle.cancel()
        async for event in handle:
            if isinstance(event, Tokens):
                tokens += event.ids
                if cancel_after is not None and len(tokens) >= cancel_after:
                    handle.cancel()
    finished = handle.finished
    assert isinstance(finished, Finished)
    expected = _expected(kind, stop, limit)
    if finished.reason is FinishReason.CANCELLED:
        assert tuple(tokens) == expected[: len(tokens)]
    else:
        assert tuple(tokens) == expected
        ended_by_stop = stop is not None and expected[-1] == stop
        assert finished.reason is (FinishReason.STOP if ended_by_stop else FinishReason.LENGTH)
        assert finished.usage.completion_tokens == len(expected)
    return finished.reason


async def _run(known: list[Kind], loop: LoopKind, requests: int) -> dict[FinishReason, int]:
    chance = random.Random(31)
    counts: dict[FinishReason, int] = {}
    config = SchedulerConfig(depth=DEPTH, loop=loop, max_queue=24, prefill_chunk=16)

    def factory() -> Engine:
        return engine_over(small_model(), max_rows=8, trace=False)

    async with Scheduler(engine_factory=factory, config=config) as scheduler:

        async def worker(first: int) -> None:
            for index in range(first, requests, 32):
                reason = await _one(scheduler, chance.choice(known), index, chance)
                counts[reason] = counts.get(reason, 0) + 1

        async with anyio.create_task_group() as group:
            for first in range(32):
                group.start_soon(worker, first)
        with anyio.fail_after(10):
            while scheduler.statistics().rows_held or scheduler.statistics().in_flight:
                await anyio.sleep(0.005)
        left = scheduler.statistics()
        assert (left.pages_used, left.running, left.queued_requests) == (0, 0, 0)
        assert scheduler.failure is None
    return counts


async def test_a_thousand_random_requests_pipelined(known: list[Kind]) -> None:
    counts = await _run(known, "pipelined", 1000)
    assert sum(counts.values()) == 1000
    reasons = (FinishReason.CANCELLED, FinishReason.STOP, FinishReason.LENGTH)
    assert min(counts[reason] for reason in reasons) > 50


async def test_the_plain_loop_gives_the_same(known: list[Kind]) -> None:
    counts = await _run(known, "plain", 150)
    assert sum(counts.values()) == 150
