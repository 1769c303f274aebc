"""Runs the sessions at once through the real client and measures what a client sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import anyio
from selfdraft import Client, SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from service.demo.process import ServerProcess
from service.demo.prompts import Ask

SEED: Final = 20_240
REQUEST_LIMIT_S: Final = 120.0
WARM_UP_LIMIT_S: Final = 12.0
"""A server's first cycles compile kernels and try drafting depths: they are run, not counted."""

OnProgress = Callable[[str, list["Session"]], None]
"""(phase, its sessions), after every chunk."""


class DemoError(Exception):
    """A session did not end well."""


@dataclass
class Session:
    """One request and what came of it. Times in seconds."""

    ask: Ask
    text: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    """From sending the request until its first token was here."""
    gaps: list[float] = field(default_factory=list)
    """One per token after the first: a burst of n tokens after t seconds gives n times t/n."""
    seconds: float = 0.0
    complete: pb.GenerateComplete | None = None


@dataclass(frozen=True)
class Outcome:
    """One run of all sessions against one server."""

    sessions: list[Session]
    seconds: float
    """Wall clock, from the first request to the last token."""
    kv_peak: float
    """Largest part of the KV cache ever in use, 0 … 1."""
    model: str
    notes: tuple[str, ...] = ()
    """The server's, e.g. why it does not draft."""

    @property
    def tokens(self) -> int:
        return sum(session.tokens for session in self.sessions)

    @property
    def completes(self) -> list[pb.GenerateComplete]:
        return [s.complete for s in self.sessions if s.complete is not None]

    def acceptance_per_position(self) -> list[float]:
        """[j]: of the cycles with at least j + 1 drafts, the part that took draft j + 1 (and so
        all before it)."""
        width = max((len(c.spec_draft_tokens_per_pos) for c in self.completes), default=0)
        rates = []
        for j in range(width):
            drafted = sum(_at(c.spec_draft_tokens_per_pos, j) for c in self.completes)
            accepted = sum(_at(c.spec_accepted_tokens_per_pos, j) for c in self.completes)
            rates.append(accepted / drafted)
        return rates

    def tokens_per_pass(self) -> float:
        """Tokens a verify pass emitted per session; 1 without drafts."""
        cycles = sum(c.spec_cycles for c in self.completes)
        # A session's first token comes from its prompt, not from a verify pass.
        emitted = sum(session.tokens - 1 for session in self.sessions)
        return emitted / cycles if cycles else 0.0

    def acceptance(self) -> float | None:
        """Accepted over drafted; None without drafts."""
        drafted = sum(c.spec_draft_tokens for c in self.completes)
        return sum(c.spec_accepted_tokens for c in self.completes) / drafted if drafted else None


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


async def run_sessions(
    server: ServerProcess, asks: Sequence[Ask], on_progress: OnProgress
) -> Outcome:
    """All sessions at once, after a warm-up of the same shape at half the length, which is not
    counted. Raises DemoError."""
    shorter = [replace(ask, max_tokens=ask.max_tokens // 2) for ask in asks]
    async with Client(server.grpc) as client:
        info = await client.model_info()
        run = partial(_all, client, info.has_chat_template, on_progress)
        with anyio.move_on_after(WARM_UP_LIMIT_S):
            await run("warming up", [Session(ask) for ask in shorter])
        sessions = [Session(ask) for ask in asks]
        started = time.monotonic()
        await run("measuring", sessions)
        seconds = time.monotonic() - started
        loads = await client.loads()
    return Outcome(
        sessions=sessions,
        seconds=seconds,
        kv_peak=loads.kv_pages_peak / max(loads.kv_pages, 1),
        model=info.model,
        notes=tuple(info.notes),
    )


async def _all(
    client: Client, chat: bool, on_progress: OnProgress, phase: str, sessions: list[Session]
) -> None:
    failures: list[SelfdraftError] = []

    async def one(session: Session, seed: int) -> None:
        try:
            await _run(client, session, seed, chat, lambda: on_progress(phase, sessions))
        except SelfdraftError as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number, session in enumerate(sessions):
            tasks.start_soon(one, session, SEED + number)
    if failures:
        raise DemoError(f"a session failed: {failures[0]}")


async def _run(
    client: Client, session: Session, seed: int, chat: bool, on_chunk: Callable[[], None]
) -> None:
    ask = session.ask
    as_chat = ask.chat and chat
    started = previous = time.monotonic()
    async with client.generate(
        text=None if as_chat else ask.prompt,
        messages=[("user", ask.prompt)] if as_chat else None,
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        # Full length in every run, so that runs compare.
        ignore_eos=True,
        seed=seed,
        timeout=REQUEST_LIMIT_S,
    ) as generation:
        async for chunk in generation:
            now, count = time.monotonic(), len(chunk.token_ids)
            session.text += chunk.text
            if count and not session.tokens:
                session.first_token_s = now - started
            elif count:
                session.gaps += [(now - previous) / count] * count
            previous = now if count else previous
            session.tokens += count
            on_chunk()
    session.seconds = time.monotonic() - started
    session.complete = generation.complete
