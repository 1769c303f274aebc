"""The dashboard and the rules ask only for what the service offers. Runs without Prometheus."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.checkout import ROOT
from tests.deploy import queries
from tests.deploy.queries import Query

# What Prometheus adds to every series of a target.
TARGET_LABELS = {"job", "instance", "le"}


def everything_asked() -> list[Query]:
    selectors = queries.template_variables().items()
    return [
        *queries.panel_queries(),
        *queries.annotation_queries(),
        *queries.rule_queries(),
        *(Query(f"variable {name}", selector) for name, (selector, _) in selectors),
    ]


def unknown(query: Query) -> list[str]:
    """Metrics, labels and label values in `query` that the service never exports."""
    offered = queries.offered_samples()
    found = []
    labels = set(TARGET_LABELS)
    for name, matchers in queries.SELECTOR.findall(query.expr):
        if name not in offered:
            found.append(f"{query.where}: no metric {name}")
            continue
        own = {label for sample in offered[name] for label in sample}
        labels |= own
        for label, operator, value in queries.MATCHER.findall(matchers):
            if label in TARGET_LABELS:
                continue
            if label not in own:
                found.append(f"{query.where}: {name} has no label {label}")
            elif operator == "=" and all(sample.get(label) != value for sample in offered[name]):
                found.append(f"{query.where}: {name} never has {label}={value}")
    grouped = {
        label.strip()
        for group in queries.GROUPING.findall(query.expr)
        for label in group.split(",")
        if label.strip()
    }
    found += [f"{query.where}: groups by unknown {label}" for label in grouped - labels]
    return found


def test_everything_asked_for_is_offered() -> None:
    recorded = {rule["record"] for rule in queries.rules() if "record" in rule}
    for query in everything_asked():
        assert unknown(Query(query.where, without_recorded(query.expr, recorded))) == []


def without_recorded(expr: str, recorded: set[str]) -> str:
    """With the names that our own recording rules make taken out; any other one stays."""
    for name in recorded:
        expr = expr.replace(name, "recorded")
    assert not re.search(r"\w:selfdraft_", expr), f"no rule records what is asked for in: {expr}"
    return expr


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum(rate(selfdraft_generated_total[5m]))", "no metric selfdraft_generated_total"),
        ('selfdraft_requests_refused_total{cause="x"}', "no label cause"),
        ('selfdraft_requests_refused_total{reason="queue_full"}', "never has reason=queue_full"),
        ("sum by (pos) (selfdraft_kv_pages)", "groups by unknown pos"),
    ],
)
def test_what_is_not_offered_is_seen(expr: str, complaint: str) -> None:
    assert any(complaint in line for line in unknown(Query("planted", expr)))


def test_what_is_offered_is_shown() -> None:
    """A metric nobody looks at is either superfluous or missing from the dashboard."""
    shown = " ".join(query.expr for query in everything_asked())
    families = {re.sub(r"_(bucket|sum|count|created)$", "", n) for n in queries.offered_samples()}
    hidden = {name for name in families if name not in shown}
    # The peak is in the log line at shutdown; admissions are the sum of what is shown.
    # The process_* metrics are what dashboards of processes show.
    ours = {name for name in hidden if not name.startswith("process_")}
    assert ours <= {"selfdraft_kv_pages_peak", "selfdraft_requests_admitted_total"}


def test_panels_are_whole() -> None:
    board = queries.dashboard()
    assert board["uid"] == "selfdraft"
    assert board["id"] is None, "an id belongs to one Grafana's database"
    assert board["schemaVersion"] >= 38, "Grafana 10"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in queries.panels():
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in queries.dashboard()["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        for x in range(box["x"], box["x"] + box["w"]):
            for y in range(box["y"], box["y"] + box["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_variables_are_known() -> None:
    names = {variable["name"] for variable in queries.dashboard()["templating"]["list"]}
    builtin = {"__rate_interval"}
    for query in everything_asked():
        assert set(re.findall(r"\$\{?(\w+)", query.expr)) <= names | builtin, query.where


def test_every_series_query_obeys_the_server_variable() -> None:
    for query in queries.panel_queries():
        for name, matchers in queries.SELECTOR.findall(query.expr):
            assert 'instance=~"$instance"' in matchers, f"{query.where}: {name}"


def test_provisioning_names_the_dashboard() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())
    provider = yaml.safe_load((folder / "dashboards" / "selfdraft.yml").read_text())
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"
    # $__rate_interval is derived from it: a wrong one makes every rate empty.
    interval = scrape["global"]["scrape_interval"]
    assert source["datasources"][0]["jsonData"]["timeInterval"] == interval
    assert provider["providers"][0]["type"] == "file"
    # As Grafana writes it, so that an export from Grafana makes a small diff.
    text = queries.DASHBOARD.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
