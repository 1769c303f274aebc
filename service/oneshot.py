"""`selfdraft generate`: one text from a server, or from a model loaded in this process."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
from selfdraft import Client
from selfdraft.messages import Priority, SpeculationMode
from selfdraft.v1 import selfdraft_pb2 as pb

from service import console, launch, logs
from service.config import ServerConfig, ServiceConfig
from service.options import refusals_say_so
from service.sampling import mode_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to generate."""

    prompt: str
    chat: bool
    system: str | None
    sampling: Mapping[str, Any]
    session_id: str | None
    speculation: SpeculationMode
    max_depth: int | None
    timeout: float | None
    priority: Priority | None = None


def generate_at(target: str, ask: Ask, reach: Mapping[str, Any]) -> None:
    """Streams to standard output; `reach` are options of the client. Raises SelfdraftError and
    SettingError."""

    async def main() -> None:
        with refusals_say_so():
            # Who types sees a refusal at once, and may press a key.
            connected = Client(target, retry=None, **reach)
        async with connected as client:
            await _stream(client, ask)

    anyio.run(main, backend="asyncio")


def generate_here(config: ServiceConfig, ask: Ask) -> None:
    """The same from a server of its own in this process, reached over loopback. Raises what
    loading raises, and SelfdraftError."""
    private = replace(config, server=ServerConfig(port=0, metrics_port=None))
    quiet = logs.make_logger("pretty", level=logging.WARNING)

    async def main() -> None:
        progress = console.LoadProgress()
        try:
            async with launch.running(launch.make_server(private, quiet, progress)) as server:
                progress.close()
                assert server.addresses is not None
                async with Client(server.addresses.grpc) as client:
                    await _stream(client, ask)
        finally:
            progress.close()

    anyio.run(main, backend="asyncio")


async def _stream(client: Client, ask: Ask) -> None:
    if ask.chat:
        turns = [("system", ask.system)] if ask.system is not None else []
        prompt: dict[str, Any] = {"messages": [*turns, ("user", ask.prompt)]}
    else:
        prompt = {"text": ask.prompt}
    started = time.monotonic()
    many = ask.sampling.get("n", 1) > 1
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[pb.OutputLogProbs]] = {}
    async with client.generate(
        **prompt,
        **ask.sampling,
        session_id=ask.session_id,
        speculation=ask.speculation,
        max_depth=ask.max_depth,
        priority=ask.priority,
        timeout=ask.timeout,
    ) as generation:
        async for chunk in generation:
            texts.setdefault(chunk.index, []).append(chunk.text)
            if chunk.HasField("output_logprobs"):
                logprobs.setdefault(chunk.index, []).append(chunk.output_logprobs)
            if not many:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    seconds = time.monotonic() - started
    for index, complete in sorted(generation.completes.items()):
        # Texts that come side by side are shown one after the other, under a number.
        text = "".join(texts.get(index, []))
        sys.stdout.write(f"--- {index}\n{text}\n" if many else "\n")
        sys.stdout.flush()
        await _table(client, logprobs.get(index, []))
        _summary(complete, seconds)


async def _table(client: Client, parts: Sequence[pb.OutputLogProbs]) -> None:
    """One line per token: its log probability, itself, and the most probable ones."""
    names: dict[int, str] = {}

    async def name(token: int) -> str:
        if token not in names:
            text = await client.detokenize([token], skip_special_tokens=False)
            names[token] = json.dumps(text, ensure_ascii=False)
        return names[token]

    for part in parts:
        for n, (token, value) in enumerate(zip(part.token_ids, part.token_logprobs, strict=True)):
            others = part.top_logprobs[n] if part.top_logprobs else pb.TopLogProbs()
            pairs = zip(others.token_ids, others.values, strict=True)
            shown = [f"{await name(other)} {logprob:.3f}" for other, logprob in pairs]
            line = f"{value:9.4f}  {await name(token):<16}{'  '.join(shown)}".rstrip()
            console.stderr.print(line, markup=False, soft_wrap=True)


def _summary(done: pb.GenerateComplete, seconds: float) -> None:
    drafted, accepted = done.spec_draft_tokens, done.spec_accepted_tokens
    rate = f"{accepted / drafted:.2f} ({accepted}/{drafted})" if drafted else "no drafts"
    passes = done.spec_cycles + 1
    console.stderr.print(
        f"{done.completion_tokens} tokens in {seconds:.2f} s "
        f"({done.completion_tokens / max(seconds, 1e-9):.1f} tokens/s), acceptance {rate}, "
        f"{done.completion_tokens / passes:.2f} tokens per pass, "
        f"first token after {done.time_to_first_token_seconds:.3f} s, "
        f"finish: {done.finish_reason}, seed {done.seed} ({mode_name(done.speculation_mode)})",
        style="dim",
        soft_wrap=True,
    )
