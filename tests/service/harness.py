"""A real server on loopback, with the real scheduler and an engine without a model."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from prometheus_client.parser import text_string_to_metric_families
from selfdraft import Client

from engine.config import EngineConfig
from engine.plan import Engine, RowSpec
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason
from scheduler.statistics import Statistics
from service.config import RequestLimits, SecurityConfig, ServerConfig, ServiceConfig
from service.logs import make_logger
from service.server import Server
from service.text.tokenizer import Tokenizer
from tests.scheduler.fake_engine import FakeEngine, fake_logprobs

FIXTURES = Path(__file__).parent / "fixtures"
VOCAB = 401
"""Tokens of the byte-level fixture."""
EOS = 1


def tokenizer(name: str = "byte_level") -> Tokenizer:
    return Tokenizer.load(FIXTURES / name)


def saying(text: str, *, then_eos: bool = False) -> Callable[[tuple[int, ...], int], int]:
    """A token function for FakeEngine: `text` over and over, or once and then the end token."""
    ids = tokenizer().encode(text)

    def token(prompt: tuple[int, ...], index: int) -> int:
        if then_eos and index >= len(ids):
            return EOS
        return ids[index % len(ids)]

    return token


pretend_logprobs = fake_logprobs


class ObedientEngine(FakeEngine):
    """A FakeEngine that also obeys constraints and min_tokens, and reports log probabilities."""

    def specs(self) -> list[RowSpec]:
        """What rows were begun with, oldest first."""
        chunks = [chunk for plan in self.plans for chunk in plan.prefill]
        return [chunk.spec for chunk in chunks if chunk.spec is not None]


@dataclass
class Running:
    """A server under test."""

    server: Server
    client: Client
    log: io.StringIO
    engines: list[ObedientEngine]
    codes: list[int] = field(default_factory=list)
    """Exit code, once it stopped."""
    defects_expected: bool = False
    """Set by a test that makes the server fail in a way it must not."""
    streams: dict[str, AsyncIterator[Any]] = field(default_factory=dict)
    """For tests to keep their streams alive in."""

    @property
    def target(self) -> str:
        assert self.server.addresses is not None
        return self.server.addresses.grpc

    @property
    def statistics(self) -> Statistics:
        found = self.server._take_statistics()
        assert found is not None
        return found

    async def works(self, **prompt: Any) -> bool:
        """The server still generates."""
        ask = {"request_id": None, **(prompt if "token_ids" in prompt else {"text": "x"} | prompt)}
        generation = self.client.generate(max_tokens=3, ignore_eos=True, **ask)
        ids = [token async for chunk in generation for token in chunk.token_ids]
        return len(ids) == 3 and generation.complete is not None

    def finished(self, reason: str) -> int:
        """Requests that ended for `reason`."""
        return self.statistics.finished.get(FinishReason(reason), 0)

    def log_lines(self, event: str = "request") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    async def metrics(self) -> dict[str, float]:
        """Samples of the real endpoint, as {'name{label="value"}': value}."""
        assert self.server.addresses is not None
        url = f"http://{self.server.addresses.metrics}/metrics"

        def fetch() -> str:
            with urllib.request.urlopen(url, timeout=5) as answer:
                body: bytes = answer.read()
                return body.decode()

        samples = {}
        for family in text_string_to_metric_families(await anyio.to_thread.run_sync(fetch)):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    async def idle(self) -> None:
        """Waits until every Generate handler has returned."""
        while self.server.servicer is None or self.server.servicer.active:
            await anyio.sleep(0.005)

    async def until_idle(self) -> None:
        """Waits until the scheduler and its engine hold nothing of any request but prefixes that
        others may start from."""
        with anyio.fail_after(5):
            while (
                (s := self.statistics).running
                or s.queued_requests
                or s.rows_held
                or s.pages_used > s.pages_cached
                or any(engine.rows for engine in self.engines)
            ):
                await anyio.sleep(0.005)


def service_config(
    *, server: ServerConfig | None = None, security: SecurityConfig | None = None, **scheduler: Any
) -> ServiceConfig:
    return ServiceConfig(
        engine=EngineConfig(model=Path("unused")),
        scheduler=SchedulerConfig(**scheduler),
        server=server or ServerConfig(port=0, metrics_port=0, drain_s=5.0),
        limits=RequestLimits(),
        security=security or SecurityConfig(),
        log_format="json",
    )


@asynccontextmanager
async def running(
    *,
    engine: Callable[[], Engine] | None = None,
    config: ServiceConfig | None = None,
    with_tokenizer: Callable[[], Tokenizer] = tokenizer,
    ready: bool = True,
    metrics: bool = False,
    client: Mapping[str, Any] | None = None,
    **fake: Any,
) -> AsyncIterator[Running]:
    """A server for the length of the block; `client` are options of its client, which retries
    nothing unless they say so, `fake` those of its FakeEngine."""
    engines: list[ObedientEngine] = []

    def build() -> Engine:
        engines.append(ObedientEngine(**({"vocab_size": VOCAB} | fake)))
        return engines[-1]

    config = config or service_config()
    config = replace(
        config, server=replace(config.server, port=0, metrics_port=0 if metrics else None)
    )
    log = io.StringIO()
    server = Server(
        config=config,
        engine_factory=engine or build,
        tokenizer_factory=with_tokenizer,
        logger=make_logger("json", log),
    )
    async with anyio.create_task_group() as tasks:
        codes: list[int] = []

        async def serve() -> None:
            codes.append(await server.run())

        tasks.start_soon(serve)
        with anyio.fail_after(10):
            await (server.ready if ready else server.bound).wait()
        assert server.addresses is not None
        options: dict[str, Any] = {"retry": None} | dict(client or {})
        async with Client(server.addresses.grpc, **options) as caller:
            up = Running(server=server, client=caller, log=log, engines=engines, codes=codes)
            yield up
        assert up.defects_expected or not up.log_lines("unexpected error"), log.getvalue()
        server.stop.request()
        server.stop.request()
