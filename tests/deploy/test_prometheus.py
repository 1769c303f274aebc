"""The dashboard, the rules and the alerts against a real Prometheus that scraped a real server.

A server runs under load, Prometheus scrapes it with deploy/'s own configuration, and then every
query that deploy/ ships is asked. Totals must be what the clients counted.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
from selfdraft.client import Client

from tests.deploy import load, queries
from tests.deploy.load import Ledger
from tests.deploy.prometheus import Prometheus, running_prometheus
from tests.deploy.queries import Query
from tests.deploy.server import MAX_QUEUE, MAX_ROWS, running_server

MISSING = [name for name in ("prometheus", "promtool") if not shutil.which(name)]
pytestmark = [
    pytest.mark.needs_prometheus,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"not on PATH: {', '.join(MISSING)} (Debian: apt-get install prometheus)",
    ),
]

CANCELLED_TOKENS = 400


@dataclass(frozen=True)
class Observed:
    """What was left when the load was over."""

    prometheus: Prometheus
    ledger: Ledger
    """Of everything that ran to its end or was refused."""
    settled_at: float
    """When Prometheus had seen all of `ledger`, and nothing else had run yet."""
    seen_of_cancelled: int
    """Tokens the client read of requests that were cancelled after `settled_at`."""
    cancelled_at: float
    """When Prometheus had seen those too."""
    page: str
    """What the server shows, at the end."""

    def total(self, expr: str) -> float:
        return self.prometheus.total(expr, at=self.settled_at)

    def variables(self) -> dict[str, str]:
        """What Grafana would put in for its variables, "All" chosen."""
        chosen = {
            name: "|".join(self.prometheus.label_values(selector.replace("$job", ".*"), label))
            for name, (selector, label) in queries.template_variables().items()
        }
        return chosen | {"__rate_interval": "30s"}


async def drive(target: str, ledger: Ledger) -> None:
    """Several seconds of everything: steady sessions, a flood, a request that cannot run.

    Timed, not counted: all of it must fit the server's 60-second window of acceptance.
    """
    async with Client(target, retry=None) as client:
        await load.steady(client, ledger, sessions=MAX_ROWS + 2, seconds=4, tokens=24)
        await load.flood(client, ledger, requests=MAX_ROWS + MAX_QUEUE + 6, tokens=16)
        await load.refused(client, ledger)
        await load.steady(client, ledger, sessions=MAX_ROWS, seconds=2, tokens=40)


async def leave(target: str, ledger: Ledger) -> int:
    """Requests that do not end well; returns the tokens they brought."""
    async with Client(target, retry=None) as client:
        seen = await load.cancelled(client, ledger, tokens=CANCELLED_TOKENS)
        return seen + await load.aborted(client, ledger, tokens=CANCELLED_TOKENS)


def settled(prometheus: Prometheus, ends: int) -> float:
    """Waits until Prometheus knows of `ends` ended requests and none running: the time then."""
    deadline = time.monotonic() + 20
    ended = "selfdraft_request_success_total) + sum(selfdraft_requests_cancelled_total"
    live = "selfdraft_requests_running) + sum(selfdraft_requests_waiting"
    while (prometheus.total(ended), prometheus.total(live)) != (ends, 0):
        assert time.monotonic() < deadline, (prometheus.total(ended), ends)
        time.sleep(0.25)
    # Two evaluations more, so that the recording rules have seen it as well.
    time.sleep(2.5)
    return time.time()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with (
        running_server() as addresses,
        running_prometheus(folder, addresses.metrics) as prometheus,
    ):
        ledger = Ledger()
        asyncio.run(drive(addresses.grpc, ledger))
        settled_at = settled(prometheus, ledger.finished.total())
        before = deepcopy(ledger)
        seen = asyncio.run(leave(addresses.grpc, ledger))
        ends = ledger.finished.total() + ledger.cancelled.total()
        cancelled_at = settled(prometheus, ends)
        with urllib.request.urlopen(f"http://{addresses.metrics}/metrics", timeout=10) as answer:
            page: str = answer.read().decode()
        yield Observed(prometheus, before, settled_at, seen, cancelled_at, page)


def assert_data(observed: Observed, query: Query) -> None:
    samples = observed.prometheus.query(query.filled(observed.variables()), at=observed.settled_at)
    assert samples, f"{query.where}: no data for {query.expr}"
    for sample in samples:
        assert math.isfinite(sample.value), f"{query.where}: {sample}"


def test_the_load_was_of_every_kind(observed: Observed) -> None:
    ledger = observed.ledger
    assert ledger.finished["length"] > 0
    assert ledger.refused["QUEUE_FULL"] > 0
    assert ledger.refused["INVALID_ARGUMENT"] == 1
    assert ledger.drafted > ledger.accepted > 0


@pytest.mark.parametrize("query", queries.panel_queries(), ids=lambda query: query.where)
def test_every_panel_shows_something(observed: Observed, query: Query) -> None:
    assert_data(observed, query)


@pytest.mark.parametrize("name", list(queries.template_variables()))
def test_every_variable_has_values(observed: Observed, name: str) -> None:
    assert observed.variables()[name]


@pytest.mark.parametrize("query", queries.annotation_queries(), ids=lambda query: query.where)
def test_annotations_are_valid(observed: Observed, query: Query) -> None:
    """Empty is right where no alert fires."""
    observed.prometheus.query(query.filled(observed.variables()), at=observed.settled_at)


def test_rules_are_healthy(observed: Observed) -> None:
    loaded = {rule["name"]: rule for rule in observed.prometheus.rules()}
    assert set(loaded) == {query.where for query in queries.rule_queries()}
    for rule in loaded.values():
        assert rule["health"] == "ok", rule


RECORDED = [rule["record"] for rule in queries.rules() if "record" in rule]
ALERTS = [Query(rule["alert"], rule["expr"]) for rule in queries.rules() if "alert" in rule]


@pytest.mark.parametrize("name", RECORDED)
def test_every_recording_rule_recorded(observed: Observed, name: str) -> None:
    assert_data(observed, Query(name, name))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.where)
def test_every_alert_looks_at_data(observed: Observed, alert: Query) -> None:
    """Its condition may be false; what it looks at must exist, or it could never be true."""
    observed.prometheus.query(alert.expr, at=observed.settled_at)
    looked_at = [f"{name}{{{matchers}}}" for name, matchers in queries.SELECTOR.findall(alert.expr)]
    looked_at += [name for name in RECORDED if name in alert.expr]
    looked_at += ['up{job="selfdraft"}'] if "up{" in alert.expr else []
    assert looked_at
    for selector in looked_at:
        assert_data(observed, Query(alert.where, selector))


def test_nothing_critical_fired(observed: Observed) -> None:
    critical = 'ALERTS{severity="critical", alertstate="firing"}'
    assert observed.prometheus.query(critical, at=observed.cancelled_at) == []


def test_totals_are_what_the_clients_counted(observed: Observed) -> None:
    ledger = observed.ledger
    assert observed.total("selfdraft_prompt_tokens_total") == ledger.prompt_tokens
    assert observed.total("selfdraft_generation_tokens_total") == ledger.completion_tokens
    assert observed.total("selfdraft_spec_decode_draft_tokens_total") == ledger.drafted
    assert observed.total("selfdraft_spec_decode_accepted_tokens_total") == ledger.accepted
    for reason, count in ledger.finished.items():
        series = f'selfdraft_request_success_total{{finish_reason="{reason}"}}'
        assert observed.total(series) == count
    for reason, count in ledger.refused.items():
        assert observed.total(f'selfdraft_requests_refused_total{{reason="{reason}"}}') == count
    assert observed.total("selfdraft_requests_refused_total") == ledger.refused.total()
    assert observed.total("selfdraft_requests_admitted_total") == ledger.finished.total()


def test_positions_are_what_the_clients_counted(observed: Observed) -> None:
    for kind, counts in (
        ("draft", observed.ledger.drafted_per_position),
        ("accepted", observed.ledger.accepted_per_position),
    ):
        metric = f"selfdraft_spec_decode_{kind}_tokens_per_pos_total"
        scraped = {
            int(sample.labels["position"]): sample.value
            for sample in observed.prometheus.query(metric, at=observed.settled_at)
        }
        assert {position: n for position, n in scraped.items() if n} == dict(+counts)


def test_latencies_were_observed_once_each(observed: Observed) -> None:
    ledger = observed.ledger
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        count = observed.total(f"selfdraft_{histogram}_seconds_count")
        assert count == ledger.finished.total(), histogram
    between = ledger.completion_tokens - ledger.first_burst_tokens
    assert observed.total("selfdraft_inter_token_latency_seconds_count") == between


def test_promtool_finds_nothing_to_say_of_the_page(observed: Observed) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=observed.page,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_only_a_real_model_has(observed: Observed) -> None:
    for phase in ("tokenizer", "model", "warm_up"):
        assert observed.total(f'selfdraft_load_seconds{{phase="{phase}"}}') > 0, phase
    for part in ("weights", "kv_pool", "rows", "reserve"):
        assert observed.total(f'selfdraft_memory_planned_bytes{{part="{part}"}}') > 0, part
    active = observed.total('selfdraft_device_memory_bytes{kind="active"}')
    assert 0 < active <= observed.total('selfdraft_device_memory_bytes{kind="peak"}')
    assert active >= observed.total('selfdraft_memory_planned_bytes{part="kv_pool"}')
    assert observed.total('selfdraft_mtp_gate{result="passed"}') == 1
    assert 0.25 < observed.total("selfdraft_mtp_gate_acceptance_ratio") <= 1


def test_the_acceptance_shown_is_the_clients(observed: Observed) -> None:
    (shown,) = observed.prometheus.query(
        "selfdraft_spec_decode_acceptance_rate", at=observed.settled_at
    )
    assert shown.value == pytest.approx(observed.ledger.accepted / observed.ledger.drafted)


def test_cancelled_requests_are_counted_by_reason(observed: Observed) -> None:
    at = observed.cancelled_at
    for reason in ("cancelled", "aborted"):
        series = f'selfdraft_requests_cancelled_total{{reason="{reason}"}}'
        assert observed.prometheus.total(series, at=at) == 1
    generated = observed.prometheus.total("selfdraft_generation_tokens_total", at=at)
    extra = generated - observed.ledger.completion_tokens
    assert observed.seen_of_cancelled <= extra < 2 * CANCELLED_TOKENS
    used, cached = (
        observed.prometheus.total(f"selfdraft_kv_pages_{kind}", at=at)
        for kind in ("used", "cached")
    )
    assert used == cached  # what is left belongs to kept prefixes
