"""Starts servers from a config: in this process until a signal, or beside a client."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from engine.budget import size
from engine.plan import Engine
from service.config import ServiceConfig
from service.costs import CostSource
from service.files import fit_files
from service.logs import Logger
from service.server import Server
from service.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""(phase, done, total), called on the engine's thread while a model loads."""


def make_server(config: ServiceConfig, logger: Logger, progress: Progress | None = None) -> Server:
    """A server that will load the config's model. Call it on the event loop that runs it.

    Raises CostTableError when the config names a cost table that cannot be read.
    """
    costs = CostSource(config.cost_table, logger) if config.scheduler.depth == "auto" else None
    if costs is not None:
        scheduler = replace(config.scheduler, cost_table=costs.table)
        config = replace(config, scheduler=scheduler)

    def engine() -> Engine:
        # Only here, on the engine's own thread, does MLX come into the process.
        from engine.load import load_engine
        from engine.warmup import warm_up

        began = time.monotonic()
        loaded = load_engine(config.engine, progress)
        took = server.metrics.phase_took
        took("model", time.monotonic() - began)
        try:
            if loaded.budget is not None:
                server.metrics.planned({row.name: row.bytes for row in loaded.budget.rows})
                for row in loaded.budget.lines():
                    logger.info("memory", part=row.name, size=size(row.bytes), note=row.note)
            if costs is not None:
                costs.check(loaded.info)
            began = time.monotonic()
            warm_up(loaded)  # health says SERVING after this
            took("warm_up", time.monotonic() - began)
        except BaseException:
            loaded.close()
            raise
        return loaded

    server = Server(
        config=config,
        engine_factory=engine,
        tokenizer_factory=lambda: Tokenizer.load(config.engine.model),
        logger=logger,
        keep_costs=None if costs is None else costs.keep,
    )
    return server


def serve(
    config: ServiceConfig,
    logger: Logger,
    progress: Progress | None = None,
    on_ready: Callable[[Server], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT (drain; a second one stops at once) or until the engine
    fails. Returns the exit code. Raises what `Server.run` raises."""

    async def main() -> int:
        server = make_server(fit_files(config, logger), logger, progress)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop.request)
        async with _announcing(server, on_ready):
            return await server.run()

    return anyio.run(main, backend="asyncio")


@asynccontextmanager
async def _announcing(
    server: Server, on_ready: Callable[[Server], None] | None
) -> AsyncIterator[None]:
    async def announce() -> None:
        await server.ready.wait()
        if on_ready is not None:
            on_ready(server)

    task = asyncio.create_task(announce())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Server]:
    """Runs `server` beside the block, which starts when it is ready, and stops it afterwards.

    Raises what `Server.run` raises while it loads.
    """
    run = asyncio.create_task(server.run())
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait((run, ready), return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
            raise RuntimeError("the server ended before it was ready")
        yield server
    finally:
        ready.cancel()
        server.stop.request()
        server.stop.request()
        await asyncio.wait((run,))
