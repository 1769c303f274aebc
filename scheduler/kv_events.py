"""Which KV blocks are kept, as a log: for routers that send a prompt to where its prefix is.

A *block* is one whole page of a kept prefix, named by the chained hash of the tokens up to its end
(see `scheduler.prefix`). It is *stored* when the first entry holds it and *removed* when the last
one goes, so a block is never stored twice. A hybrid model starts only at saved boundaries: what the
log says is the most a prompt can find here, not a promise.

The log is bounded in events and in tokens. A reader keeps the number of the last event it took; one
that falls behind the log is told so and starts over from the blocks that are live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A chain of blocks, each the child of the one before."""

    parent: bytes | None
    """Hash of the block before the first one; None when that one begins a prompt."""
    hashes: tuple[bytes, ...]
    tokens: NDArray[np.int32]
    """Of all blocks, in order: as many per block as a page has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks that are gone, the last of a chain first."""

    hashes: tuple[bytes, ...]


KvEvent = Stored | Removed


def chain(hashes: Sequence[bytes], tokens: NDArray[np.int32], known: int, page: int) -> Stored:
    """The blocks of an entry after the first `known`, of which there is at least one. `hashes[n]`
    is that of the first n pages; `page` is tokens per page."""
    return Stored(
        parent=hashes[known] if known else None,
        hashes=tuple(hashes[known + 1 :]),
        tokens=tokens[known * page : (len(hashes) - 1) * page].copy(),
    )


def live_chains(
    entries: Iterable[tuple[Sequence[bytes], NDArray[np.int32]]], page: int
) -> Iterator[Stored]:
    """Every block of `entries` (their hashes and tokens) once, parents before children."""
    seen: set[bytes] = set()
    for hashes, tokens in entries:
        known = 0
        while known + 1 < len(hashes) and hashes[known + 1] in seen:
            known += 1
        if known + 1 < len(hashes):
            seen.update(hashes[known + 1 :])
            yield chain(hashes, tokens, known, page)


class KvEventLog:
    """The newest events, numbered from 1 without a gap."""

    def __init__(self, *, max_events: int = 4096, max_tokens: int = 1 << 20) -> None:
        """At least the newest event is kept, whatever `max_tokens`, the bound on their tokens."""
        self.newest = 0
        """Number of the newest event; 0 before the first."""
        self._max_events = max_events
        self._max_tokens = max_tokens
        self._events: deque[KvEvent] = deque()
        self._tokens = 0

    def record(self, event: KvEvent) -> None:
        """The next event."""
        self.newest += 1
        self._events.append(event)
        self._tokens += _size(event)
        while len(self._events) > 1 and (
            len(self._events) > self._max_events or self._tokens > self._max_tokens
        ):
            self._tokens -= _size(self._events.popleft())

    def since(self, number: int) -> list[KvEvent] | None:
        """The events after `number`, oldest first; None when some of them are gone, or when there
        has been no event of that number."""
        behind = self.newest - number
        if not 0 <= behind <= len(self._events):
            return None
        return [
            self._events[index] for index in range(len(self._events) - behind, len(self._events))
        ]


def _size(event: KvEvent) -> int:
    return len(event.tokens) if isinstance(event, Stored) else 0
