"""Real processes of a small fleet on loopback: servers, and a gateway in front of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

SELFDRAFT = (sys.executable, "-m", "service.cli")
START_S = 90.0


class Process:
    """A `selfdraft` command that runs until it is stopped. Its output is in a file."""

    def __init__(self, *arguments: str) -> None:
        self._output = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*SELFDRAFT, *arguments], stdout=self._output, stderr=subprocess.STDOUT
        )

    def output(self) -> str:
        return Path(self._output.name).read_text(errors="replace")

    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends it the hard way; idempotent."""
        self.process.kill()
        self.process.wait()
        self._output.close()


class Worker(Process):
    """`selfdraft serve` of the bundled model."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(
            *("serve", "--port", "0", "--no-metrics", "--log-format", "json"),
            *("--cost-table", "off", "--depth", "2", *arguments),
        )
        self.target = ""

    def wait(self) -> None:
        """Returns when it serves; `target` is then known."""
        deadline = time.monotonic() + START_S
        while not (serving := self.lines("serving")):
            assert self.running(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        self.target = serving[0]["address"]

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = [line for line in self.output().splitlines() if line.startswith("{")]
        # The last line may be half written.
        whole = [json.loads(line) for line in found if line.endswith("}")]
        return [line for line in whole if line["event"] == event]


class Gateway(Process):
    """`selfdraft gateway`."""

    def __init__(self, *workers: Worker, options: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        named = [part for worker in workers for part in ("--worker", worker.target)]
        super().__init__(
            *("gateway", *named, "--port", str(self.port), "--metrics-port", str(free_port())),
            *("--", *options),
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, workers: int) -> None:
        """Returns when it has registered its workers and can tokenize for them."""
        deadline = time.monotonic() + START_S
        while not self._ready(workers):
            assert self.running(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def _ready(self, workers: int) -> bool:
        try:
            listed = self.get("/workers")
            tokenizers = self.get("/v1/tokenizers")
        except OSError:
            return False
        healthy = [worker for worker in listed["workers"] if worker["is_healthy"]]
        return len(healthy) == workers and bool(tokenizers["tokenizers"])

    def get(self, path: str) -> Any:
        """The JSON there. Raises OSError."""
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return json.load(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
