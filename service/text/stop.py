"""Stop strings, matched on text and not on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a piece of text led to."""

    text: str
    """Text that may be sent."""
    matched: str | None = None
    """The stop string that ended the text; nothing may be fed afterwards."""


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces of any size.

    Of several matches the one that ends first counts, and of those that end together the longest,
    so the outcome does not depend on how the text was cut. Text is held back exactly while it could
    be the start of a match. Work is constant per character and stop string (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` keeps the matched string at the end of the text. Raises ValueError when a stop
        string is empty."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        # Longest first: of matches that end together, the first found is the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Takes the next piece of text."""
        if not self._stops:
            return StopMatch(text)
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            if (stop := self._advance(pending[index])) is not None:
                end = index + 1
                self._held = ""
                return StopMatch(pending[: end if self._include else end - len(stop)], stop)
        cut = len(pending) - max(self._states)
        self._held = pending[cut:]
        return StopMatch(pending[:cut])

    def finish(self) -> str:
        """The text still held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        matched = None
        for n, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[n]
            while state and stop[state] != character:
                state = table[state]
            if stop[state] == character:
                state += 1
            self._states[n] = state
            if state == len(stop):
                matched = matched or stop
                self._states[n] = table[state]
        return matched


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
