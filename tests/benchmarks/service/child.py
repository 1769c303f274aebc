"""The process that is measured: a server that is told over stdin what to do, one JSON object a
line, and answers each on stdout.

{"do": "cpu"}                                   CPU seconds so far
{"do": "pace", "burst": 3, "step_s": 0.01}      how the burst engine goes on
{"do": "alone", "load": {…}}                    a load straight into the scheduler
{"do": "profile"}                               start cProfile on the event loop, or stop it
{"do": "stop"}
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import json
import os
import pstats
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import anyio

from engine.blas import prepare_blas
from engine.config import EngineConfig
from engine.plan import Engine, SamplingParams
from scheduler import GenerationRequest, Scheduler, SchedulerConfig, Tokens
from service.config import ServerConfig, ServiceConfig
from service.launch import make_server
from service.logs import make_logger
from service.server import Server
from service.text.tokenizer import Tokenizer
from tests.benchmarks.service.engine import DEPTH, BurstEngine
from tests.benchmarks.service.load import Cpu, Load, Outcome, Watch

TEXT = (
    "def fibonacci(n):\n    a, b = 0, 1\n    while a < n:\n        print(a, end=' ')\n"
    "        a, b = b, a + b\n    return a  # the first one that is n or more\n\n\n"
)


async def alone(scheduler: Scheduler, load: Load, cpu: Cpu) -> Outcome:
    """Runs a load without gRPC, text, metrics and logs."""
    watch = Watch(len(load.prompts), cpu)

    async def stream(number: int, prompt: tuple[int, ...]) -> None:
        request = GenerationRequest(
            request_id=f"alone-{load.seed}-{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                temperature=load.temperature, seed=load.seed * 1000 + number, coupled=True
            ),
            max_tokens=load.tokens,
            logprobs=load.logprobs,
            reuse_prefix=False,
        )
        async with scheduler.submit(request) as handle:
            async for event in handle:
                if isinstance(event, Tokens):
                    watch.burst(number, len(event.ids))
        watch.end()

    async with anyio.create_task_group() as tasks:
        for number, prompt in enumerate(load.prompts):
            tasks.start_soon(stream, number, tuple(prompt))
    return watch.outcome()


class Child:
    """The server and who listens to its orders."""

    def __init__(self, *, model: Path, bursts: bool, depth: int, rows: int, out: TextIO) -> None:
        self._model = model
        self._out = out
        self._engine: BurstEngine | None = None
        self._profile: cProfile.Profile | None = None
        config = ServiceConfig(
            engine=EngineConfig(model=model, blas="auto"),
            scheduler=SchedulerConfig(depth=DEPTH if bursts else depth, max_queue=2 * rows),
            server=ServerConfig(port=0, metrics_port=0, drain_s=1.0),
            log_format="json",
        )
        logger = make_logger("json", open(os.devnull, "w"))  # noqa: SIM115 - as long as we run
        self._server = (
            Server(
                config=config,
                engine_factory=self._build(rows),
                tokenizer_factory=lambda: Tokenizer.load(model),
                logger=logger,
            )
            if bursts
            else make_server(config, logger)
        )

    def _build(self, rows: int) -> Callable[[], Engine]:
        def build() -> Engine:
            tokenizer = Tokenizer.load(self._model)
            text = tokenizer.encode(TEXT, add_special_tokens=False)
            self._engine = BurstEngine(text, vocab_size=tokenizer.vocab_size, max_rows=rows)
            return self._engine

        return build

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._server.run)
            await self._server.ready.wait()
            assert self._server.addresses is not None
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
            self._say({"address": self._server.addresses.grpc})

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "cpu":
                self._say(self._cpu())
            else:
                future = asyncio.run_coroutine_threadsafe(self._obey(order), loop)
                self._say(future.result())
        loop.call_soon_threadsafe(self._stop)

    async def _obey(self, order: dict[str, Any]) -> Any:
        match order["do"]:
            case "pace":
                assert self._engine is not None
                self._engine.burst, self._engine.step_s = order["burst"], order["step_s"]
            case "alone":
                assert self._server._scheduler is not None
                load = Load(**order["load"])
                return asdict(await alone(self._server._scheduler, load, self._cpu))
            case "profile":
                return self._switch_profile()
            case "stop":
                self._stop()
        return None

    def _cpu(self) -> float:
        return time.process_time()

    def _switch_profile(self) -> str | None:
        if self._profile is None:
            self._profile = cProfile.Profile()
            self._profile.enable()
            return None
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).sort_stats("tottime").print_stats(40)
        self._profile = None
        return text.getvalue()

    def _stop(self) -> None:
        self._server.stop.request()
        self._server.stop.request()

    def _say(self, what: Any) -> None:
        print(json.dumps(what), file=self._out, flush=True)


def main() -> None:
    asked = json.loads(sys.argv[1])
    prepare_blas("auto")
    # What anything else prints must not get between the answers.
    out, sys.stdout = sys.stdout, sys.stderr

    async def work() -> None:
        child = Child(
            model=Path(asked["model"]),
            bursts=asked["bursts"],
            depth=asked["depth"],
            rows=asked["rows"],
            out=out,
        )
        await child.run()

    anyio.run(work)


if __name__ == "__main__":
    main()
