"""Work that is too long for the event loop, which streams for everybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")

LARGE: Final = 2_000
"""Characters, bytes or tokens from which on work goes aside: some two milliseconds. Below, a thread
would cost more than it saves."""

AT_ONCE: Final = 4
"""Threads of this kind. Those that run Python take turns with the event loop, 5 ms each, so more of
them would hold it up as surely as the work itself; tokenizing needs a core each."""

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("limiter of work aside")


async def aside(function: Callable[[], T], slow: bool) -> T:
    """Runs `function`, on a thread when it is slow. A cancelled caller does not wait for it."""
    if not slow:
        return function()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(AT_ONCE)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)
