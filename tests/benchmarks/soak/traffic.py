"""Well-behaved traffic: calls of every kind, and some that end early, as clients do."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from tests.benchmarks.soak.calls import Book, Clients, generate, generate_at_gateway
from tests.benchmarks.soak.scale import Scale

TEXTS: Final = (
    "def fibonacci(n):",
    "import os\n\ndef main(path: str) -> None:\n    ",
    "class Queue:\n    def __init__(self, limit: int) -> None:\n        ",
    "for line in open(name):\n    if line.startswith('#'):\n        ",
)
SCHEMA: Final = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
TENANTS: Final = ("search", "mail", "batch-jobs")

Kind = Callable[["Traffic"], Awaitable[None]]


class Traffic:
    """Calls of mixed kinds from `scale.workers` clients at once."""

    def __init__(self, clients: Clients, book: Book, scale: Scale, *, seed: int = 7) -> None:
        self.clients = clients
        self.book = book
        self.scale = scale
        self.chance = random.Random(seed)
        self.unexpected: list[str] = []
        """Errors of calls that are no generations, which ought to succeed."""
        self._numbers = itertools.count()

    async def run(self, until: float) -> None:
        """Sends until `until` (monotonic seconds), in waves: busy ones with calm between."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.scale.workers):
                tasks.create_task(self._worker(number, until))

    async def _worker(self, number: int, until: float) -> None:
        kinds, weights = zip(*KINDS, strict=True)
        keen = number < max(self.scale.workers // 10, 4)  # these send in calm times too
        period = self.scale.round_s * 2
        while (now := time.monotonic()) < until:
            if not keen and (until - now) % period < period / 4:
                await asyncio.sleep(self.chance.uniform(0.1, 1.0))
                continue
            [kind] = self.chance.choices(kinds, weights)
            await kind(self)

    def ask(self, text: str | None = None, **sampling: Any) -> pb.GenerateRequest:
        length = self.chance.randint(self.scale.longest // 6, self.scale.longest)
        params = {"max_tokens": length, "temperature": self.chance.choice((0.0, 0.7))}
        sampling = params | sampling
        if "json_schema" not in sampling and self.chance.random() < 0.5:
            sampling["ignore_eos"] = True  # which a form does not go with
        text = text or self.chance.choice(TEXTS) + " " * self.chance.randint(0, 3)
        return pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(**sampling))

    async def one(self, kind: str, request: pb.GenerateRequest, **how: Any) -> None:
        await generate(self.clients, self.book, self.book.call(kind), request, **how)

    async def unary(self, call: Any) -> Any:
        """The answer of a call that must succeed."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            self.unexpected.append(f"{error.code().name}: {error.details()}")


async def plain(t: Traffic) -> None:
    await t.one("plain", t.ask(), timed=True)


async def seeded(t: Traffic) -> None:
    await t.one("seed", t.ask(seed=t.chance.randrange(2**63), temperature=0.8, top_k=20))


async def logprobs(t: Traffic) -> None:
    await t.one("logprobs", t.ask(logprobs=t.chance.randint(0, 5), prompt_logprobs=1))


async def several(t: Traffic) -> None:
    await t.one("n2", t.ask(n=2, temperature=0.8))


async def stopped(t: Traffic) -> None:
    await t.one("stop", t.ask(stop=["\n", "return", ":"]))


async def formed(t: Traffic) -> None:
    await t.one("schema", t.ask(json_schema=SCHEMA, max_tokens=24))


async def chat(t: Traffic) -> None:
    request = t.ask()
    message = pb.ChatMessage(role="user", content=t.chance.choice(TEXTS))
    request.chat.CopyFrom(pb.ChatInput(messages=[message]))
    await t.one("chat", request)


async def session(t: Traffic) -> None:
    """Turns of one conversation, then its release."""
    name = f"conversation-{next(t._numbers)}"
    text = t.chance.choice(TEXTS)
    for _ in range(t.chance.randint(1, 3)):
        request = t.ask(text)
        request.session_id = name
        await t.one("session", request)
        text += "\n    return None\n\ndef next_one(): "
    if t.chance.random() < 0.7:
        release = pb.ReleaseSessionRequest(session_id=name)
        await t.unary(t.clients.inference.ReleaseSession(release))


async def tenant(t: Traffic) -> None:
    request = t.ask()
    request.priority = t.chance.choice(
        (pb.PRIORITY_BATCH, pb.PRIORITY_DEFAULT, pb.PRIORITY_INTERACTIVE)
    )
    await t.one("tenant", request, metadata=(("selfdraft-tenant", t.chance.choice(TENANTS)),))


def _at_gateway(t: Traffic, **more: Any) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(
        temperature=0.7,
        top_p=1.0,
        repetition_penalty=1.0,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        n=t.chance.choice((1, 1, 2)),
        max_tokens=t.scale.longest,
    )
    ids = [t.chance.randrange(300, 2000) for _ in range(t.chance.randint(4, 24))]
    return vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(original_text="x", input_ids=ids),
        sampling_params=sampling,
        **more,
    )


async def gateway(t: Traffic) -> None:
    request = _at_gateway(t, stream=t.chance.random() < 0.7)
    await generate_at_gateway(t.clients, t.book.call("gateway"), request)


async def gateway_abort(t: Traffic) -> None:
    request = _at_gateway(t, stream=True)
    await generate_at_gateway(t.clients, t.book.call("gateway-abort"), request, abort=True)


async def cancelled(t: Traffic) -> None:
    leave_after = t.chance.choice((-1, 0, 1, t.scale.longest // 2))
    await t.one("cancel", t.ask(ignore_eos=True), leave_after=leave_after)


async def hurried(t: Traffic) -> None:
    await t.one("deadline", t.ask(), timeout=t.chance.choice((0.001, 0.02, 0.2, 1.0, 3.0)))


async def aborted(t: Traffic) -> None:
    call = t.book.call("abort")
    stream = asyncio.create_task(
        generate(t.clients, t.book, call, t.ask(max_tokens=t.scale.longest, ignore_eos=True))
    )
    await asyncio.sleep(t.chance.uniform(0.0, 1.5))
    await t.unary(t.clients.inference.Abort(pb.AbortRequest(request_id=call.request_id)))
    await stream


async def twice(t: Traffic) -> None:
    """Two calls of one id: the second is refused while the first is live."""
    first = t.book.call("twice")
    second = t.book.call("twice", first.request_id)
    async with asyncio.TaskGroup() as tasks:
        for call in (first, second):
            tasks.create_task(generate(t.clients, t.book, call, t.ask()))


async def wrong(t: Traffic) -> None:
    """Requests with a field at fault."""
    bad: dict[str, Any] = t.chance.choice(
        [{"top_p": 2.0}, {"temperature": -1.0}, {"n": 99}, {"json_schema": "{"}, {"max_tokens": 0}]
    )
    await t.one("wrong", t.ask(**bad))


async def small(t: Traffic) -> None:
    """Calls that are no generations."""
    stub = t.clients.inference
    tokens = await t.unary(stub.Tokenize(pb.TokenizeRequest(text=t.chance.choice(TEXTS))))
    if tokens is not None:
        await t.unary(stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids)))
    await t.unary(stub.GetModelInfo(pb.GetModelInfoRequest()))
    await t.unary(stub.ListSessions(pb.ListSessionsRequest()))


KINDS: Final[tuple[tuple[Kind, int], ...]] = (
    (plain, 24),
    (seeded, 8),
    (logprobs, 5),
    (several, 5),
    (stopped, 6),
    (formed, 4),
    (chat, 6),
    (session, 6),
    (tenant, 8),
    (gateway, 8),
    (gateway_abort, 3),
    (cancelled, 8),
    (hurried, 8),
    (aborted, 4),
    (twice, 2),
    (wrong, 4),
    (small, 3),
)
