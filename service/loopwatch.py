"""Whether the event loop keeps up: everything of the service but the engine's steps runs on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from service.logs import Logger, report_suppressed
from service.metrics import Metrics

INTERVAL_S: Final = 0.25
SLOW_S: Final = 1.0
"""A lag that gets a line in the log: as long as no stream got a token and no probe an answer."""
QUIET_S: Final = 10.0
"""Such lines are this far apart."""


class LoopWatch:
    """Asks the loop to be woken every `INTERVAL_S` and sees how late it comes. `clock` gives
    seconds, on any thread."""

    def __init__(
        self, metrics: Metrics, logger: Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._due: float | None = None
        self._said = -QUIET_S
        self._reported = clock()
        metrics.facts.stalled_s = self.stalled_s

    def stalled_s(self) -> float:
        """How long the loop is overdue now. For the exporter's threads: they still run when the
        loop does not."""
        due = self._due
        return 0.0 if due is None else max(self._clock() - due, 0.0)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._due = self._clock() + INTERVAL_S
                await asyncio.sleep(INTERVAL_S)
                self._woken(max(self._clock() - self._due, 0.0))
        finally:
            self._due = None

    def _woken(self, lag: float) -> None:
        self._metrics.loop_lagged(lag)
        now = self._clock()
        if lag >= SLOW_S and now - self._said >= QUIET_S:
            self._said = now
            self._logger.warning("slow event loop", lag_s=round(lag, 3))
        if now - self._reported >= QUIET_S:
            self._reported = now
            report_suppressed(self._logger)
