"""Reading a structural tag costs a bounded amount of time and memory, whatever it asks for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from service.text import effort
from service.text.constraint import GrammarError
from service.text.effort import Effort
from service.text.structural_tag import structural_lark


def read(form: Any) -> str:
    return structural_lark(
        json.dumps({"format": form}), ids={}, end_names=frozenset(), max_depth=64, tail=""
    )


def triggered(count: int) -> Any:
    """A text up to each trigger must hold none of the others."""
    names = [f"<f{n}>" for n in range(count)]
    tags = [{"begin": name, "content": {"type": "any_text"}, "end": "</f>"} for name in names]
    return {"type": "triggered_tags", "triggers": names, "tags": tags}


def shared(properties: int, chars: int) -> Any:
    """Each value carries the definitions that all share."""
    schema = {
        "$defs": {"d": {"enum": ["x" * chars]}},
        "properties": {f"p{n}": {"type": "integer"} for n in range(properties)},
    }
    return {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}


def check_size() -> None:
    with pytest.raises(GrammarError, match="more than 4000000 characters"):
        read(shared(1000, 5000))


def check_time() -> None:
    began = time.thread_time()
    with pytest.raises(GrammarError, match=r"more than 0\.05 s to read"):
        read(triggered(220))
    assert time.thread_time() - began < 0.5


def test_its_grammar_is_bounded() -> None:
    check_size()


def test_its_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "MAX_S", 0.05)
    check_time()


def test_an_effort_without_bounds_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation."""
    monkeypatch.setattr(effort, "MAX_S", 0.05)
    monkeypatch.setattr(Effort, "spend", lambda self, chars=0: None)
    for check in (check_size, check_time):
        with pytest.raises(pytest.fail.Exception):
            check()


def test_hundreds_of_tools_are_well_within_it() -> None:
    schema = {
        "type": "object",
        "properties": {f"field_{n}": {"type": "string", "description": "x" * 40} for n in range(8)},
    }
    tags = [
        {
            "begin": f"<function=tool_{n}>",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "</function>",
        }
        for n in range(170)
    ]
    form = {"type": "triggered_tags", "triggers": ["<function="], "tags": tags}
    assert len(json.dumps(form)) > 120_000
    assert len(read(form)) < effort.MAX_CHARS / 4
    assert read(shared(60, 2000))
