"""JSON schemas on their way to llguidance."""

from __future__ import annotations

import json
from typing import Any, Final

from service.text.constraint import GrammarError, one_line

MAX_SPACE: Final = 20
"""Characters of white space between two parts of a value: a line's end and nine levels of
indentation."""


def with_bounded_space(text: str) -> str:
    """A schema that says how much white space may stand between the parts of a value: small models
    fall for it and write nothing else until their tokens are used up."""
    schema = json.loads(text)
    if schema is True:
        text, schema = "{}", {}
    if schema is False or "x-guidance" in schema:
        return text
    options = json.dumps({"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{MAX_SPACE}}}"})
    comma = "," if schema else ""
    return f'{{"x-guidance": {options}{comma}{text.strip()[1:]}'


def read_json(text: str, max_depth: int) -> Any:
    """The value. Raises GrammarError unless `text` is JSON, nested at most so deep."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"is not JSON: {one_line(str(error))}") from None
    except RecursionError:
        raise GrammarError(f"nested at most {max_depth} deep") from None
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [x for p in parts for x in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return value
    raise GrammarError(f"nested at most {max_depth} deep")


def check_schema(text: str, max_depth: int) -> None:
    """Raises GrammarError unless `text` is a JSON object or boolean, nested at most so deep."""
    schema = read_json(text, max_depth)
    if not isinstance(schema, dict | bool):
        raise GrammarError("must be a JSON object")
