"""One machine in virtual time: a scheduler's core, the loop around it, and a simulated device.

The loop is that of `scheduler.loop`: with two steps in flight, step n + 1 is planned and handed to
the device while step n runs, and the host learns of n when it is done. Whatever happens meanwhile
is known to the next plan, and no sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.plan import EngineInfo, StepPlan, StepResult
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.costs import CostTable
from scheduler.pages import IntegrityError
from scheduler.request import Event, Finished, Tokens
from scheduler.simulation.costs import MachineSpec, tabulated
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.events import Timeline
from scheduler.simulation.work import Work
from scheduler.statistics import Statistics

LEAST_STEP_S = 1e-6
"""What a step takes that only releases rows."""


class Machine:
    """Drives one core. `on_burst(work, burst, gap)` and `on_end(work)` tell what clients see."""

    def __init__(
        self,
        *,
        index: int,
        spec: MachineSpec,
        config: SchedulerConfig,
        timeline: Timeline,
        seed: int,
        on_burst: Callable[[Work, Tokens, float | None], None],
        on_end: Callable[[Work], None],
    ) -> None:
        self.index = index
        self.spec = spec
        self.up = True
        self.busy_s = 0.0
        """Seconds its device ran steps."""
        self.idle_checks = 0
        """Times its books were checked because nothing was left to do."""
        self._config = config
        self._seed = seed
        self._timeline = timeline
        self._on_burst = on_burst
        self._on_end = on_end
        self._lives = 0
        self._start()

    def _start(self) -> None:
        """An empty scheduler and device."""
        self._engine = SimulatedEngine(self.spec, seed=self._seed + 7919 * self._lives)
        depth = 1 if self._config.loop == "plain" else 2
        self.core = SchedulerCore(
            info=self._engine.info, config=self._configured(), max_in_flight=depth
        )
        self._most = depth
        self._steps: deque[StepResult] = deque()
        self._free_at = self._timeline.now
        """When the device has done all it was handed."""
        self._host_at = self._timeline.now
        """When the host has handed over all it planned."""
        self._work: dict[str, Work] = {}
        self._wake_at: float | None = None

    def _configured(self) -> SchedulerConfig:
        if not self.spec.tuned or self._config.cost_table is not None:
            return self._config
        return replace(self._config, cost_table=self._table)

    def _table(self, info: EngineInfo) -> CostTable:
        return tabulated(self.spec.costs.decode, max_rows=info.max_rows, max_depth=info.max_depth)

    @property
    def load(self) -> int:
        """Requests queued or running."""
        return self.core.live

    def statistics(self) -> Statistics:
        return self.core.statistics(self._timeline.now)

    def check_empty(self) -> None:
        """Idle, with nothing of any request left. Raises IntegrityError."""
        self.core.integrity(idle=True)
        found = self.statistics()
        if not self.core.is_empty or self._steps or self._work:
            raise IntegrityError(f"machine {self.index}: requests or steps are left")
        if self._engine.rows:
            raise IntegrityError(f"machine {self.index}: {self._engine.rows} rows on the device")
        if found.pages_used != found.pages_cached:
            raise IntegrityError(
                f"machine {self.index}: {found.pages_used} pages in use, "
                f"{found.pages_cached} of kept prefixes"
            )

    # --- what happens to it ----------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Raises SubmitError as the core does; nothing of the request remains then."""
        now = self._timeline.now
        self.core.submit(work.request(), now)
        work.submitted_at = now
        work.machine = self.index
        self._work[work.request_id] = work
        self._turn_if_idle()

    def fail(self) -> None:
        """Its process dies: every request ends, everything kept is gone."""
        self.up = False
        self._lives += 1
        events = self.core.abandon("the machine failed", self._timeline.now)
        self._steps.clear()
        self._deliver(events)

    def recover(self) -> None:
        """A new process, with nothing kept."""
        self._start()
        self.up = True

    # --- the loop --------------------------------------------------------------------------------

    def _turn_if_idle(self) -> None:
        if self.up and not self._steps:
            self._wake(self._timeline.now)  # what else comes at this moment is known to the plan

    def _wake(self, time: float) -> None:
        """Look again at `time`, unless it will be looked before."""
        if self._wake_at is None or time < self._wake_at:
            self._wake_at = time
            self._timeline.at(time, partial(self._woken, self._lives, time))

    def _woken(self, life: int, time: float) -> None:
        if life == self._lives and self._wake_at == time:
            self._wake_at = None
            if not self._steps:
                self._turn()

    def _turn(self) -> None:
        """Plan until the device has enough, or there is nothing to run."""
        now = self._timeline.now
        while self.core.in_flight < self._most:
            plan = self.core.plan(now)
            self._deliver(self.core.take_events())
            if plan.is_empty:
                break
            self._run(plan, now)
        if not self.core.in_flight:
            self.idle_checks += 1
            self.core.integrity(idle=True)
            due = self.core.next_due()
            if due is not None:
                self._wake(max(due, now))

    def _run(self, plan: StepPlan, now: float) -> None:
        costs = self.spec.costs
        result = self._engine.run(plan)
        seconds = max(result.device_s, LEAST_STEP_S)
        self._host_at = max(self._host_at, now) + costs.host_s
        begin = max(self._free_at + costs.gap_s, self._host_at)
        self._free_at = begin + seconds
        self.busy_s += seconds
        self._steps.append(result)
        self._timeline.at(self._free_at, partial(self._done, self._lives))

    def _done(self, life: int) -> None:
        if life == self._lives:
            result = self._steps.popleft()
            self._deliver(self.core.commit(result, self._timeline.now))
            self._turn()

    # --- clients ---------------------------------------------------------------------------------

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            if isinstance(event, Finished):
                work = self._work.pop(request_id)
                work.finish(event, self._timeline.now)
                self._on_end(work)
            else:
                work = self._work[request_id]
                self._on_burst(work, event, work.take(event))
                self._read(request_id, work, len(event.ids))

    def _read(self, request_id: str, work: Work, tokens: int) -> None:
        now = self._timeline.now
        if work.reads_per_s is None:
            self.core.acknowledge(request_id, tokens, now)
            return
        work.read_until = max(work.read_until, now) + tokens / work.reads_per_s
        self._timeline.at(
            work.read_until, partial(self._acknowledge, self._lives, request_id, tokens)
        )

    def _acknowledge(self, life: int, request_id: str, tokens: int) -> None:
        if life == self._lives and self.core.acknowledge(request_id, tokens, self._timeline.now):
            self._turn_if_idle()
