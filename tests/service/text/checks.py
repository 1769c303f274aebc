"""What must hold of streamed text, as functions a wrong implementation can be put through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Streamer(Protocol):
    def feed(self, token: int) -> str: ...

    def finish(self) -> str: ...


def check_stream(
    make: Callable[[Sequence[int]], Streamer],
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    prompt: Sequence[int] = (),
) -> None:
    """Deltas join to the whole; what was sent is never taken back, and no delta ends inside a
    character that later tokens complete. Raises AssertionError."""
    stream = make(prompt)
    sent = ""
    whole = decode([*prompt, *ids])
    start = len(decode(prompt))
    for token in ids:
        sent += stream.feed(token)
        assert whole[start : start + len(sent)] == sent, (sent, whole[start:])
    sent += stream.finish()
    assert sent == whole[start:]


class Matcher(Protocol):
    """(text, matched) for each piece."""

    def feed(self, text: str) -> tuple[str, str | None]: ...

    def finish(self) -> str: ...


def reference_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """What is shown of a whole text, by looking at it one character at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held_back(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that could still become a stop string."""
    for length in range(len(text), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) and stop != end for stop in stops):
            return end
    return ""


def check_stops(
    make: Callable[[Sequence[str], bool], Matcher],
    pieces: Sequence[str],
    stops: Sequence[str],
    include: bool,
) -> None:
    """The outcome is that of the whole text however it is cut, and no more is held back than must
    be. Raises AssertionError."""
    matcher = make(stops, include)
    shown, seen, matched = "", "", None
    expected, expected_stop = reference_stop("".join(pieces), stops, include)
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown, seen = shown + text, seen + piece
        if matched is not None:
            break
        assert seen[len(shown) :] == held_back(seen, stops)
    if matched is None:
        shown += matcher.finish()
    assert (shown, matched) == (expected, expected_stop)
