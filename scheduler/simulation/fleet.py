"""Machines behind a router: where a request goes, what becomes of refusals, machines that fail.

A refused request is offered again after the delay it was told, to a machine that has not refused
it in this round, until it was offered `attempts` times; then it is refused for good. The gateway
retries in the same way. A request whose machine fails is not repeated: its client has seen tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from scheduler.config import SchedulerConfig
from scheduler.request import InvalidRequestError, QueueFullError, SubmitError, Tokens
from scheduler.simulation.costs import MachineSpec
from scheduler.simulation.events import Timeline
from scheduler.simulation.machine import Machine
from scheduler.simulation.routing import Router
from scheduler.simulation.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A machine that dies and, perhaps, comes back empty."""

    machine: int
    at_s: float
    back_s: float = math.inf
    """When it takes requests again."""

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < self.back_s:
            raise ValueError(f"at_s must be in 0 … back_s, not {self.at_s}")


class Fleet:
    """Takes work and sees to it that each ends once: `on_end(work)`."""

    def __init__(
        self,
        *,
        specs: Sequence[MachineSpec],
        config: SchedulerConfig,
        router: Router,
        timeline: Timeline,
        seed: int,
        attempts: int = 3,
        failures: Sequence[Failure] = (),
        on_burst: Callable[[Work, Tokens, float | None], None],
        on_end: Callable[[Work], None],
    ) -> None:
        """Raises ValueError for a failure of a machine that is not there."""
        self.refusals: Counter[str] = Counter()
        """Offers that were refused, by reason."""
        self._router = router
        self._timeline = timeline
        self._attempts = attempts
        self._on_end = on_end
        self.machines = [
            Machine(
                index=index,
                spec=spec,
                config=config,
                timeline=timeline,
                seed=seed * 1_000_003 + index,
                on_burst=on_burst,
                on_end=on_end,
            )
            for index, spec in enumerate(specs)
        ]
        for failure in failures:
            if not 0 <= failure.machine < len(self.machines):
                raise ValueError(f"failure of machine {failure.machine}: there is none")
            machine = self.machines[failure.machine]
            timeline.at(failure.at_s, machine.fail)
            if math.isfinite(failure.back_s):
                timeline.at(failure.back_s, machine.recover)

    def submit(self, work: Work) -> None:
        """Offer a request to a machine, now and after refusals."""
        self._offer(work, frozenset())

    def _offer(self, work: Work, refused_by: frozenset[int]) -> None:
        up = {m.index: m for m in self.machines if m.up}
        open_ = {index: m for index, m in up.items() if index not in refused_by} or up
        if not open_:
            self._refuse(work, "no_machine", refused_by, 1.0)
            return
        index = self._router.choose(work, open_)
        work.attempts += 1
        try:
            open_[index].submit(work)
        except QueueFullError as error:
            reason = error.limit.split(" ")[0]
            self._refuse(work, reason, refused_by | {index}, error.retry_after_s)
        except InvalidRequestError as error:
            self.refusals["invalid"] += 1
            self._give_up(work, f"invalid: {error}")
        except SubmitError as error:
            reason = type(error).__name__
            self.refusals[reason] += 1
            self._give_up(work, f"refused: {reason}")

    def _refuse(self, work: Work, reason: str, refused_by: frozenset[int], delay_s: float) -> None:
        self.refusals[reason] += 1
        work.refusals += 1
        if work.attempts >= self._attempts or work.refusals >= self._attempts:
            self._give_up(work, f"refused: {reason}")
            return
        if len(refused_by) >= len(self.machines):
            refused_by = frozenset()
        self._timeline.at(self._timeline.now + delay_s, partial(self._offer, work, refused_by))

    def _give_up(self, work: Work, outcome: str) -> None:
        work.outcome = outcome
        work.ended_at = self._timeline.now
        self._on_end(work)
