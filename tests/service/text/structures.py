"""What structural tags mean, slowly: the ends of all texts of a format that begin at one place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema

Ends = set[int]


def satisfies(format: dict[str, Any], text: str) -> bool:
    """Whether `text` has the form."""
    return len(text) in ends(format, text, 0, ())


def ends(form: dict[str, Any], text: str, at: int, outer: tuple[str, ...]) -> Ends:
    """Where texts of `form` that begin at `at` can end; `outer` are the ends of the tag around."""
    rest = range(at, len(text) + 1)
    match form["type"]:
        case "const_string":
            return _literal(text, at, form["value"])
        case "regex":
            return {to for to in rest if re.fullmatch(form["pattern"], text[at:to])}
        case "json_schema":
            return {to for to in rest if _is_value(text[at:to], form["json_schema"])}
        case "any_text":
            bars = (*(form.get("excludes") or ()), *outer)
            return {to for to in rest if not any(bar in text[at:to] for bar in bars)}
        case "sequence":
            return _in_order(form["elements"], text, {at}, outer)
        case "or":
            return {to for x in form["elements"] for to in ends(x, text, at, outer)}
        case "optional":
            return {at} | ends(form["content"], text, at, outer)
        case "star":
            return _repeated(form["content"], text, at, outer)
        case "plus":
            first = ends(form["content"], text, at, outer)
            return {to for via in first for to in _repeated(form["content"], text, via, outer)}
        case "repeat":
            found, now = Ends(), {at}
            for count in range(form["max"] + 1):
                found |= now if count >= form["min"] else set()
                now = _in_order([form["content"]], text, now, outer)
            return found
        case "tag":
            return _tag(form, text, at)
        case "tags_with_separator":
            return _separated(form, text, at)
        case "triggered_tags":
            return _triggered(form, text, at, outer)
    raise AssertionError(form["type"])


def _literal(text: str, at: int, value: str) -> Ends:
    return {at + len(value)} if text.startswith(value, at) else set()


def _is_value(text: str, schema: Any) -> bool:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    # Nothing around it, whole numbers as digits, and no key twice: what a grammar lets through.
    return text == text.strip() and not re.search(r"\d[.eE]", text) and text.count('"a"') < 2


def _in_order(forms: Iterable[Any], text: str, starts: Ends, outer: tuple[str, ...]) -> Ends:
    for form in forms:
        starts = {to for at in starts for to in ends(form, text, at, outer)}
    return starts


def _repeated(form: Any, text: str, at: int, outer: tuple[str, ...]) -> Ends:
    found, new = {at}, {at}
    while new:
        new = _in_order([form], text, new, outer) - found
        found |= new
    return found


def _tag(form: dict[str, Any], text: str, at: int) -> Ends:
    closing = [form["end"]] if isinstance(form["end"], str) else form["end"]
    found = Ends()
    for begun in _literal(text, at, form["begin"]):
        if form["content"]["type"] == "any_text" and "" not in closing:
            bars = form["content"].get("excludes") or ()
            found |= set(_to_the_first(text, begun, closing, bars))
            continue
        for to in ends(form["content"], text, begun, tuple(filter(None, closing))):
            found |= {end for one in closing for end in _literal(text, to, one)}
    return found


def _to_the_first(text: str, at: int, closing: list[str], bars: Iterable[str]) -> Iterator[int]:
    """The end of the first of `closing` at or after `at`, if none of `bars` comes before."""
    for to in range(at, len(text) + 1):
        if any(text.endswith(bar, at, to) for bar in bars):
            return
        if any(text.endswith(one, at, to) for one in closing):
            yield to
            return


def _separated(form: dict[str, Any], text: str, at: int) -> Ends:
    one = {"type": "or", "elements": form["tags"]}
    found = ends(one, text, at, ())
    if not form.get("stop_after_first"):
        separator = {"type": "const_string", "value": form["separator"]}
        more = {"type": "sequence", "elements": [separator, one]}
        found = {to for via in found for to in _repeated(more, text, via, ())}
    return found | (set() if form.get("at_least_one") else {at})


def _triggered(form: dict[str, Any], text: str, at: int, outer: tuple[str, ...]) -> Ends:
    stops = [*form["triggers"], *(form.get("excludes") or ()), *outer]
    tags = {"type": "or", "elements": form["tags"]}

    def free(start: int) -> Ends:
        rest = range(start, len(text) + 1)
        return {to for to in rest if not any(stop in text[start:to] for stop in stops)}

    def after_text(start: int) -> Ends:
        """Text and a tag, whose trigger is the first there is."""
        found = Ends()
        for to in range(start, len(text) + 1):
            trigger = next((t for t in form["triggers"] if text.startswith(t, to)), None)
            if trigger and not any(s in text[start : to + len(trigger) - 1] for s in stops):
                found |= ends(tags, text, to, ())
        return found

    found = ends(tags, text, at, ()) if form.get("at_least_one") else {at}
    if form.get("stop_after_first"):
        return found if form.get("at_least_one") else free(at) | after_text(at)
    new = set(found)
    while new:
        new = {to for start in new for to in after_text(start)} - found
        found |= new
    return {to for start in found for to in free(start)}
