"""The real scheduler over a real engine in a pool that is much too small: rows are preempted again
and again, and every stream is, token for token and bit for bit, what it is with room for all.

Every row is greedy or in coupled mode, so its tokens must not depend on what happens to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import anyio
import pytest

from engine.plan import Engine, SamplingParams
from scheduler import (
    FinishReason,
    GenerationRequest,
    Priority,
    Scheduler,
    SchedulerConfig,
    Statistics,
    Tokens,
    Usage,
)
from scheduler.sequence import Sequence
from tests.engine import slow
from tests.engine.small import engine_over, prompts, small_model

pytestmark = pytest.mark.anyio

END = 7
MOST = 40
HOT = SamplingParams(temperature=7.0, coupled=True)
FAVOURED = tuple((token, 60.0) for token in (3, 60, 61, 62, 63))
"""Few tokens, so that they come again and their counts matter."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Got:
    """What one stream has brought."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    prompt: int = 0
    """Log probabilities of the prompt."""
    reason: FinishReason | None = None
    usage: Usage | None = None


def requests() -> list[GenerationRequest]:
    """One of every kind, in three classes."""
    kinds = [
        replace(HOT, seed=1),
        replace(HOT, seed=2, logit_bias=FAVOURED, frequency_penalty=2.0),
        replace(HOT, seed=3, logit_bias=FAVOURED, presence_penalty=2.0, repetition_penalty=1.5),
        replace(HOT, seed=4, temperature=0.0, frequency_penalty=1.0),
        replace(HOT, seed=5, temperature=2.0, top_p=0.9),
        replace(HOT, seed=6, repetition_penalty=1.8, frequency_penalty=-1.0),
    ]
    made = []
    for number, (sampling, prompt) in enumerate(zip(kinds, prompts(6), strict=True)):
        guided = number in (4, 5)
        form = slow.Pattern(96, 3, 30 if number == 5 else None, END)
        made.append(
            GenerationRequest(
                request_id=f"r{number}",
                prompt_ids=tuple(prompt),
                sampling=sampling,
                max_tokens=MOST,
                min_tokens=20 if number in (1, 2) else 0,
                stop_ids=(END,) if guided else (3, 61) if number in (1, 2) else (),
                logprobs=2,
                prompt_logprobs=1 if number in (0, 3) else None,
                constraint=form if guided else None,
                priority=list(Priority)[number % 3],
            )
        )
    return made


def engine(pages: int, boundaries: int, max_rows: int) -> Callable[[], Engine]:
    """Built on the thread that uses it."""
    return lambda: engine_over(
        small_model(), pages=pages, boundaries=boundaries, max_rows=max_rows, trace=False
    )


async def run(
    pages: int, *, loop: str = "pipelined", boundaries: int = 0, max_rows: int = 6
) -> tuple[dict[str, Got], Statistics]:
    config = SchedulerConfig(
        depth=3,
        prefill_chunk=16,
        page_watermark=0.0,
        loop="plain" if loop == "plain" else "pipelined",
    )
    got: dict[str, Got] = {}

    async def ask(request: GenerationRequest) -> None:
        mine = got[request.request_id] = Got()
        async with scheduler.submit(request) as handle:
            async for event in handle:
                if isinstance(event, Tokens):
                    assert event.logprobs is not None
                    mine.tokens += event.ids
                    mine.chosen += event.logprobs.chosen
                    mine.prompt += len(event.prompt_logprobs.chosen) if event.prompt_logprobs else 0
                else:
                    assert event.detail == ""
                    mine.reason, mine.usage = event.reason, event.usage

    factory = engine(pages, boundaries, max_rows)
    async with (
        Scheduler(engine_factory=factory, config=config) as scheduler,
        anyio.create_task_group() as group,
    ):
        for request in requests():
            group.start_soon(ask, request)
            await next_step(scheduler)
    return got, scheduler.statistics()


async def next_step(scheduler: Scheduler) -> None:
    """Requests come a step apart, however fast this machine is."""
    before = scheduler.statistics().steps
    while True:
        await anyio.sleep(0.001)
        now = scheduler.statistics()
        if now.steps > before or not now.running + now.queued_requests:
            return


def compare(found: dict[str, Got], alone: dict[str, Got]) -> None:
    for name, right in alone.items():
        mine = found[name]
        assert (name, mine.tokens) == (name, right.tokens)
        assert (mine.chosen, mine.prompt, mine.reason) == (right.chosen, right.prompt, right.reason)
        assert mine.usage is not None
        assert right.usage is not None
        assert mine.usage.prompt_tokens == right.usage.prompt_tokens
        assert mine.usage.completion_tokens == right.usage.completion_tokens == len(mine.tokens)
        assert mine.usage.accepted_tokens <= mine.usage.draft_tokens


@pytest.fixture(scope="module")
def alone() -> dict[str, Got]:
    """With room for all of them."""
    found, statistics = asyncio.run(run(160))  # anyio.run takes the tests' loop for a running one
    assert sum(statistics.preemptions.values()) == 0
    assert {got.reason for got in found.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    return found


@pytest.mark.parametrize("loop", ["plain", "pipelined"])
@pytest.mark.parametrize(("boundaries", "max_rows"), [(0, 6), (6, 6), (6, 2)])
async def test_a_preempted_stream_is_the_same(
    alone: dict[str, Got], loop: str, boundaries: int, max_rows: int
) -> None:
    found, statistics = await run(10, loop=loop, boundaries=boundaries, max_rows=max_rows)
    compare(found, alone)
    counted = sum(got.usage.preemptions for got in found.values() if got.usage)
    assert counted == sum(statistics.preemptions.values()) > 2
    assert (statistics.preempted_waiting, statistics.rows_held) == (0, 0)
    if not boundaries:
        assert statistics.recomputed_tokens > 20


async def test_an_output_that_is_forgotten_is_seen(
    alone: dict[str, Got], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Sequence.spec
    monkeypatch.setattr(Sequence, "spec", lambda self: replace(spec(self), output_start=None))
    found, _ = await run(10)
    with pytest.raises(AssertionError):
        compare(found, alone)
