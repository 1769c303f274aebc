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
        self._start, self._charge = self.queue.start, self.queue.charge
        self.queue.start = self.start  # type: ignore[method-assign]
        self.queue.charge = self.charge  # type: ignore[method-assign]

    def start(self, sequence: Sequence) -> None:
        for other in self.queue:
            if other is not sequence and not self.may_pass(sequence, other):
                raise AssertionError(f"{sequence.request_id} passes {other.request_id}")
        self.starts.append(sequence.request_id)
        self._start(sequence)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        self.served[sequence.request.tenant] += tokens
        self._charge(sequence, tokens)

    def may_pass(self, first: Sequence, other: Sequence) -> bool:
        """`first` starts while `other` waits. Without looking at counters."""
        tenant = self.queue.tenants.of(other.request.tenant)
        if tenant.full or self.bench.core._groups.waits(other):
            return True
        mine, its = self.level(first), self.level(other)
        if mine != its or first.request.tenant != other.request.tenant:
            return mine >= its
        return first.submitted_at <= other.submitted_at

    def level(self, sequence: Sequence) -> int:
        """The class a waiting request counts as, from the rule itself."""
        policy = self.bench.config.tenants.get(
            sequence.request.tenant, self.bench.config.default_tenant
        )
        asked = min(sequence.request.priority, policy.max_priority)
        waited = self.bench.now - sequence.submitted_at
        return min(asked + math.floor(waited / self.bench.config.ageing_s), INTERACTIVE)

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


@settings(FEW, max_examples=8)
@given(seed=st.integers(0, 2**32), priority=st.sampled_from(list(Priority)))
def test_starvation_is_bounded(seed: int, priority: Priority) -> None:
    """INTERACTIVE work of heavy tenants never ends, and new tenants keep coming. A light tenant's
    request is in the highest class in time, and from then on others are served at most what their
    weights allow: then it has started."""
    rng = random.Random(seed)
    policies = {"heavy": TenantPolicy(weight=4.0), "light": TenantPolicy(weight=0.5)}
    ageing = 30 * TICK_S
    config = config_of(tenants=policies, ageing_s=ageing, max_queue=200, max_queued_tokens=10**6)
    bench, watch = watched(config)
    for _ in range(40):
        backlog(bench, rng, ["heavy", "x"], priority=INTERACTIVE)
        bench.step()
    patient = bench.submit(some(rng, "patient", "light", priority=priority))
    top_at = bench.now + (INTERACTIVE - priority) * ageing
    before: Counter[str] | None = None
    while bench.core._live["patient"].row < 0:
        backlog(bench, rng, ["heavy", "x"], priority=INTERACTIVE)
        new = f"new{len(bench.streams)}"
        bench.submit(some(rng, new, new, priority=INTERACTIVE))
        if before is None and bench.now >= top_at:
            before = watch.served.copy()
        bench.step()
        if before is not None:
            spread = 2 * (PROMPT + ROWS * OUTPUT) / 0.5
            assert watch.served["heavy"] - before["heavy"] <= 4.0 * spread
            assert watch.served["x"] - before["x"] <= 1.0 * spread
        assert bench.now < top_at + 300 * TICK_S
    while not patient.tokens:
        bench.step()
