"""How long one valid request can hold up everybody's streams.

Requests at their limits, each answered alone on one event loop with nothing else on it, by all
that answers a real one but gRPC. Reported is the longest that the loop was in one callback, in CPU
time of its thread: what other streams wait for at least, whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.config import EngineConfig
from engine.plan import MAX_LOGIT_BIAS
from scheduler import Scheduler, SchedulerConfig
from service.auth import EVERYBODY, set_caller
from service.backend import Backend, Door
from service.config import RequestLimits, ServerConfig, ServiceConfig
from service.endings import Context
from service.inference import InferenceServicer
from service.logs import make_logger
from service.metrics import Metrics
from service.text.grammar import Grammars
from service.text.tokenizer import Tokenizer
from service.validation import Violations
from tests.benchmarks.service.engine import BurstEngine

PROMPT = 200_000
"""Tokens of the longest prompt."""
LIMITS = RequestLimits()


class _Nobody:
    """A call's context whose client takes everything at once."""

    def __init__(self) -> None:
        self.ended = "OK"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "nobody"

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Any) -> None:
        message.SerializeToString()

    async def abort(self, code: Any, details: str, trailing: Any) -> None:
        self.ended = f"{code.name}: {details[:120]}"


@contextmanager
def longest_callback() -> Iterator[list[float]]:
    """[CPU seconds] of the longest callback that an event loop of this thread runs in the block."""
    handles: Any = asyncio.events.Handle
    found, run = [0.0], handles._run

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        found[0] = max(found[0], time.thread_time() - began)

    handles._run = timed
    try:
        yield found
    finally:
        handles._run = run


def _params(**more: Any) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=8, ignore_eos=True, **more)


def _ids(**params: Any) -> pb.GenerateRequest:
    ids = [100 + n % 1000 for n in range(PROMPT)]
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=_params(**params)
    )


def _chat(count: int, chars: int, calls: str | None = None) -> pb.GenerateRequest:
    messages = [
        pb.ChatMessage(role=("user", "assistant")[n % 2], content="word " * (chars // 5))
        for n in range(count)
    ]
    if calls is not None:
        messages[1].tool_calls = calls
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages), sampling_params=_params())


def _schema() -> str:
    fields = {f"field_{n}": {"type": "string", "description": "x" * 40} for n in range(1200)}
    return json.dumps({"type": "object", "properties": fields})


def requests() -> dict[str, pb.GenerateRequest]:
    """By what is large about them."""
    short = pb.TokenizedInput(input_ids=[100, 101])
    stops = ["\n" * 8 + f"{n:03}" * 80 for n in range(LIMITS.max_stop_strings)]
    calls = json.dumps(
        [{"type": "function", "function": {"name": "f", "arguments": {"x": [1] * 300_000}}}]
    )
    return {
        "nothing": pb.GenerateRequest(tokenized=short, sampling_params=_params()),
        "text of 2k characters": pb.GenerateRequest(text="word " * 400, sampling_params=_params()),
        "text of 1M characters": pb.GenerateRequest(
            text="word " * (PROMPT - 20), sampling_params=_params()
        ),
        f"{PROMPT:,} token ids": _ids(),
        f"{PROMPT:,} token ids, n = 16": _ids(n=16),
        f"{PROMPT:,} token ids, 20 prompt_logprobs": _ids(prompt_logprobs=20),
        "chat of 1,000 messages": _chat(1000, 100),
        "chat of 4,096 messages": _chat(4096, 100),
        "chat with 0.9M characters of tool_calls": _chat(2, 10, calls),
        "16 stop strings of 248 characters": pb.GenerateRequest(
            tokenized=short, sampling_params=_params(stop=stops)
        ),
        f"{MAX_LOGIT_BIAS} biased logits": pb.GenerateRequest(
            tokenized=short,
            sampling_params=_params(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)),
        ),
        "JSON schema of 100k characters": pb.GenerateRequest(
            tokenized=short,
            sampling_params=pb.SamplingParams(max_tokens=8, json_schema=_schema()),
        ),
        "n = 16, 20 logprobs": pb.GenerateRequest(
            tokenized=short, sampling_params=_params(n=16, logprobs=20)
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Stall:
    what: str
    cpu_s: float
    ended: str


async def stalls(model: Path, rounds: int) -> list[Stall]:
    """The shortest of `rounds` for each request: what it needs, and not what else happened."""
    tokenizer = Tokenizer.load(model)
    engine = BurstEngine((100, 101, 102), vocab_size=tokenizer.vocab_size, max_rows=512)
    engine.resize(context_length=2 * PROMPT, pages=40 * PROMPT // 16)
    config = ServiceConfig(
        engine=EngineConfig(model=model), server=ServerConfig(), scheduler=SchedulerConfig()
    )
    scheduler = SchedulerConfig(depth=2, max_queued_tokens=40 * PROMPT, prefill_chunk=PROMPT)
    found = []
    async with Scheduler(engine_factory=lambda: engine, config=scheduler) as running:
        # Of an idle scheduler only, and by the pages there are: nobody's stream waits for it.
        running._core.integrity = lambda **_: None  # type: ignore[method-assign]
        grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
        grammars.prepare()
        door = Door(retry_after_s=1.0)
        door.open(Backend(scheduler=running, tokenizer=tokenizer, grammars=grammars, name="x"))
        with open("/dev/null", "w") as log:
            servicer = InferenceServicer(
                door=door,
                metrics=Metrics(lambda: None, version="x"),
                config=config,
                logger=make_logger("json", log),
                clock=anyio.current_time,
            )
            set_caller(EVERYBODY)
            for what, request in requests().items():
                times, context = [], _Nobody()
                for _ in range(rounds):
                    grammars._cache.clear()
                    with longest_callback() as longest:
                        call = servicer.generate(
                            request,
                            cast(Context, context),
                            Violations(),
                            method="Inference/Generate",
                        )
                        await asyncio.create_task(call)
                    times.append(longest[0])
                found.append(Stall(what=what, cpu_s=min(times), ended=context.ended))
    return found
