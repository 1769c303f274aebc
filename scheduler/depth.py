"""How many tokens to draft in the next cycle.

`AutoDepth` maximises expected tokens per second of the cohort:

    rate(K) = tokens(K) / t(B, K)

with tokens(K) from `scheduler.acceptance` and t from `scheduler.costs`: estimated from what was
measured, in this run or in an earlier one (`CostTable`).

- The depth in use is kept until another is better by `MARGIN`.
- With nothing known the first cycle runs at depth 0, the second at depth 1: the cheapest way to
  learn what a step and a draft cost, and how the head does.
- A *probe* is a cycle at another depth, one that would win if its step were `OPTIMISM` deviations
  cheaper than estimated and, where nothing is drafted, the drafts as good as hoped. Depths never
  measured are entered by probes too: one at a time, at most 2 d + 1 when d is the deepest known,
  and hardly hoped to be cheaper than the cheapest step known.
- Probes are paid for from a `Credit`, in cycles at the best depth. The price is what a probe is
  expected to lose, beyond the deepest known depth with `FEAR` added; what it lost more, or less, is
  settled when its time is known. Near-ties cost next to nothing and are compared as often as they
  need; what cannot be afforded waits.
- When costs are seen to have changed, the credit for known depths is filled up.
- Costs may step down where nobody expects it. So when the credit for new depths is full, the one
  that promises most at the cheapest step known is tried for its mean price, up to `DEBT`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.plan import RowResult
from scheduler.acceptance import Acceptance
from scheduler.config import Depth
from scheduler.costs import Costs, CostTable, StepCosts, bucket_of

MARGIN = 0.02
"""A depth must promise this much more tokens per second to replace the current one."""
OPTIMISM = 2.0
FEAR = 1.0
"""Standard deviations of log seconds."""
BOLD = 0.9
"""A depth never measured is not hoped to take less than this share of the cheapest step known."""
SHARE = 0.005
"""What each credit grows by per cycle: with both, probes may lose 1 % in the long run."""
CREDIT_KNOWN = 0.5
"""Most that probes of measured depths may lose at once, in cycles at the best depth."""
CREDIT_NEW, CREDIT_START = 1.25, 1.0
"""The same for depths never measured, and what there is of it in the beginning."""
DEBT = 2.2
"""What one probe of a new depth may cost on full credit: the excess is paid off afterwards."""
NEAR = 0.05
"""Probes that lose less than this count as if they lost it, lest near-ties outbid everything."""
FIRST_DEPTH = 1
"""Used in steps that also prefill before anything was measured: pays almost everywhere, and costs
little where it does not."""


class DepthPolicy(Protocol):
    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        """Depth of the next cycle, 0 … max(caps). `caps`: one per row of the cohort, not empty.
        `prefilling`: the step also runs prompt chunks, so its time says nothing about depth."""

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        """What a cycle of `rows` rows brought; `device_s` is None when it is not comparable."""

    def estimate(self, caps: list[int]) -> float | None:
        """Seconds that the cycle of such a cohort takes at the depth that `choose` would choose
        beside a prompt; None when nothing is known. Changes nothing that `choose` would not."""

    def step_times(self) -> Mapping[tuple[int, int], float]:
        """Measured seconds per (batch bucket, depth)."""


def depth_policy(depth: Depth, max_depth: int, table: CostTable | None = None) -> DepthPolicy:
    """`table`: what cycles cost in an earlier run, for `auto` to begin with."""
    return AutoDepth(max_depth, table) if depth == "auto" else FixedDepth(min(depth, max_depth))


class FixedDepth:
    """The same depth always, as far as some row of the cohort wants it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._costs = Costs(depth)

    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        return min(self._depth, max(caps))

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        if device_s:
            self._costs.observe(rows, depth, device_s)

    def estimate(self, caps: list[int]) -> float | None:
        return _seconds(self._costs, len(caps), min(self._depth, max(caps)))

    def step_times(self) -> Mapping[tuple[int, int], float]:
        return {}


@dataclass(slots=True)
class Credit:
    """What probes may lose, in cycles at the best depth of the time."""

    amount: float
    limit: float

    @property
    def full(self) -> bool:
        return self.amount >= self.limit

    def grow(self) -> None:
        self.amount = min(self.limit, self.amount + SHARE)

    def spend(self, amount: float) -> None:
        self.amount = min(self.limit, self.amount - amount)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A probe whose time is not known yet."""

    credit: Credit
    best_s: float
    """Seconds of a cycle at the best depth."""
    paid: float
    """How many times that its step may take for what was paid."""


@dataclass(slots=True)
class _Use:
    """How one batch size is being used."""

    depth: int | None = None
    """The depth in use; None until one was chosen by its rate."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Depth → cycles planned and not observed."""
    changes: int = 0
    """`StepCosts.changes` when it was last looked at."""
    probes: dict[int, _Probe] = field(default_factory=dict)
    """By depth."""


class AutoDepth:
    """Chooses from measurements; see the module docstring."""

    def __init__(self, max_depth: int, table: CostTable | None = None) -> None:
        self._max_depth = max_depth
        self._acceptance = Acceptance(max_depth)
        self._costs = Costs(max_depth, table)
        self._uses: dict[int, _Use] = {}
        self._known_credit = Credit(CREDIT_KNOWN, CREDIT_KNOWN)
        self._new_credit = Credit(CREDIT_START, CREDIT_NEW)

    def choose(self, caps: list[int], *, prefilling: bool) -> int:
        deepest = min(max(caps), self._max_depth)
        use = self._use(len(caps))
        depth = self._choose(caps, deepest, use, prefilling=prefilling) if deepest else 0
        use.waiting[depth] = use.waiting.get(depth, 0) + 1
        return depth

    def _choose(self, caps: list[int], deepest: int, use: _Use, *, prefilling: bool) -> int:
        costs = self._costs.bucket(len(caps))
        if not costs.known[: deepest + 1].any():
            if prefilling:
                return min(FIRST_DEPTH, deepest)
            return 1 if use.waiting.get(0) else 0
        tokens = self._acceptance.expected_tokens(caps, deepest).tolist()
        seconds = np.exp(costs.mean[: deepest + 1]).tolist()
        rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
        best = self._best(rates, costs, use)
        if prefilling:
            return best
        self._known_credit.grow()
        self._new_credit.grow()
        hoped = tokens
        if best == 0:  # nothing is drafted, so nothing is learnt about drafts
            hoped = self._acceptance.expected_tokens(caps, deepest, optimistic=True).tolist()
        probe = self._probe(tokens, hoped, seconds, best, costs, use)
        return best if probe is None else probe

    def _best(self, rates: list[float], costs: StepCosts, use: _Use) -> int:
        """The depth to use, of those known; stays unless another is better by `MARGIN`."""
        known = [depth for depth in range(len(rates)) if costs.known[depth]]
        best = max(known, key=lambda depth: rates[depth])
        now = use.depth
        if now in known and rates[now] * (1 + MARGIN) > rates[best]:
            return now
        if now is None or now < len(rates):  # a cohort of low caps must not decide for others
            use.depth = best
        return best

    def _probe(
        self,
        tokens: list[float],
        hoped: list[float],
        seconds: list[float],
        best: int,
        costs: StepCosts,
        use: _Use,
    ) -> int | None:
        """The depth most worth a look, if any is and its credit allows it."""
        size = len(tokens)
        known: list[bool] = costs.known[:size].tolist()
        deviation: list[float] = costs.deviation_from(best)[:size].tolist()
        cheapest = min(s for s, seen in zip(seconds, known, strict=True) if seen)
        deepest = max(depth for depth in range(size) if known[depth])
        waiting = {depth for depth, count in use.waiting.items() if count and depth < size}
        daring = self._new_credit.full
        settled = (
            all(known[depth] for depth in waiting)
            and costs.samples[best] >= 2
            and (daring or costs.samples[deepest] >= 2)
        )
        chosen: tuple[bool, float, int, float] | None = None
        for depth in set(range(size)) - waiting - {best}:
            new = not known[depth]
            if new and (not settled or depth > 2 * deepest + 1):
                continue
            brings = tokens[depth] / tokens[best]
            hope = seconds[depth] * math.exp(-OPTIMISM * deviation[depth])
            if new:
                hope = BOLD * cheapest if daring else max(hope, BOLD * cheapest)
            gain = math.log(hoped[depth] / tokens[best] * seconds[best] / hope)
            far = depth > deepest and not daring
            fear = math.exp(FEAR * deviation[depth]) if far else 1.0
            price = max(0.0, seconds[depth] * fear / seconds[best] - brings)
            credit = self._new_credit if new else self._known_credit
            if gain <= MARGIN or price > (DEBT if new and daring else credit.amount):
                continue
            worth = gain if new and daring else gain / (price + NEAR)
            chosen = max(chosen or (False, 0.0, 0, 0.0), (new, worth, depth, price))
        if chosen is None:
            return None
        new, _, depth, price = chosen
        credit = self._new_credit if new else self._known_credit
        credit.spend(max(price, NEAR))
        paid = price + tokens[depth] / tokens[best]
        use.probes[depth] = _Probe(credit, seconds[best], paid)
        return depth

    def observe(
        self, results: Iterable[RowResult], *, depth: int, rows: int, device_s: float | None
    ) -> None:
        self._acceptance.observe(results)
        use = self._use(rows)
        use.waiting[depth] = max(0, use.waiting.get(depth, 0) - 1)
        probe = use.probes.pop(depth, None)
        if not device_s:
            return
        trusted = self._costs.observe(rows, depth, device_s)
        if probe is not None and trusted:
            # An interruption is no fault of the depth it hit: at most one cycle more.
            probe.credit.spend(min(1.0, device_s / probe.best_s - probe.paid))
        if (changes := self._costs.bucket(rows).changes) > use.changes:
            use.changes = changes
            self._known_credit.amount = CREDIT_KNOWN

    def estimate(self, caps: list[int]) -> float | None:
        deepest = min(max(caps), self._max_depth)
        use = self._use(len(caps))
        depth = self._choose(caps, deepest, use, prefilling=True) if deepest else 0
        return _seconds(self._costs, len(caps), depth)

    def step_times(self) -> Mapping[tuple[int, int], float]:
        return self._costs.measured()

    def _use(self, rows: int) -> _Use:
        return self._uses.setdefault(bucket_of(rows), _Use())


def _seconds(costs: Costs, rows: int, depth: int) -> float | None:
    """What is estimated of a shape, if anything is known of its batch size or others."""
    bucket = costs.bucket(rows)
    return math.exp(bucket.mean[depth]) if bucket.known.any() else None
