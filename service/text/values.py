"""Values in a structural tag: JSON, and the parameters of a call as Qwen's models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from service.text import parts
from service.text.constraint import GrammarError
from service.text.fields import Fields, located, read_text
from service.text.parts import Part, Writer
from service.text.schema import MAX_SPACE

_PARAMETER_END: Final = "</parameter>"
_ANNOTATIONS: Final = ("title", "description", "default", "examples", "$schema", "$comment")
_DIGITS: Final = "0123456789"
_NUMBER_GOES_ON: Final = _DIGITS + ".eE+-"
_STARTS: Final = {
    "object": "{",
    "array": "[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "integer": "-" + _DIGITS,
    "number": "-" + _DIGITS,
}


def json_value(schema: Any, path: str) -> Part:
    """A JSON value."""
    if not isinstance(schema, dict | bool):
        raise GrammarError("must be a JSON schema", path)
    kinds = _kinds(schema)
    goes_on = _NUMBER_GOES_ON if {"integer", "number"} & kinds else ""
    starts = "".join(sorted({char for kind in kinds for char in _STARTS[kind]}))
    return parts.value(schema, starts, goes_on)


class Parameters:
    """Reads schemas of parameters: texts as they are, anything else as JSON."""

    def __init__(self, writer: Writer, literal: Callable[[str, str], Part]) -> None:
        """`literal` makes a part of a text at a path."""
        self._writer = writer
        self._literal = literal

    def part(self, schema: Any, path: str) -> Part:
        """`<parameter=key>value</parameter>` for each property, in the schema's order."""
        demands = Fields(schema, path)
        properties, required = _properties(demands)
        space = parts.regex("[ \t\n]", f"/[ \\t\\n]{{0,{MAX_SPACE}}}/")
        found = [space]
        for name, value, at in properties:
            begin = self._literal(f"<parameter={name}>", at)
            with located(at):
                body = self._value(value, at, demands, space)
                one = self._writer.spent(self._writer.sequence([begin, body, space]))
                found.append(one if name in required else self._writer.repeat(one, 0, 1))
        demands.done()
        with located(path):
            return self._writer.sequence(found)

    def _value(self, schema: Any, path: str, root: Fields, space: Part) -> Part:
        """A value with its closing tag: a text as it is, anything else as JSON."""
        if not isinstance(schema, dict):
            raise GrammarError("must be a JSON schema that is an object", path)
        kinds = _kinds(schema)
        if "string" not in kinds:
            shared = {name: root.need(name) for name in ("$defs", "definitions") if root.has(name)}
            close = parts.literal(_PARAMETER_END)
            return self._writer.sequence(
                [space, json_value({**shared, **schema}, path), space, close]
            )
        if schema.get("type") != "string" and kinds != {"string"}:
            raise GrammarError("must say that it is a text, or that it is none", path)
        given = Fields(schema, path)
        for name in _ANNOTATIONS:
            given.skip(name)
        if not given.has("enum"):
            given.done()
            return parts.until([_PARAMETER_END])
        texts = [read_text(x, at, empty=True) for x, at in given.some("enum")]
        given.done()
        alternatives = [parts.literal(f"{text}{_PARAMETER_END}") for text in texts]
        return self._writer.either(alternatives)


def _kinds(schema: Any) -> set[str]:
    """Types that a value of it may have, or more."""
    if not isinstance(schema, dict):
        return set(_STARTS)
    if isinstance(schema.get("enum"), list):
        return {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    kinds = schema.get("type", list(_STARTS))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    known = {kind for kind in kinds if isinstance(kind, str) and kind in _STARTS}
    return known or set(_STARTS)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _properties(schema: Fields) -> tuple[list[tuple[str, Any, str]], set[str]]:
    """Of a schema of parameters: each with its name and path, and the names of those required."""
    for name in (*_ANNOTATIONS, "$defs", "definitions"):
        schema.skip(name)
    if schema.has("type") and schema.text("type") != "object":
        raise GrammarError('must be "object"', schema.at("type"))
    if schema.flag("additionalProperties"):
        raise GrammarError(
            "is not supported: must be absent or false", schema.at("additionalProperties")
        )
    properties = schema.need("properties") if schema.has("properties") else {}
    if not isinstance(properties, dict):
        raise GrammarError("must be an object", schema.at("properties"))
    required = set(schema.texts("required"))
    if foreign := required - properties.keys():
        raise GrammarError(f"{min(foreign)!r:.40} is no property", schema.at("required"))
    path = schema.at("properties")
    found = [(name, value, f"{path}.{name}") for name, value in properties.items()]
    for name, _, at in found:
        read_text(name, at, empty=True)
    return found, required
