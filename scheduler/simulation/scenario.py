"""A whole run: machines, a router, a load, for so long; and how many machines a load needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from scheduler.config import SchedulerConfig
from scheduler.pages import IntegrityError
from scheduler.simulation.clients import Chat, ChatUsers, Clients, OpenLoop
from scheduler.simulation.costs import MachineSpec
from scheduler.simulation.events import Timeline
from scheduler.simulation.fleet import Failure, Fleet
from scheduler.simulation.report import Objective, Recorder, Report, make_report
from scheduler.simulation.routing import make_router
from scheduler.simulation.traces import (
    Amount,
    Arrival,
    Kind,
    bursts,
    diurnal,
    mixed,
    poisson,
    until,
)
from scheduler.simulation.work import Work

SAMPLES = 500
"""Times that the machines are looked at in a run."""


class StalledError(Exception):
    """Nothing more happens, and some requests have not ended: a defect of the scheduler, or of a
    configuration it should have refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """An open loop: requests come whatever the service does. ValueError names what is wrong."""

    kinds: tuple[Kind, ...] = (
        Kind(
            prompt_tokens=Amount(median=200.0, p95=1000.0),
            output_tokens=Amount(median=150.0, p95=500.0),
        ),
    )
    process: str = "poisson"
    """poisson, bursts or diurnal."""
    rate: float = 1.0
    """Requests per second: of `poisson`; on average of `diurnal`; when busy, of `bursts`."""
    quiet_rate: float = 0.0
    """Of `bursts`, between them."""
    busy_s: float = 10.0
    quiet_s: float = 30.0
    """Mean lengths of bursts and of what is between them."""
    amplitude: float = 0.8
    """Of `diurnal`, relative to the mean: 0 … 1."""
    period_s: float = 86_400.0
    shared_tokens: int = 0
    """A beginning that all prompts share."""
    trace: tuple[Arrival, ...] | None = None
    """Requests as they came; the fields above then do not matter."""

    def __post_init__(self) -> None:
        if self.process not in ("poisson", "bursts", "diurnal"):
            raise ValueError(f"process must be poisson, bursts or diurnal, not {self.process!r}")
        if not self.kinds:
            raise ValueError("kinds must not be empty")
        for name in ("rate", "busy_s", "quiet_s", "period_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, not {getattr(self, name)}")
        if not self.quiet_rate >= 0:
            raise ValueError(f"quiet_rate must be >= 0, not {self.quiet_rate}")
        if not 0 <= self.amplitude <= 1:
            raise ValueError(f"amplitude must be in [0, 1], not {self.amplitude}")
        if self.shared_tokens < 0:
            raise ValueError(f"shared_tokens must be >= 0, not {self.shared_tokens}")

    def arrivals(self, rng: random.Random, end: float) -> Iterator[Arrival]:
        """Until `end`, in seconds."""
        if self.trace is not None:
            return (arrival for arrival in self.trace if arrival.arrival_s < end)
        return mixed(until(self._times(rng), end), self.kinds, rng)

    def _times(self, rng: random.Random) -> Iterator[float]:
        match self.process:
            case "bursts":
                return bursts(
                    rng,
                    quiet_rate=self.quiet_rate,
                    busy_rate=self.rate,
                    quiet_s=self.quiet_s,
                    busy_s=self.busy_s,
                )
            case "diurnal":
                return diurnal(
                    rng, rate=self.rate, amplitude=self.amplitude, period_s=self.period_s
                )
        return poisson(rng, self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """ValueError names the field that is out of range."""

    machine: MachineSpec
    machines: int = 1
    routing: str = "least-loaded"
    load: Open | Chat = field(default_factory=Open)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    duration_s: float = 300.0
    """Requests come for so long; then those there are end."""
    warmup_s: float = 0.0
    """Requests that come before this are not reported."""
    attempts: int = 3
    """Times a request is offered, to one machine after another, before it is refused for good."""
    failures: tuple[Failure, ...] = ()
    reads_per_s: float | None = None
    """Tokens per second that readers take; None: at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("machines", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if not 0 <= self.warmup_s < self.duration_s:
            raise ValueError(f"warmup_s must be in 0 … duration_s, not {self.warmup_s}")
        if self.reads_per_s is not None and not self.reads_per_s > 0:
            raise ValueError(f"reads_per_s must be > 0, not {self.reads_per_s}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, not {self.seed}")
        make_router(self.routing, self.machines)


class Simulation:
    """One run of a scenario, which can be looked into while it goes."""

    def __init__(self, scenario: Scenario, *, keep_texts: bool = False) -> None:
        """`keep_texts`: `clients.works` keep their tokens; much memory."""
        self.scenario = scenario
        self._keep_texts = keep_texts
        self.timeline = Timeline()
        self.recorder = Recorder()
        rng = random.Random(scenario.seed)
        self.fleet = Fleet(
            specs=[scenario.machine] * scenario.machines,
            config=scenario.scheduler,
            router=make_router(scenario.routing, scenario.machines),
            timeline=self.timeline,
            seed=scenario.seed,
            attempts=scenario.attempts,
            failures=scenario.failures,
            on_burst=self.recorder.burst,
            on_end=self._ended,
        )
        self._busy = [[0.0, 0.0] for _ in self.fleet.machines]
        for which, time in enumerate((scenario.warmup_s, scenario.duration_s)):
            self.timeline.at(time, partial(self._note_busy, which))
        self.ended = 0
        """Requests that have ended, one way or another."""
        self.clients = Clients(
            fleet=self.fleet,
            timeline=self.timeline,
            rng=rng,
            reads_per_s=scenario.reads_per_s,
        )
        end = scenario.duration_s
        if isinstance(scenario.load, Chat):
            ChatUsers(self.clients, scenario.load, until=end)
        else:
            OpenLoop(
                self.clients,
                scenario.load.arrivals(rng, end),
                shared_tokens=scenario.load.shared_tokens,
            )
        for n in range(SAMPLES):
            self.timeline.at(end * (n + 0.5) / SAMPLES, self._sample)

    def run(self) -> Report:
        """To the end. Raises StalledError, and IntegrityError when something is left behind."""
        self.timeline.run()
        self.check()
        return self.report()

    def check(self) -> None:
        """Every request has ended once, and nothing of any is left. Raises StalledError or
        IntegrityError."""
        open_ = [w.request_id for w in self.clients.works if w.outcome is None]
        if open_:
            raise StalledError(f"{len(open_)} requests have not ended, the first is {open_[0]}")
        if self.ended != len(self.clients.works):
            raise IntegrityError(f"{self.ended} ends of {len(self.clients.works)} requests")
        for machine in self.fleet.machines:
            if machine.up:
                machine.check_empty()

    def report(self) -> Report:
        """Of what has happened so far."""
        return make_report(
            fleet=self.fleet,
            recorder=self.recorder,
            works=self.clients.works,
            config=self.scenario.scheduler,
            begin=self.scenario.warmup_s,
            end=self.scenario.duration_s,
            busy_s=[after - before for before, after in self._busy],
        )

    def _ended(self, work: Work) -> None:
        self.ended += 1
        if work.on_end is not None:
            work.on_end(work)
        if not self._keep_texts:
            work.forget_text()

    def _note_busy(self, which: int) -> None:
        for machine, busy in zip(self.fleet.machines, self._busy, strict=True):
            busy[which] = machine.busy_s

    def _sample(self) -> None:
        self.recorder.sample(self.timeline.now, self.fleet.machines)


def simulate(scenario: Scenario) -> Report:
    """Run a scenario. Raises StalledError and IntegrityError: neither is the scenario's fault."""
    return Simulation(scenario).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The fewest machines that meet an objective."""

    machines: int | None
    """None: not even the most that were allowed do."""
    report: Report
    """At that number, or at the most allowed."""
    fewer: Report | None
    """At the largest number tried that does not meet it; None when one machine does."""
    tried: dict[int, dict[str, float]]
    """Number of machines → what was not met, worst first (see `Objective.breaches`)."""


def find_machines(
    scenario: Scenario,
    objective: Objective,
    *,
    most: int = 256,
    first: int | None = None,
    progress: Callable[[int, dict[str, float]], None] = lambda machines, breaches: None,
) -> Needed:
    """Up by a quarter at a time from `first` (default `scenario.machines`), then bisection. Takes
    it that more machines never do worse."""
    reports: dict[int, Report] = {}
    tried: dict[int, dict[str, float]] = {}

    def meets(count: int) -> bool:
        if count not in reports:
            reports[count] = simulate(replace(scenario, machines=count))
            tried[count] = objective.breaches(reports[count])
            progress(count, tried[count])
        return not tried[count]

    bad, good = 0, min(first or scenario.machines, most)
    while not meets(good):
        bad = good
        if good == most:
            return Needed(machines=None, report=reports[good], fewer=reports[bad], tried=tried)
        good = min(good + 1 + good // 4, most)
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if meets(middle) else (good, middle)
    return Needed(machines=good, report=reports[good], fewer=reports.get(bad), tried=tried)
