"""What reading one structural tag may cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from service.text.constraint import GrammarError

MAX_CHARS: Final = 4_000_000
"""Of grammars that are written on the way, each time they are: a text within the bounds of all
forms can ask for the square of its length, or for a part of it as often as it likes."""

MAX_S: Final = 2.0
"""CPU seconds. A thread cannot be stopped from outside, takes the interpreter from the event loop,
and there are few (`service.aside`)."""


class Effort:
    """Counts it for one tag, on the thread that made it."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._until = clock() + MAX_S
        self._chars = 0

    def spend(self, chars: int = 0) -> None:
        """So many characters were written. Raises GrammarError beyond the bounds."""
        self._chars += chars
        if self._chars > MAX_CHARS:
            raise GrammarError(f"makes a grammar of more than {MAX_CHARS} characters")
        if self._clock() > self._until:
            raise GrammarError(f"takes more than {MAX_S:g} s to read")
