"""The server under soak: its process, its metrics page, its log."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import psutil

from tests.benchmarks.soak.scale import Scale
from tests.integration.processes import START_S, Process

_SAMPLE: Final = re.compile(r"^(\w+(?:\{.*\})?) (\S+)$", re.M)


class Served(Process):
    """`selfdraft serve` of the bundled model, with the bounds that a scale needs."""

    def __init__(self, scale: Scale, *arguments: str) -> None:
        super().__init__(
            *("serve", "--port", "0", "--metrics-port", "0", "--log-format", "json", "--log-all"),
            *("--cost-table", "off", "--depth", "2", "--max-rows", str(scale.rows)),
            *("--max-queue", str(scale.max_queue), "--max-calls", str(scale.max_calls)),
            *("--max-connections", str(scale.max_connections), *arguments),
        )
        self.target = ""
        self._metrics = ""
        self._facts = psutil.Process(self.process.pid)

    def wait(self) -> None:
        """Returns when it serves; `target` is then known."""
        deadline = time.monotonic() + START_S
        while not (serving := [line for line in self.lines() if line["event"] == "serving"]):
            assert self.running(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        self.target = serving[0]["address"]
        self._metrics = f"http://{serving[0]['metrics']}/metrics"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines of the log, in order. Those of gRPC itself are no JSON."""
        for line in self.output().splitlines():
            if line.startswith("{") and line.endswith("}"):  # the last may be half written
                yield json.loads(line)

    def metrics(self) -> dict[str, float]:
        """Samples as {'name{label="value"}': value}. Raises OSError."""
        with urllib.request.urlopen(self._metrics, timeout=30) as answer:
            page = answer.read().decode()
        return {name: float(value) for name, value in _SAMPLE.findall(page)}

    def rss(self) -> int:
        """Bytes of memory it has resident."""
        return int(self._facts.memory_info().rss)

    def files(self) -> int:
        """File descriptors it has open."""
        return int(self._facts.num_fds())

    def threads(self) -> int:
        return int(self._facts.num_threads())

    def cpu_s(self) -> float:
        """Seconds of CPU it has used."""
        times = self._facts.cpu_times()
        return float(times.user + times.system)
