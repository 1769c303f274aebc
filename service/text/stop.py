"""Stop strings, matched on text and not on tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What a piece of text led to."""

    text: str
    """Text that may be sent."""
    matched: str | None = None
    """The stop string that ended the text; nothing may be fed afterwards."""


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces of any size.

    Of several matches the one that ends first counts, and of those that end together the longest,
    so the outcome does not depend on how the text was cut. Text is held back exactly while it could
    be the start of a match. Work is constant per character and stop string (Knuth-Morris-Pratt);
    where none has begun, it is one search for their first characters.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` keeps the matched string at the end of the text. Raises ValueError when a stop
        string is empty."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        # Longest first: of matches that end together, the first found is the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._starts: dict[str, list[int]] = {}
        for n, stop in enumerate(self._stops):
            self._starts.setdefault(stop[0], []).append(n)
        any_start = "|".join(map(re.escape, self._starts))
        self._next_start = re.compile(any_start, re.DOTALL).search
        self._begun: dict[int, int] = {}
        """Characters seen of each stop string of which any are."""
        self._include = include
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Takes the next piece of text."""
        if not self._stops:
            return StopMatch(text)
        pending = self._held + text
        index = len(self._held)
        while index < len(pending):
            if not self._begun:
                if (start := self._next_start(pending, index)) is None:
                    break
                index = start.start()
            stop = self._advance(pending[index])
            index += 1
            if stop is not None:
                self._held = ""
                return StopMatch(pending[: index if self._include else index - len(stop)], stop)
        cut = len(pending) - max(self._begun.values(), default=0)
        self._held = pending[cut:]
        return StopMatch(pending[:cut])

    def finish(self) -> str:
        """The text still held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        begun: dict[int, int] = {}
        for n, state in self._begun.items():
            stop, table = self._stops[n], self._tables[n]
            while state and stop[state] != character:
                state = table[state]
            if stop[state] == character:
                begun[n] = state + 1
        for n in self._starts.get(character, ()):
            begun.setdefault(n, 1)
        self._begun = begun
        ended = [n for n, state in begun.items() if state == len(self._stops[n])]
        return self._stops[min(ended)] if ended else None


def _failure_table(stop: str) -> list[int]:
    """[n]: length of the longest proper prefix of `stop` that also ends stop[:n]."""
    table = [0] * (len(stop) + 1)
    length = 0
    for n in range(1, len(stop)):
        while length and stop[n] != stop[length]:
            length = table[length]
        if stop[n] == stop[length]:
            length += 1
        table[n + 1] = length
    return table
