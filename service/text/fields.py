"""Objects of a JSON text, read field by field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from service.text.constraint import GrammarError
from service.text.parts import BorderError


class Fields:
    """One object of a structural tag, read by name; what nobody read is an error."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise GrammarError("must be an object", path)
        self._value = value
        self._read = {"type"}
        self.path = path

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def need(self, name: str) -> Any:
        """Required."""
        self._read.add(name)
        if not self.has(name):
            raise GrammarError("must be set", self.at(name))
        return self._value[name]

    def text(self, name: str, *, empty: bool = False) -> str:
        return read_text(self.need(name), self.at(name), empty=empty)

    def texts(self, name: str) -> list[str]:
        """Absent: none."""
        return [read_text(x, f"{self.at(name)}[{n}]") for n, x in enumerate(self.values(name))]

    def flag(self, name: str, default: bool = False) -> bool:
        self._read.add(name)
        value = self._value.get(name, default)
        if not isinstance(value, bool):
            raise GrammarError("must be true or false", self.at(name))
        return value

    def count(self, name: str, least: int, most: int) -> int:
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise GrammarError(f"must be a whole number, {least} … {most}", self.at(name))
        return value

    def values(self, name: str) -> list[Any]:
        """Absent: empty."""
        self._read.add(name)
        value = self._value.get(name) or []
        if not isinstance(value, list):
            raise GrammarError("must be a list", self.at(name))
        return value

    def some(self, name: str) -> list[tuple[Any, str]]:
        """At least one, each with its path."""
        values = self.values(name)
        if not values:
            raise GrammarError("must hold at least one", self.at(name))
        return [(value, f"{self.at(name)}[{n}]") for n, value in enumerate(values)]

    def skip(self, name: str) -> None:
        """It may be there, and asks for nothing."""
        self._read.add(name)

    def done(self) -> None:
        """Raises GrammarError for a field that this form of it does not have, or that is not
        supported. One that is null is absent."""
        for name, value in self._value.items():
            if name not in self._read and value is not None:
                raise GrammarError("is not supported", self.at(name))


def read_text(value: Any, path: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise GrammarError("must be a text" if empty else "must be a text, not empty", path)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise GrammarError("holds half a character", path) from None
    return value


@contextmanager
def located(path: str) -> Iterator[None]:
    """Says of an error of parts where in the structural tag it is. Raises GrammarError for it."""
    try:
        yield
    except BorderError as error:
        raise GrammarError(str(error), path) from None
