"""A real Prometheus on loopback, running deploy/'s own configuration, for tests."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.checkout import ROOT

SHIPPED = ROOT / "deploy" / "prometheus"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Sample:
    labels: Mapping[str, str]
    value: float


class Prometheus:
    """Its HTTP API, as Grafana uses it."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def query(self, expr: str, *, at: float | None = None) -> list[Sample]:
        """An instant query. Raises AssertionError with Prometheus' words when it is refused."""
        parameters = {"query": expr} | ({} if at is None else {"time": f"{at:.3f}"})
        data = self._get("query", parameters)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(item["metric"], float(item["value"][1])) for item in data["result"]]

    def total(self, expr: str, *, at: float | None = None) -> float:
        """The sum over all series of `expr`; NaN when there is none."""
        samples = self.query(f"sum({expr})", at=at)
        return samples[0].value if samples else math.nan

    def label_values(self, selector: str, label: str) -> list[str]:
        """What Grafana's `label_values(selector, label)` asks."""
        values: list[str] = self._get(f"label/{label}/values", {"match[]": selector})
        return values

    def rules(self) -> list[dict[str, Any]]:
        """Loaded rules with their health and last error."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _get(self, what: str, parameters: Mapping[str, str]) -> Any:
        url = f"{self._base}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


def write_configuration(folder: Path, target: str) -> Path:
    """deploy/'s configuration with one target and a second instead of fifteen."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] |= {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    (folder / "targets").mkdir()
    targets = [{"targets": [target], "labels": {"site": "test"}}]
    (folder / "targets" / "fleet.yml").write_text(yaml.safe_dump(targets), encoding="utf-8")
    shutil.copy(SHIPPED / "rules.yml", folder)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrapes `target` (host:port) every second until the block is left."""
    program = shutil.which("prometheus")
    assert program is not None
    port = free_port()
    log_path = folder / "prometheus.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={write_configuration(folder, target)}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        prometheus = Prometheus(port)
        deadline = time.monotonic() + 30
        # Ready, and past the first scrape: it takes its time to read its list of targets, and a
        # rate needs a sample from before the load.
        while not (prometheus.is_ready() and prometheus.query("up == 1")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log_path.read_text(encoding="utf-8"))
            time.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
