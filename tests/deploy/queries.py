"""Every query that deploy/ asks of Prometheus, and the metrics that the service offers to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

import yaml

from engine.plan import EngineInfo
from scheduler.statistics import Statistics
from service.metrics import Metrics
from tests.checkout import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "selfdraft.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"

# `label="value"`, with any of the four operators.
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
# A raw metric with its matchers. What a recording rule made has colons and is not one.
SELECTOR = re.compile(r"(?<![\w:])(selfdraft_\w+)(?![\w:])(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Query:
    """One PromQL expression and where it stands."""

    where: str
    expr: str

    def filled(self, variables: Mapping[str, str]) -> str:
        """With Grafana's `$name` and `${name}` replaced. Raises KeyError for one not given."""
        return re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], self.expr)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panels() -> Iterator[dict[str, Any]]:
    """Panels that show something, also those inside collapsed rows."""
    for panel in dashboard()["panels"]:
        yield from panel.get("panels", []) if panel["type"] == "row" else [panel]


def panel_queries() -> list[Query]:
    return [
        Query(f"{panel['title']}/{target['refId']}", target["expr"])
        for panel in panels()
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Query]:
    items = dashboard()["annotations"]["list"]
    return [Query(f"annotation {item['name']}", item["expr"]) for item in items if "expr" in item]


def template_variables() -> dict[str, tuple[str, str]]:
    """Variables that ask Prometheus: name -> (selector, label) of `label_values(…)`."""
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match, variable["name"]
            found[variable["name"]] = (match[1], match[2])
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [Query(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


def _filler(annotation: str) -> Any:
    if annotation.startswith("tuple"):
        return (0,)
    return {} if annotation.startswith("Mapping") else 0


def needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def offered_samples() -> dict[str, list[Mapping[str, str]]]:
    """What a server that has loaded a model exports: sample name -> the label sets it has."""
    statistics = Statistics(**{f.name: _filler(str(f.type)) for f in fields(Statistics)})
    text: dict[str, Any] = {"str": "x", "int": 1, "tuple[str, ...]": ()}
    info = EngineInfo(**{f.name: text[str(f.type)] for f in fields(EngineInfo) if needed(f)})
    metrics = Metrics(lambda: statistics, version="0")
    metrics.model_loaded(info, "model")
    metrics.call_began("Inference/Generate")
    metrics.call_ended("Inference/Generate", "OK", None)
    offered: dict[str, list[Mapping[str, str]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            offered.setdefault(sample.name, []).append(sample.labels)
    return offered
