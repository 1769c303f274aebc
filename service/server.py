"""The server: binds its ports, loads the model, serves until told to stop, drains.

Life: the ports are bound first and health says NOT_SERVING while the model loads; then SERVING;
NOT_SERVING again when draining or when the engine died. Everything runs on one event loop; the
engine has its own thread (the scheduler's), the metrics exporter its own as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
import grpc.aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server
from selfdraft.v1 import admin_pb2_grpc, selfdraft_pb2_grpc

from engine.plan import Engine, EngineInfo
from scheduler.loop import Scheduler
from scheduler.statistics import Statistics
from service.admin import AdminServicer
from service.backend import Backend, Door
from service.calls import CallInterceptor
from service.config import ServiceConfig
from service.exposure import metrics_host
from service.gate import Gate
from service.gateway import servicer as gateway
from service.guard import ADMIN, HEALTH, REFLECTION, AuthInterceptor
from service.health import HEALTH_SERVICE, SERVICE, Health
from service.inference import InferenceServicer
from service.intake import IntakeInterceptor
from service.logs import Logger, dropped_by
from service.loopwatch import LoopWatch
from service.metrics import Metrics
from service.startup import effective, facts_of
from service.text.grammar import Grammars
from service.text.tokenizer import Tokenizer
from service.tls import Tls
from service.tracing import Tracing
from service.version import VERSION

_FLUSH_S: Final = 0.5
"""What is left after a drain are health watches and the last bytes of finished streams."""

_STATISTICS_TIMEOUT_S: Final = 2.0


class BindError(Exception):
    """A port cannot be had; the text says which."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server really listens."""

    grpc: str
    metrics: str | None


class Stop:
    """How a server is told to stop: once to drain, twice to drop what runs."""

    def __init__(self) -> None:
        self.drain = anyio.Event()
        self.now = anyio.Event()

    def begin(self) -> None:
        """Asks for a drain and never ends one."""
        self.drain.set()

    def request(self) -> None:
        """The first call asks for a drain, the second ends it."""
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


class Server:
    """One server. Use an instance for one `run`."""

    def __init__(
        self,
        *,
        config: ServiceConfig,
        engine_factory: Callable[[], Engine],
        tokenizer_factory: Callable[[], Tokenizer],
        logger: Logger,
        keep_costs: Callable[[EngineInfo, Mapping[tuple[int, int], float]], None] | None = None,
    ) -> None:
        """`engine_factory` runs on the engine's thread, `tokenizer_factory` on another.
        `keep_costs` is told after a clean stop what cycles cost; it must not raise."""
        self._keep_costs = keep_costs
        self._config = config
        self._engine_factory = engine_factory
        self._tokenizer_factory = tokenizer_factory
        self._logger = logger
        self._scheduler: Scheduler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._last_statistics: Statistics | None = None
        self._began = 0.0
        self._tracing: Tracing | None = None
        self.door = Door(retry_after_s=config.server.retry_after_s)
        self.metrics = Metrics(self._take_statistics, version=VERSION)
        self.metrics.facts.state = lambda: self.door.state
        self.metrics.facts.lines_dropped = dropped_by(logger)
        self._watch = LoopWatch(self.metrics, logger)
        self.stop = Stop()
        self.servicer: InferenceServicer | None = None
        """Known once bound."""
        self.addresses: Addresses | None = None
        """Known once bound."""
        self.bound = anyio.Event()
        """Set when the ports answer; health still says NOT_SERVING."""
        self.ready = anyio.Event()
        """Set when the model is loaded and requests are served."""

    async def run(self) -> int:
        """Serves until `stop`, or until the engine fails. Returns the process's exit code.

        Raises SettingError, FileError and BindError before anything is loaded; then TokenizerError,
        and whatever the engine's factory raises.
        """
        self._loop = asyncio.get_running_loop()
        self._began = anyio.current_time()
        self._loop_thread = threading.get_ident()
        self._logger.info("starting", version=VERSION, **effective(self._config))
        async with self._bound() as (health, servicer):
            self.bound.set()
            code = 0
            with anyio.CancelScope() as scope:
                watches = (
                    asyncio.create_task(self._cancel_loading(scope)),
                    asyncio.create_task(self._watch.run()),
                )
                try:
                    code = await self._load_and_serve(health, servicer)
                finally:
                    for watch in watches:
                        watch.cancel()
            return code

    # --- phases ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _bound(self) -> AsyncIterator[tuple[Health, InferenceServicer]]:
        server_config = self._config.server
        gate = Gate.of(self._config, self._logger)
        facts = self.metrics.facts
        facts.tls, facts.tokens = gate.tls, gate.tokens
        server = grpc.aio.server(
            options=server_config.grpc_options(),
            maximum_concurrent_rpcs=server_config.transport_calls,
            interceptors=[CallInterceptor(self.metrics), self._intake(), self._auth(gate)],
        )
        tracing = self._tracing = Tracing.of(self._config.tracing, self._logger)
        if tracing is not None:
            facts.spans = tracing.results
        servicer = InferenceServicer(
            door=self.door,
            metrics=self.metrics,
            config=self._config,
            logger=self._logger,
            clock=anyio.current_time,
            tracing=tracing,
        )
        register: Any = selfdraft_pb2_grpc.add_InferenceServicer_to_server
        register(servicer, server)
        self.servicer = servicer
        more = self._register_gateway(server, servicer)
        health = Health(*more, logger=self._logger)
        await health.register(server)
        names = [SERVICE, *more, HEALTH_SERVICE, reflection.SERVICE_NAME]
        if gate.admin:
            self._add_admin(server, servicer, gate)
            names.append(ADMIN)
        reflection.enable_server_reflection(names, server)
        servicer.services = tuple(names)
        port = _bind(server, server_config.host, server_config.port, gate.tls)
        async with self._exporter() as metrics_port:
            await server.start()
            host = server_config.host
            self.addresses = Addresses(
                grpc=_address(host, port),
                metrics=None
                if metrics_port is None
                else _address(metrics_host(self._config), metrics_port),
            )
            try:
                yield health, servicer
            finally:
                with anyio.CancelScope(shield=True):
                    await health.set(serving=False)
                    await server.stop(_FLUSH_S)
                    if tracing is not None:
                        await tracing.close()

    def _register_gateway(
        self, server: grpc.aio.Server, servicer: InferenceServicer
    ) -> tuple[str, ...]:
        """The gateway's protocol, unless it is off. Returns the names of services added."""
        if not self._config.server.gateway:
            return ()
        gateway.register(server, inference=servicer, door=self.door, config=self._config)
        return (gateway.SERVICE,)

    def _intake(self) -> IntakeInterceptor:
        return IntakeInterceptor(
            config=self._config.server,
            free_services=[HEALTH, REFLECTION],
            metrics=self.metrics,
            logger=self._logger,
        )

    def _auth(self, gate: Gate) -> AuthInterceptor:
        reflects = [REFLECTION] if self._config.security.open_reflection else []
        return AuthInterceptor(
            tokens=gate.tokens,
            open_services=[HEALTH, *reflects],
            max_open_calls=self._config.server.max_open_calls,
            retry_after_s=self._config.server.retry_after_s,
            metrics=self.metrics,
            logger=self._logger,
            clock=anyio.current_time,
        )

    def _add_admin(self, server: grpc.aio.Server, servicer: InferenceServicer, gate: Gate) -> None:
        admin = AdminServicer(
            door=self.door,
            config=self._config,
            ledger=servicer.ledger,
            files=gate.files,
            drain=self.stop.begin,
            logger=self._logger,
            clock=anyio.current_time,
        )
        register: Any = admin_pb2_grpc.add_AdminServicer_to_server
        register(admin, server)

    async def _cancel_loading(self, scope: anyio.CancelScope) -> None:
        """A model that takes minutes to load must not keep the process from stopping."""
        await self.stop.drain.wait()
        if not self.ready.is_set():
            scope.cancel()

    async def _load_and_serve(self, health: Health, servicer: InferenceServicer) -> int:
        took = self.metrics.phase_took
        began = anyio.current_time()
        tokenizer = await anyio.to_thread.run_sync(self._tokenizer_factory, abandon_on_cancel=True)
        took("tokenizer", anyio.current_time() - began)
        async with Scheduler(
            engine_factory=self._engine_factory,
            config=self._config.scheduler,
            clock=anyio.current_time,
            on_step=self.metrics.step,
        ) as scheduler:
            self._scheduler = scheduler
            info = scheduler.info
            name = self._config.model_name or info.model
            self.metrics.model_loaded(info, name)
            if self._tracing is not None:
                self._tracing.model = name
            self._note(info, tokenizer)
            grammars = Grammars(
                tokenizer,
                vocab_size=info.vocab_size,
                limits=self._config.limits.grammar,
                tenants=self._config.scheduler.tenants,
            )
            began = anyio.current_time()
            await anyio.to_thread.run_sync(grammars.prepare, abandon_on_cancel=True)
            took("grammar", anyio.current_time() - began)
            backend = Backend(
                scheduler=scheduler, tokenizer=tokenizer, grammars=grammars, name=name
            )
            return await self._serve(backend, health, servicer)

    def _note(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        for note in info.notes:
            self._logger.info("engine note", note=note)
        if tokenizer.vocab_size > info.vocab_size:
            self._logger.warning(
                "the tokenizer has more tokens than the model",
                tokenizer=tokenizer.vocab_size,
                model=info.vocab_size,
            )

    async def _serve(self, backend: Backend, health: Health, servicer: InferenceServicer) -> int:
        self.door.open(backend)
        await health.set(serving=True)
        self.ready.set()
        assert self.addresses is not None
        self._logger.info(
            "serving",
            model=backend.name,
            address=self.addresses.grpc,
            metrics=self.addresses.metrics,
            **facts_of(backend.scheduler.info),
            load_s=round(anyio.current_time() - self._began, 3),
        )
        await _first_of(self.stop.drain, backend.scheduler.failed)
        if not backend.scheduler.failed.is_set():
            await self._drain(backend, health, servicer)
        if not backend.scheduler.failed.is_set():
            if self._keep_costs is not None:
                scheduler = backend.scheduler
                self._keep_costs(scheduler.info, scheduler.statistics().step_times)
            self._logger.info("stopped")
            return 0
        self.door.fail(str(backend.scheduler.failure))
        await health.set(serving=False)
        self._logger.error("the engine failed", failure=str(backend.scheduler.failure))
        with anyio.move_on_after(_FLUSH_S):
            await servicer.wait_idle()
        return 1

    async def _drain(self, backend: Backend, health: Health, servicer: InferenceServicer) -> None:
        limit = self._config.server.drain_s
        self._logger.info("draining", limit_s=limit, running=backend.scheduler.statistics().running)
        began = anyio.current_time()
        self.door.drain()
        await health.set(serving=False)
        async with anyio.create_task_group() as tasks:

            async def hurry() -> None:
                await _first_of(self.stop.now, backend.scheduler.failed)
                tasks.cancel_scope.cancel()

            tasks.start_soon(hurry)
            await backend.scheduler.drain(limit)
            with anyio.move_on_after(limit):
                await servicer.wait_idle()
            tasks.cancel_scope.cancel()
        took = anyio.current_time() - began
        self._logger.info("drained", took_s=round(took, 3), left=servicer.active)

    # --- metrics ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exporter(self) -> AsyncIterator[int | None]:
        """The Prometheus endpoint; yields its real port, None when there is none."""
        config = self._config.server
        if config.metrics_port is None:
            yield None
            return
        start: Any = partial(start_http_server, registry=self.metrics.registry)
        host = metrics_host(self._config)
        try:
            http, thread = start(config.metrics_port, addr=host)
        except OSError as error:
            where = _address(host, config.metrics_port)
            raise BindError(f"metrics port: cannot listen on {where}: {error.strerror}") from error
        try:
            yield http.server_port
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(http.shutdown)
                http.server_close()
                await anyio.to_thread.run_sync(thread.join)

    def _take_statistics(self) -> Statistics | None:
        """A snapshot taken on the event loop, for the exporter's threads; the last one when the
        loop is busy or gone."""
        if self._scheduler is None or self._loop is None:
            return None
        if threading.get_ident() == self._loop_thread:
            return self._scheduler.statistics()

        async def take(scheduler: Scheduler) -> Statistics:
            return scheduler.statistics()

        coroutine = take(self._scheduler)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return self._last_statistics
        try:
            self._last_statistics = future.result(_STATISTICS_TIMEOUT_S)
        except TimeoutError:
            future.cancel()
        return self._last_statistics


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def _bind(server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> int:
    try:
        if tls is not None:
            return server.add_secure_port(_address(host, port), tls.credentials())
        return server.add_insecure_port(_address(host, port))
    except RuntimeError as error:
        raise BindError(f"port: cannot listen on {_address(host, port)}") from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
