"""Load on a server through the real client, and a ledger of what the client saw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
from selfdraft import Client, Generation, SelfdraftError


@dataclass
class Ledger:
    """Sums over what the client was told."""

    finished: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    refused: Counter[str] = field(default_factory=Counter)
    """By ErrorInfo reason."""
    cancelled: Counter[str] = field(default_factory=Counter)
    """By gRPC status, of requests that had been admitted."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_burst_tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    accepted_per_position: Counter[int] = field(default_factory=Counter)

    async def read(self, generation: Generation) -> None:
        """Reads a stream to its end and books it."""
        first = 0
        async for chunk in generation:
            first = first or len(chunk.token_ids)
        complete = generation.complete
        assert complete is not None
        self.finished[complete.finish_reason] += 1
        self.prompt_tokens += complete.prompt_tokens
        self.completion_tokens += complete.completion_tokens
        self.first_burst_tokens += first
        self.cycles += complete.spec_cycles
        self.drafted += complete.spec_draft_tokens
        self.accepted += complete.spec_accepted_tokens
        for book, counts in (
            (self.drafted_per_position, complete.spec_draft_tokens_per_pos),
            (self.accepted_per_position, complete.spec_accepted_tokens_per_pos),
        ):
            book.update(dict(enumerate(counts, start=1)))

    async def try_one(self, client: Client, *, max_tokens: int, text: str) -> None:
        """One generation to its end, or its refusal."""
        try:
            async with client.generate(
                text=text, max_tokens=max_tokens, temperature=0.8, ignore_eos=True
            ) as generation:
                await self.read(generation)
        except SelfdraftError as refusal:
            if refusal.reason not in {"QUEUE_FULL", "INVALID_ARGUMENT"}:
                raise
            self.refused[refusal.reason] += 1


async def steady(
    client: Client, ledger: Ledger, *, sessions: int, seconds: float, tokens: int
) -> None:
    """`sessions` clients that ask again and again for `seconds`, each waiting for its answers."""
    until = time.monotonic() + seconds

    async def session(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            text = f"def step_{number}_{turn}(value):\n"
            await ledger.try_one(client, max_tokens=tokens + 3 * number, text=text)

    async with asyncio.TaskGroup() as tasks:
        for number in range(sessions):
            tasks.create_task(session(number))


async def flood(client: Client, ledger: Ledger, *, requests: int, tokens: int) -> None:
    """More requests at once than rows and queue hold together."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(requests):
            text = f"class Flood{number}:\n"
            tasks.create_task(ledger.try_one(client, max_tokens=tokens, text=text))


async def refused(client: Client, ledger: Ledger) -> None:
    """A request that can never run."""
    await ledger.try_one(client, max_tokens=10, text="")


async def cancelled(client: Client, ledger: Ledger, *, tokens: int) -> int:
    """A generation the client leaves after its first tokens; returns how many it read."""
    seen = 0
    async with client.generate(
        text="import os\n", max_tokens=tokens, temperature=0.8, ignore_eos=True
    ) as generation:
        async for chunk in generation:
            seen += len(chunk.token_ids)
            if seen >= 8:
                break
    ledger.cancelled["CANCELLED"] += 1
    return seen


async def aborted(client: Client, ledger: Ledger, *, tokens: int) -> int:
    """A generation that somebody else ends by its id; returns how many tokens it brought."""
    seen = 0
    try:
        async with client.generate(
            text="import sys\n",
            max_tokens=tokens,
            temperature=0.8,
            ignore_eos=True,
            request_id="to-be-aborted",
        ) as generation:
            async for chunk in generation:
                if not seen:
                    assert await client.abort("to-be-aborted")
                seen += len(chunk.token_ids)
    except SelfdraftError as end:
        if end.code is not grpc.StatusCode.ABORTED:
            raise
    ledger.cancelled["ABORTED"] += 1
    return seen
