"""Who goes first: classes, fair share, ageing, limits of tenants. Random traces through the real
core, each watched by `Watch`. The rules one by one are in `test_turns`."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.request import GenerationRequest, Priority, QueueFullError
from scheduler.sequence import Sequence
from tests.scheduler.bench import SMALL, TICK_S, Bench, fuzz, make_request, small_engine
from tests.scheduler.clocks import Clocks

BATCH, DEFAULT, INTERACTIVE = Priority

SEEDS = (Phase.explicit, Phase.reuse, Phase.generate)
"""A seed does not shrink."""

FEW = settings(max_examples=15, deadline=None, phases=SEEDS)

PROMPT, OUTPUT, ROWS = 40, 20, 6
"""Longest prompt, most tokens and rows of the traces here."""

POLICIES = {
    "a": TenantPolicy(weight=1.0),
    "b": TenantPolicy(weight=3.0, max_rows=2),
    "c": TenantPolicy(weight=0.5, max_queued_tokens=80, max_priority=DEFAULT),
}


class Watch:
    """Looks over a core's shoulder: who starts while who waits, and what each is served."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.queue = bench.core._queue
        self.served: Counter[str] = Counter()
        self.starts: list[str] = []
        self.clocks = Clocks(self.queue)
        self.started: Counter[tuple[str, int]] = Counter()
        """Starts by tenant and the class they waited in."""
        self.charged: Counter[tuple[str, int]] = Counter()
        """Tokens served, by the same."""
        self._start, self._charge = self.queue.start, self.queue.charge
        self.queue.start = self.start  # type: ignore[method-assign]
        self.queue.charge = self.charge  # type: ignore[method-assign]

    def start(self, sequence: Sequence, now: float) -> None:
        levels = self.levels()
        for other in self.queue:
            if other is not sequence and not self.may_pass(sequence, other, levels):
                raise AssertionError(f"{sequence.request_id} passes {other.request_id}")
        self.starts.append(sequence.request_id)
        self.started[sequence.request.tenant, levels[sequence]] += 1
        self._start(sequence, now)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        self.served[sequence.request.tenant] += tokens
        self.charged[sequence.request.tenant, sequence.level] += tokens
        self._charge(sequence, tokens)

    def may_pass(self, first: Sequence, other: Sequence, levels: dict[Sequence, Priority]) -> bool:
        """`first` starts while `other` waits. Without looking at counters."""
        tenant = self.queue.tenants.of(other.request.tenant)
        if tenant.full or self.bench.core._groups.waits(other):
            return True
        mine, its = levels[first], levels[other]
        if mine != its or first.request.tenant != other.request.tenant:
            return mine >= its
        return first.submitted_at <= other.submitted_at

    def levels(self) -> dict[Sequence, Priority]:
        """The class that each waiting request counts as, from the rule itself."""
        return self.clocks.levels(self.bench.now)

    def check_limits(self) -> None:
        rows = Counter(s.request.tenant for s in self.bench.core._rows.values())
        tokens: Counter[str] = Counter()
        for sequence in self.queue:
            if not sequence.returned:  # the door lets requests in once
                tokens[sequence.request.tenant] += len(sequence.request.prompt_ids)
        for name, policy in self.bench.config.tenants.items():
            assert rows[name] <= (policy.max_rows or math.inf)
            assert tokens[name] <= (policy.max_queued_tokens or math.inf)
        assert len(self.queue) - self.queue.returned <= self.bench.config.max_queue
        assert tokens.total() <= self.bench.config.max_queued_tokens


def watched(config: SchedulerConfig, **engine: int) -> tuple[Bench, Watch]:
    """The books are checked at every tenth move: these traces are long."""
    options = {"boundaries": 0, "max_rows": ROWS, **engine}
    bench = Bench(engine=small_engine(**options), config=config)
    check, moves = bench.core.integrity, itertools.count()

    def integrity(*, idle: bool = False) -> None:
        if idle or next(moves) % 10 == 0:
            check(idle=idle)

    bench.core.integrity = integrity  # type: ignore[method-assign]
    return bench, Watch(bench)


def config_of(**options: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {"tenants": POLICIES, "prefill_chunk": 16, "depth": 0}
    return SchedulerConfig(**{**defaults, **options})


def some(rng: random.Random, name: str, tenant: str, **others: Any) -> GenerationRequest:
    return make_request(
        name,
        prompt=[rng.randrange(60) for _ in range(rng.randint(1, PROMPT))],
        max_tokens=rng.randint(1, OUTPUT),
        tenant=tenant,
        **others,
    )


# --- random traces --------------------------------------------------------------------------------


@FEW
@given(
    seed=st.integers(0, 2**32),
    ageing=st.sampled_from([math.inf, 3.3 * TICK_S, 20.3 * TICK_S, 80.3 * TICK_S]),
    eager=st.floats(0.1, 0.9),
)
def test_nobody_passes_who_may_not(seed: int, ageing: float, eager: float) -> None:
    """Class by class, ageing included; within a tenant's class by arrival; limits are kept; nobody
    is left behind. With ageing off that is: no start while a higher class could start."""
    rng = random.Random(seed)
    config = config_of(ageing_s=ageing, max_queue=16, max_queued_tokens=300)
    bench, watch = watched(config)
    for number in range(80):
        tenant = rng.choice(["a", "b", "c", "c", "x", ""])
        request = some(rng, f"r{number}", tenant, priority=rng.choice(list(Priority)))
        while True:
            try:
                bench.submit(request)
                break
            except QueueFullError:
                bench.step()
                watch.check_limits()
        if rng.random() > eager:
            bench.step()
            watch.check_limits()
        if rng.random() < 0.1 and bench.live:
            bench.cancel(rng.choice(sorted(bench.live)))
    bench.finish()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_use_with_tenants(in_flight: int) -> None:
    """All that `fuzz` does, groups, sessions and tight pages included, in every class."""

    def dress(request: GenerationRequest) -> GenerationRequest:
        rng = random.Random(request.request_id)
        return replace(
            request,
            tenant=rng.choice(["a", "b", "c", "x", ""]),
            priority=rng.choice(list(Priority)),
        )

    policies = {**POLICIES, "c": TenantPolicy(weight=0.5, max_priority=DEFAULT)}
    config = replace(SMALL, tenants=policies, ageing_s=25 * TICK_S)
    for pages in (60, 24):
        bench = fuzz(
            seed=in_flight,
            requests=250,
            in_flight=in_flight,
            config=config,
            dress=dress,
            pages=pages,
        )
        served = bench.core.statistics(bench.now).served
        assert set(served) == {"a", "b", "c", "other"}
        assert min(served.values()) > 100


def backlog(bench: Bench, rng: random.Random, names: list[str], **others: Any) -> None:
    """Tops every tenant's line up to 20, more than one step can start."""
    for name in names:
        tenant = bench.core._queue.tenants.find(name)
        for _ in range(20 - (tenant.queued if tenant else 0)):
            bench.submit(some(rng, f"{name}{len(bench.streams)}", name, **others))


@settings(FEW, max_examples=5)
@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4),
    limited=st.booleans(),
)
def test_shares_follow_weights(seed: int, weights: list[float], limited: bool) -> None:
    """Between any two moments, weighted tokens of two backlogged tenants differ by no more than
    the bound of `scheduler.tenants`. A further tenant is held below its share by `max_rows`, and
    comes and goes; it changes nothing for them."""
    rng = random.Random(seed)
    policies = {f"t{n}": TenantPolicy(weight=weight) for n, weight in enumerate(weights)}
    names, shares = list(policies), dict(zip(policies, weights, strict=True))
    if limited:
        policies["limited"] = TenantPolicy(weight=5.0, max_rows=1)
    bench, watch = watched(config_of(tenants=policies, max_queue=200, max_queued_tokens=10**6))
    bound = 2 * (PROMPT + ROWS * OUTPUT) / min(weights)
    seen: list[list[float]] = []
    for _ in range(250):
        backlog(bench, rng, names)
        if limited and rng.random() < 0.3:
            bench.submit(some(rng, f"l{len(bench.streams)}", "limited"))
        bench.step()
        seen.append([watch.served[name] / shares[name] for name in names])
    counts = np.array(seen)
    for first in range(len(names)):
        gaps = counts[:, first, None] - counts
        assert (gaps.max(axis=0) - gaps.min(axis=0)).max() <= bound
    for name in [name for name, stream in bench.live.items() if not stream.tokens]:
        bench.cancel(name)
    bench.finish()


def test_long_run_shares_are_the_weights() -> None:
    """Within three per cent, over some 10,000 tokens."""
    policies = {"one": TenantPolicy(weight=1.0), "three": TenantPolicy(weight=3.0)}
    bench, watch = watched(config_of(tenants=policies, max_queue=200, max_queued_tokens=10**6))
    rng = random.Random(1)
    for _ in range(900):
        backlog(bench, rng, ["one", "three"])
        bench.step()
    assert watch.served.total() > 10_000
    assert watch.served["three"] / watch.served["one"] == pytest.approx(3.0, rel=0.03)


SPREAD = 2 * (PROMPT + ROWS * OUTPUT)
"""Bound of `scheduler.tenants` on tokens at weight one."""


@settings(FEW, max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    priority=st.sampled_from(list(Priority)),
    ahead=st.integers(0, 2),
)
def test_starvation_is_bounded(seed: int, priority: Priority, ahead: int) -> None:
    """INTERACTIVE work of heavy tenants never ends, and new tenants keep coming. The first that a
    light tenant has waiting is in the highest class in time, and from then on others are served at
    most what their weights allow: then it has started. So has each behind it in turn."""
    rng = random.Random(seed)
    policies = {"heavy": TenantPolicy(weight=4.0), "light": TenantPolicy(weight=0.5)}
    ageing, gap = 30 * TICK_S, OUTPUT * TICK_S
    config = config_of(
        tenants=policies,
        ageing_s=ageing,
        max_queue=2000,
        max_queued_tokens=10**6,
        max_displacements=0,
    )
    bench, watch = watched(config, pages=200)
    for _ in range(40):
        backlog(bench, rng, ["heavy", "x"], priority=INTERACTIVE)
        bench.step()
    for number in range(ahead + 1):
        patient = bench.submit(some(rng, f"patient{number}", "light", priority=priority))
    for number in range(ahead + 1):
        # `gap`: until a request of the others starts, which they do when one of their rows ends.
        top_at = bench.now + (INTERACTIVE - priority) * (ageing + gap)
        before: Counter[str] | None = None
        sequence = bench.core._live[f"patient{number}"]
        while sequence.row < 0:
            backlog(bench, rng, ["heavy", "x"], priority=INTERACTIVE)
            if number == 0:  # later the light tenant's counter is not the lowest
                new = f"new{len(bench.streams)}"
                bench.submit(some(rng, new, new, priority=INTERACTIVE))
            if before is None and bench.now >= top_at:
                assert watch.levels()[sequence] == INTERACTIVE
                before = watch.served.copy()
            bench.step()
            if before is not None:
                assert watch.served["heavy"] - before["heavy"] <= 4.0 * SPREAD / 0.5
                assert watch.served["x"] - before["x"] <= 1.0 * SPREAD / 0.5
            assert number or bench.now < top_at + 300 * TICK_S
    while not patient.tokens:
        bench.step()


@settings(FEW, max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    higher=st.sampled_from([0.0, 0.02, 0.2]),
    ageing=st.sampled_from([10.3 * TICK_S, 60.3 * TICK_S]),
)
def test_a_backlog_does_not_age_past_another_tenants_share(
    seed: int, higher: float, ageing: float
) -> None:
    """A tenant has more waiting than the machine can serve, in two classes, all of it older than
    `ageing_s`. Another's DEFAULT request waits for what fair share gives the first in that class,
    and for one of each class, out of its turn, in `ageing_s` seconds; for those only if INTERACTIVE
    requests start."""
    rng = random.Random(seed)
    bench, watch = watched(config_of(ageing_s=ageing, max_queue=200, max_queued_tokens=10**6))
    passers = 0
    for number in range(12):
        for _ in range(rng.randint(1, 25)):
            bench.step()
            _flood(bench, rng, higher)
        name = f"little{number}"
        bench.submit(some(rng, name, "a"))
        sequence, came = bench.core._live[name], bench.now
        started, charged = watch.started.copy(), watch.charged.copy()
        while sequence.row < 0:
            bench.step()
            _flood(bench, rng, higher)
            if sequence.row < 0 and watch.levels()[sequence] == DEFAULT:
                served = watch.charged["y", DEFAULT] - charged["y", DEFAULT]
                assert served <= SPREAD
        passed = watch.started["y", INTERACTIVE] - started["y", INTERACTIVE]
        assert passed <= 2 * (1 + (bench.now - came) / ageing)
        passers += passed
    assert higher or not passers
    for name in [name for name, stream in bench.live.items() if not stream.tokens]:
        bench.cancel(name)
    bench.finish()


def _flood(bench: Bench, rng: random.Random, higher: float) -> None:
    """Tenant y always has some of two classes waiting; x has INTERACTIVE ones now and then."""
    for priority in (BATCH, DEFAULT):
        tenant = bench.core._queue.tenants.find("y")
        for _ in range(10 - (len(tenant.lanes[priority].waiting) if tenant else 0)):
            bench.submit(some(rng, f"y{len(bench.streams)}", "y", priority=priority))
    if rng.random() < higher:
        bench.submit(some(rng, f"x{len(bench.streams)}", "x", priority=INTERACTIVE))
