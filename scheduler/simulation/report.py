"""What a simulated run measured, and whether that is good enough."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.config import SchedulerConfig
from scheduler.request import Tokens
from scheduler.simulation.fleet import Fleet
from scheduler.simulation.machine import Machine
from scheduler.simulation.work import Work

Values = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one quantity, in seconds; all 0 without observations."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    highest: float

    @classmethod
    def of(cls, values: Values, weights: Values | None = None) -> Summary:
        """With weights, each value counts that often."""
        if not len(values):
            return cls(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, highest=0.0)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        share = np.ones(len(values)) if weights is None else weights[order]
        total = np.cumsum(share)
        ranks = [np.searchsorted(total, total[-1] * p / 100) for p in PERCENTILES]
        p50, p90, p95, p99 = (float(ordered[min(rank, len(values) - 1)]) for rank in ranks)
        return cls(
            count=int(total[-1]),
            mean=float((ordered * share).sum() / total[-1]),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            highest=float(ordered[-1]),
        )


def jain(shares: Sequence[float]) -> float:
    """(Σx)² / (n Σx²): 1 when all have the same, 1 / n when one has everything (Jain, Chiu and
    Hawe, "A Quantitative Measure of Fairness and Discrimination", 1984); 1 of nothing."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """One machine, since it last started, but for `busy_share`."""

    requests: int
    generated_tokens: int
    prompt_tokens: int
    """Prefilled."""
    cached_tokens: int
    busy_share: float
    """Of the measured window, in which its device ran steps."""
    pages_peak: int
    evictions: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """For plots. Times in seconds of virtual time."""

    ttft: Values
    gaps: Values
    end_to_end: Values
    token_times: Values
    token_counts: Values
    sampled_at: Values
    kv_used: Values
    """Share of all pages held by rows or kept prefixes, mean over machines."""
    kv_cached: Values
    """Share held by kept prefixes alone."""
    running: Values
    queued: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Requests that arrived in the measured window, unless a name says otherwise."""

    machines: int
    window_s: float
    requests: int
    complete: int
    outcomes: dict[str, int]
    """Requests by how they ended."""
    refusals: dict[str, int]
    """Offers that a machine refused, by reason, over the whole run; most are offered again."""
    refused_share: float
    """Requests refused for good."""
    tokens_per_s: float
    prompt_tokens_per_s: float
    """Of prompts that arrived, cached ones included."""
    requests_per_s: float
    ttft: Summary
    """From a request's arrival to its first token, refusals and delays included."""
    gap: Summary
    """Between two bursts of a stream: what a reader waits."""
    per_token: Summary
    """The same per token: a burst of n after t seconds is n observations of t / n."""
    end_to_end: Summary
    queue: Summary
    """From acceptance to the first prefill chunk."""
    fairness: float
    """Jain's index of tokens per weight over tenants; over users when there is one tenant."""
    kv_used_mean: float
    kv_used_peak: float
    kv_cached_mean: float
    cached_share: float
    """Prompt tokens that came from kept prefixes."""
    acceptance: list[float]
    """Share of draft j + 1 accepted, of the cycles that had it up, over the whole run."""
    tokens_per_cycle: float
    """Of a row in a decode cycle, over the whole run."""
    rows_per_cycle: float
    depths: list[int]
    """[K]: cycles at depth K, over the whole run."""
    preemptions: int
    balance: float
    """Highest busy share of a machine over the mean."""
    per_machine: list[MachineReport]
    series: Series = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Everything but the series."""
        content = asdict(self)
        del content["series"]
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is good enough. None: does not matter."""

    ttft_p95_s: float | None = 2.0
    gap_p99_s: float | None = 0.25
    refused_share: float | None = 0.001

    def breaches(self, report: Report) -> dict[str, float]:
        """What is not met, worst first: name → measured over allowed."""
        measured = {
            "ttft_p95_s": (report.ttft.p95, self.ttft_p95_s),
            "gap_p99_s": (report.gap.p99, self.gap_p99_s),
            "refused_share": (report.refused_share, self.refused_share),
        }
        ratios = {
            name: value / max(limit, 1e-9)
            for name, (value, limit) in measured.items()
            if limit is not None and value > limit
        }
        return dict(sorted(ratios.items(), key=lambda item: -item[1]))


class Recorder:
    """Takes down a run as it goes."""

    def __init__(self) -> None:
        self._at = array("d")
        self._gap = array("d")
        """NaN for a stream's first burst."""
        self._tokens = array("H")
        self._samples: list[tuple[float, float, float, float, float]] = []

    def burst(self, work: Work, event: Tokens, gap: float | None) -> None:
        self._at.append(event.at)
        self._gap.append(float("nan") if gap is None else gap)
        self._tokens.append(len(event.ids))

    def sample(self, now: float, machines: Sequence[Machine]) -> None:
        """Look at the machines; costs a pass over their rows."""
        found = [machine.statistics() for machine in machines if machine.up]
        if found:
            count = len(found)
            self._samples.append(
                (
                    now,
                    sum(s.pages_used / s.pages_total for s in found) / count,
                    sum(s.pages_cached / s.pages_total for s in found) / count,
                    sum(s.running for s in found) / count,
                    sum(s.queued_requests for s in found) / count,
                )
            )

    def series(self, works: Sequence[Work], begin: float, end: float) -> Series:
        at, gap = np.array(self._at), np.array(self._gap)
        tokens = np.array(self._tokens, dtype=np.float64)
        inside = (at >= begin) & (at < end)
        samples = np.array(self._samples).reshape(-1, 5).T
        done = [w for w in works if w.complete]
        return Series(
            ttft=np.array(
                [w.first_token_at - w.arrived_at for w in works if w.first_token_at is not None]
            ),
            gaps=gap[inside & ~np.isnan(gap)],
            end_to_end=np.array([(w.ended_at or 0.0) - w.arrived_at for w in done]),
            token_times=at,
            token_counts=tokens,
            sampled_at=samples[0],
            kv_used=samples[1],
            kv_cached=samples[2],
            running=samples[3],
            queued=samples[4],
        )

    def per_token(self, begin: float, end: float) -> Summary:
        at, gap = np.array(self._at), np.array(self._gap)
        tokens = np.array(self._tokens, dtype=np.float64)
        inside = (at >= begin) & (at < end) & ~np.isnan(gap)
        return Summary.of(gap[inside] / tokens[inside], tokens[inside])


def fairness(works: Sequence[Work], config: SchedulerConfig) -> float:
    """See `Report.fairness`."""
    tenants: defaultdict[str, float] = defaultdict(float)
    users: defaultdict[str, float] = defaultdict(float)
    for work in works:
        weight = config.tenants.get(work.tenant, config.default_tenant).weight
        tenants[work.tenant] += work.completion_tokens / weight
        users[work.user] += work.completion_tokens
    return jain(list((tenants if len(tenants) > 1 else users).values()))


def make_report(
    *,
    fleet: Fleet,
    recorder: Recorder,
    works: Sequence[Work],
    config: SchedulerConfig,
    begin: float,
    end: float,
    busy_s: Sequence[float],
) -> Report:
    """Of the requests that arrived from `begin` to `end`; devices ran steps for `busy_s` then."""
    inside = [w for w in works if begin <= w.arrived_at < end]
    series = recorder.series(inside, begin, end)
    window = max(end - begin, 1e-9)
    delivered = (series.token_times >= begin) & (series.token_times < end)
    during = (series.sampled_at >= begin) & (series.sampled_at < end)
    outcomes = Counter(str(w.outcome) for w in inside)
    refused = sum(n for outcome, n in outcomes.items() if outcome.startswith("refused"))
    prompts = sum(w.prompt_tokens for w in inside)
    started = [w for w in inside if w.started_at is not None]
    queue = np.array([w.started_at - w.submitted_at for w in started if w.started_at is not None])
    machines = [
        _machine_report(machine, busy / window)
        for machine, busy in zip(fleet.machines, busy_s, strict=True)
    ]
    busy = [machine.busy_share for machine in machines]
    return Report(
        machines=len(machines),
        window_s=window,
        requests=len(inside),
        complete=sum(w.complete for w in inside),
        outcomes=dict(outcomes),
        refusals=dict(fleet.refusals),
        refused_share=refused / max(1, len(inside)),
        tokens_per_s=float(series.token_counts[delivered].sum()) / window,
        prompt_tokens_per_s=prompts / window,
        requests_per_s=len(inside) / window,
        ttft=Summary.of(series.ttft),
        gap=Summary.of(series.gaps),
        per_token=recorder.per_token(begin, end),
        end_to_end=Summary.of(series.end_to_end),
        queue=Summary.of(queue),
        fairness=fairness(inside, config),
        kv_used_mean=_mean(series.kv_used[during]),
        kv_used_peak=float(series.kv_used[during].max(initial=0.0)),
        kv_cached_mean=_mean(series.kv_cached[during]),
        cached_share=sum(w.cached for w in inside) / max(1, prompts),
        preemptions=sum(w.preemptions for w in inside),
        balance=max(busy) / max(_mean(np.array(busy)), 1e-9),
        per_machine=machines,
        series=series,
        **_drafting(fleet.machines),
    )


def _mean(values: Values) -> float:
    return float(values.mean()) if len(values) else 0.0


def _machine_report(machine: Machine, busy_share: float) -> MachineReport:
    found = machine.statistics()
    return MachineReport(
        requests=sum(found.finished.values()),
        generated_tokens=found.generated_tokens,
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        busy_share=busy_share,
        pages_peak=found.pages_peak,
        evictions=dict(found.evictions),
    )


def _drafting(machines: Sequence[Machine]) -> Mapping[str, Any]:
    found = [machine.statistics() for machine in machines]
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    depths: Counter[int] = Counter()
    for s in found:
        drafted.update(dict(enumerate(s.drafted_per_position)))
        accepted.update(dict(enumerate(s.accepted_per_position)))
        depths.update(dict(enumerate(s.cycles_by_depth)))
    cycles = sum(s.cycles for s in found)
    rows = sum(s.row_cycles - s.wasted_rows for s in found)
    tokens = sum(s.generated_tokens + s.discarded_tokens for s in found)
    firsts = sum(sum(s.finished.values()) for s in found)  # first tokens come from prefill
    return {
        "acceptance": [accepted[j] / drafted[j] for j in sorted(drafted) if drafted[j]],
        "depths": [depths[k] for k in range(max((k for k in depths if depths[k]), default=0) + 1)],
        "tokens_per_cycle": max(0, tokens - firsts) / max(1, rows),
        "rows_per_cycle": sum(s.row_cycles for s in found) / max(1, cycles),
    }
