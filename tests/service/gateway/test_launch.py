"""`selfdraft gateway` before it becomes smg: what it is told, whom it waits for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from service.config import SecurityConfig, ServerConfig, SettingError
from service.gateway import launch
from service.gateway.launch import GatewayConfig, GatewayError, wait_for_workers
from service.text.tokenizer import Tokenizer
from service.tokens import entry_text, new_token
from tests.service.harness import running, service_config, tokenizer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker", {"workers": ()}),
        ("worker", {"workers": ("http://a:1",)}),
        ("worker", {"workers": ("a",)}),
        ("worker", {"workers": ("a:0",)}),
        ("worker", {"workers": ("a:65536",)}),
        ("worker", {"workers": ("a:1; rm",)}),
        ("worker", {"workers": ("a:1", "a:1")}),
        ("port", {"port": 0}),
        ("metrics_port", {"metrics_port": 65536}),
        ("wait", {"wait_s": 0.0}),
    ],
)
def test_settings_out_of_range_name_themselves(name: str, value: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as refused:
        GatewayConfig(**({"workers": ("127.0.0.1:1",)} | value))
    assert refused.value.name == name


def test_the_command_is_one_that_smg_takes() -> None:
    from smg.launch_router import parse_router_args

    config = GatewayConfig(
        workers=("a:1", "[::1]:2"), port=8000, metrics_port=8001, options=("--log-level", "warn")
    )
    command = config.command()
    assert command[:4] == [sys.executable, "-m", "smg", "launch"]
    taken = parse_router_args(command[4:])
    assert taken.worker_urls == ["grpc://a:1", "grpc://[::1]:2"]
    assert (taken.host, taken.port, taken.policy) == ("127.0.0.1", 8000, "cache_aware")
    assert (taken.prometheus_host, taken.prometheus_port) == ("127.0.0.1", 8001)
    assert taken.log_level == "warn"
    assert taken.worker_wedge_secs > 3


def test_without_smg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(GatewayError, match=r"selfdraft\[gateway\]"):
        launch.launch(GatewayConfig(workers=("127.0.0.1:1",)))


def test_errors_are_one_line_and_a_code() -> None:
    for arguments, code, said in (
        (["--worker", "nowhere"], 2, "worker: 'nowhere' is not host:port"),
        (["--worker", "127.0.0.1:1", "--wait", "0.3"], 1, "worker 127.0.0.1:1: "),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "gateway", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.anyio
async def test_it_waits_until_all_workers_serve() -> None:
    gate = threading.Event()

    def slow_tokenizer() -> Tokenizer:
        gate.wait(10)
        return tokenizer()

    async with (
        running(with_tokenizer=slow_tokenizer, ready=False) as slow,
        running() as quick,
        anyio.create_task_group() as tasks,
    ):
        try:
            with pytest.raises(GatewayError, match="is not serving yet"):
                await wait_for_workers([quick.target, slow.target], 0.3)
            waited = anyio.Event()

            async def wait() -> None:
                await wait_for_workers([quick.target, slow.target], 10)
                waited.set()

            tasks.start_soon(wait)
            await anyio.sleep(0.2)
            assert not waited.is_set()
        finally:
            gate.set()
        with anyio.fail_after(5):
            await waited.wait()


@pytest.mark.anyio
async def test_who_waits_is_told_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("service.gateway.launch.stderr.print", said.append)
    monkeypatch.setattr("service.gateway.launch._PATIENCE_S", 0.2)
    with pytest.raises(GatewayError, match=r"worker 127.0.0.1:1: .*; gave up after 1 s"):
        await wait_for_workers(["127.0.0.1:1"], 1.0)
    assert len(said) == 1
    assert said[0].startswith("gateway: waiting up to 1 s: worker 127.0.0.1:1: ")


@pytest.mark.anyio
async def test_a_worker_without_the_protocol_is_no_worker() -> None:
    config = service_config(server=ServerConfig(gateway=False))
    async with running(config=config) as up:
        with pytest.raises(GatewayError, match=r"does not speak the gateway's protocol"):
            await wait_for_workers([up.target], 5)


@pytest.mark.anyio
async def test_a_worker_that_wants_tokens_is_no_worker(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(entry_text(new_token(), tenant="ada"))
    config = service_config(security=SecurityConfig(tokens=tokens))
    async with running(config=config) as up, running() as open_to_all:
        with pytest.raises(GatewayError, match="asks for a token") as refused:
            await wait_for_workers([up.target, open_to_all.target], 5)
        assert open_to_all.target not in str(refused.value)
