"""SIGKILL at any moment: the next start works, and what is on the disk is whole or not there."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from selfdraft import AdminClient, Client, SelfdraftError

from tests.engine.tiny_checkpoints import write_checkpoint
from tests.service.harness import FIXTURES

KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from scheduler.costs import CostTable
from service.costs import CostFile
from service.reload import FileError
from service.tokens import append_entry, entry_text, new_token, read_entries

folder = Path(sys.argv[1])
costs, tokens = folder / "costs.json", folder / "tokens.toml"
rng = random.Random(7)


def write_costs(n):
    points = {(rows, depth): n * 1e-3 for rows in range(1, 40) for depth in range(9)}
    CostFile(fingerprint={"machine": {}, "model": {}}, table=CostTable(seconds=points)).save(costs)


def write_tokens(n):
    append_entry(tokens, entry_text(new_token(), tenant=f"t{n}"))


seen = 0
for round in range(400):  # on a slow disk many are killed before they have written anything
    if round >= 24 and seen > 2:
        break
    write = (write_costs, write_tokens)[round % 2]
    child = os.fork()
    if child == 0:
        for n in range(1, 10**6):
            write(n)
    time.sleep(rng.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if costs.exists():
        assert len(set(CostFile.load(costs).table.seconds.values())) == 1
    if tokens.exists():
        seen = max(seen, len(read_entries(tokens.read_bytes(), tokens)))
        assert tokens.stat().st_mode & 0o077 == 0
write_costs(1)
assert seen > 2
"""


def test_small_files_are_whole_after_any_kill(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITERS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # What killed writers left goes when it is old enough to be nobody's.
    left = tmp_path / ".costs.json.old"
    left.write_text("{")
    os.utime(left, (1, 1))
    fresh = tmp_path / ".costs.json.new"
    fresh.write_text("{")
    from service.whole import write_whole

    write_whole(tmp_path / "costs.json", "{}")
    assert not left.exists()
    assert fresh.exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(write_checkpoint(tmp_path_factory.mktemp("model"), "hf"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FIXTURES / "byte_level" / name).read_bytes())
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A server on a port that stays the same from start to start."""

    def __init__(self, model: Path, folder: Path, port: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.serving = threading.Event()
        command = [sys.executable, "-m", "service.cli", "serve", "--model", str(model)]
        command += ["--port", str(port), "--no-metrics", "--log-format", "json"]
        command += ["--session-dir", str(folder / "sessions"), "--mtp-gate", "off"]
        command += ["--max-rows", "4", "--kv-memory", "4MiB"]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == "serving":
                    self.serving.set()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        self._reader.join(timeout=5)
        return code


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.wait()


async def converse(port: int, rng: random.Random) -> None:
    """Streams and exports until the server is gone."""
    target = f"127.0.0.1:{port}"
    async with Client(target, retry=None) as client, AdminClient(target) as admin:
        prompt: dict[str, Any] = {"token_ids": [5, 6, 7] * 20, "ignore_eos": True}
        await client.generate(**prompt, max_tokens=4, session_id="chat").text()
        endless = client.generate(**prompt, max_tokens=400)
        await endless.request_id()
        for n in range(1000):
            await admin.export_session("chat", f"file{n % 3}", overwrite=True)
            await anyio.sleep(rng.uniform(0, 0.01))


async def imports(port: int) -> int:
    """How many files of the folder can be imported: all of them."""
    async with AdminClient(f"127.0.0.1:{port}") as admin:
        files = await admin.session_files()
        for file in files:
            assert (await admin.import_session(file.name, f"s{file.name}")).tokens == 63
        return len(files)


def test_a_server_starts_again_after_any_kill(
    model: Path, tmp_path: Path, processes: list[Process]
) -> None:
    port, rng = free_port(), random.Random(11)

    def start() -> Process:
        processes.append(Process(model, tmp_path, port))
        return processes[-1]

    for delay in (rng.uniform(0.1, 0.8), rng.uniform(0.8, 2.5)):  # importing, then loading
        server = start()
        time.sleep(delay)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    server = start()  # while it streams and exports
    assert server.serving.wait(60), server.events
    killer = threading.Timer(rng.uniform(0.5, 1.0), server.process.kill)
    killer.start()
    with pytest.raises(SelfdraftError):
        anyio.run(converse, port, rng)
    server.process.wait(timeout=10)
    killer.join()
    leftover = tmp_path / "sessions" / ".file0.safetensors.x.part"
    leftover.write_text("half")
    last = start()
    assert last.serving.wait(60), last.events
    assert anyio.run(imports, port) > 0
    assert not leftover.exists()
    assert last.end(signal.SIGTERM) == 0
    assert [event["event"] for event in last.events if event["level"] in ("warning", "error")] == [
        "the tokenizer has more tokens than the model"
    ]
