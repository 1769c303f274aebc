"""How much of the prompts a step may carry while rows decode: a budget in seconds.

A stream gets its next tokens when a step is over, so a step's time is the gap between them. While
some row decodes, chunks are added to a step only as long as

    decode cycle + chunks + one standard deviation of that estimate <= max_token_gap_s

The cycle's time comes from the depth policy, that of chunks from `scheduler.prefill_costs`. A row
with a constraint is in every second step of the pipelined loop only: while one decodes, half the
gap is all a step may take.

**The share.** Where that leaves prompts less than `prefill_share` of the device's time, the share
wins. Every step of a stretch in which a row decodes and a prompt could run adds `prefill_share` of
its time to a *credit*, and what its chunks took is subtracted. Chunks may also run when the credit
covers them, whatever the gap: the smallest first that it covers, so that the gap is exceeded by as
little as the share allows, as often as that takes. So over such a stretch prompts get

    prefill_share · time - 2 · prefill_share · HORIZON_S - the smallest chunk - steps in flight

at least, times as estimated and as far as chunks of `prefill_chunk` tokens can take up so much.
Between steps that carry chunks on credit the streams have cycles of their own: that is the "prefill
every n-th step" of a small share. Where chunks fit under the gap, every step carries some: leaving
out steps would give streams more cycles, and take from the share that a prompt may have above its
minimum.

With a share of 0 nothing is promised: prompts wait for as long as cycles alone exceed the gap.

**Ignorance.** While nothing is known of the cycle's time, at most `ALONE` cycles run without
chunks, to measure it; then, with nothing known at all, the smallest chunks only. One step in
`REFRESH` carries none, so that the cycle's time does not grow stale. Steps with a shape (chunk
length; rows and depth of a cohort) that has not run before are not learned from: they may compile.

Chunks smaller than a whole one are of few lengths (`ladder`), as a GPU compiles for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import Any

from scheduler.prefill_costs import PrefillCosts, Work

HORIZON_S = 4.0
"""Credit and debt are bounded by what `prefill_share` gives in this time, so that no time long past
makes streams or prompts wait for longer."""
LEAST = 16
"""Tokens of the smallest chunk, ends of prompts and of whole chunks aside."""
ALONE = 4
REFRESH = 32
ERROR_WEIGHT = 0.05
"""Of the newest step in the smoothed error."""


def ladder(chunk: int) -> tuple[int, ...]:
    """Lengths that a piece of a chunk may have: powers of two from `LEAST`, and `chunk`."""
    sizes = []
    size = LEAST
    while size < chunk:
        sizes.append(size)
        size *= 2
    return (*sizes, chunk)


@dataclass(slots=True, kw_only=True)
class Budget:
    """What prompts may take of one step; spent piece by piece."""

    tokens: int
    """Prompt tokens."""
    sizes: tuple[int, ...]
    """The ladder, smallest first."""
    costs: PrefillCosts | None = None
    """None when seconds do not count: then chunks are whole."""
    mixed: bool = False
    """A decode cycle runs too."""
    room: float = math.inf
    """Seconds until the gap is reached."""
    credit: float = 0.0
    """Seconds that may be taken beyond the gap."""
    work: Work = field(default_factory=Work)
    """What was spent."""
    need: float | None = None
    """Seconds that the smallest piece refused takes; None when none was, for its seconds."""

    def piece(self, start: int, end: int, *, whole: bool) -> int:
        """Length of the chunk that may begin at `start` and must end at `end` at the latest; 0 for
        none. `whole`: from here to `end` is a chunk of its own right, not the rest of one."""
        left = end - start
        sizes = [size for size in self.sizes if size < left or (size == left and not whole)]
        if whole or not sizes:
            sizes.append(left)
        if self.costs is None:
            return sizes[-1] if sizes[-1] <= self.tokens else 0
        for size in reversed(sizes):
            if size <= self.tokens and self._affords(size, start):
                return size
        return 0

    def spend(self, start: int, tokens: int) -> None:
        self.tokens -= tokens
        self.work += Work.chunk(tokens, start)

    def _affords(self, tokens: int, start: int) -> bool:
        assert self.costs is not None
        work = self.work + Work.chunk(tokens, start)
        seconds, deviation = self.costs.seconds(work, mixed=self.mixed)
        if seconds + deviation <= self.room or seconds <= self.credit:
            return True
        self.need = seconds if self.need is None else min(self.need, seconds)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A paced step in flight."""

    work: Work
    mixed: bool
    new: bool
    """Some of its shapes has not run before."""
    cycle_s: float
    """Estimated seconds of its cycles."""
    prefill_s: float
    """Estimated seconds of its chunks."""
    contended: bool
    """A row decodes and a prompt could run."""


class Pace:
    """Budgets of steps, and what came of them."""

    def __init__(self, *, gap_s: float | None, share: float, chunk: int) -> None:
        self.gap_s = gap_s
        self.costs = PrefillCosts()
        self._share = share
        self._chunk = chunk
        self._sizes = ladder(chunk)
        self._credit = 0.0
        """Of steps that have come back."""
        self._pending = 0.0
        """What steps in flight are estimated to add to it."""
        self._need = 0.0
        """Seconds of the smallest piece that was refused lately."""
        self._alone = ALONE
        self._mixed_in_a_row = 0
        self._seen: set[Any] = set()
        """Shapes that have run."""
        self._cycle_s = 0.0
        self._error: float | None = None
        self._gap_exceeded = 0
        self._contended_s = self._contended_prefill_s = 0.0

    @property
    def credit(self) -> float:
        """Seconds of prefill that are owed to prompts; negative when they had more."""
        return self._credit + self._pending

    def unbounded(self) -> Budget:
        """For a step in which no row decodes, or no prompt could run, or nobody minds: a whole
        chunk's tokens. Nobody owes anybody anything then."""
        self._credit = 0.0
        return Budget(tokens=self._chunk, sizes=self._sizes)

    def budget(self, cycles: Values[float | None], *, every: int = 1) -> Budget:
        """For a step while some row decodes. `cycles`: estimated seconds of the cohorts' cycles in
        it, None for unknown; `every`: steps in which the slowest row has one cycle."""
        assert self.gap_s is not None
        known = [seconds for seconds in cycles if seconds is not None]
        self._cycle_s = sum(known)
        self.costs.guess(self._cycle_s)
        budget = Budget(tokens=self._chunk, sizes=self._sizes, costs=self.costs, mixed=bool(cycles))
        unknown = len(known) < len(cycles)
        if cycles and ((unknown and self._alone > 0) or self._mixed_in_a_row >= REFRESH):
            self._alone -= unknown
            budget.room = budget.credit = -math.inf
        elif not self._cycle_s and not self.costs.samples:
            budget.tokens = min(LEAST, self._chunk)
        else:
            budget.room = self.gap_s / every / (1 + self.costs.noise) - self._cycle_s
            budget.credit = max(self.credit, 0.0)
        return budget

    def planned(self, budget: Budget, shapes: Values[Any], *, mixed: bool) -> Load | None:
        """The step is planned, with these chunk lengths and cohort shapes; to be kept until it
        comes back. None when there is nothing to learn."""
        if self.gap_s is None:
            return None
        new = not self._seen.issuperset(shapes)
        self._seen.update(shapes)
        work, paced = budget.work, budget.costs is not None
        cycle_s = self._cycle_s if paced else 0.0
        if paced:
            if mixed:
                self._mixed_in_a_row = self._mixed_in_a_row + 1 if work.chunks else 0
            self._need = budget.need or 0.0
        if not work.chunks and budget.need is None:
            return None
        prefill_s = max(self.costs.seconds(work, mixed=mixed)[0], 0.0)
        load = Load(
            work=work,
            mixed=mixed,
            new=new,
            cycle_s=cycle_s,
            prefill_s=prefill_s,
            contended=paced,
        )
        self._pending += self._gain(load, cycle_s + prefill_s, prefill_s)
        return load

    def observe(self, load: Load | None, step_s: float, *, decoded: bool) -> None:
        """A step took `step_s`; `decoded`: a cycle ran in it."""
        if self.gap_s is None:
            return
        self._gap_exceeded += decoded and step_s > self.gap_s
        if load is None:
            return
        self._settle(load, step_s)
        if not load.work.chunks or not step_s > 0:
            return
        if load.mixed and self.costs.samples:
            error = abs(load.cycle_s + load.prefill_s - step_s) / step_s
            self._error = (
                error if self._error is None else self._error + ERROR_WEIGHT * (error - self._error)
            )
        if not load.new:
            self.costs.observe(load.work, mixed=load.mixed, step_s=step_s, cycle_s=load.cycle_s)

    def _settle(self, load: Load, step_s: float) -> None:
        """What a step really took replaces its estimate."""
        if not load.contended:
            return
        taken = self._taken(load, step_s)
        self._contended_s += step_s
        self._contended_prefill_s += taken
        self._pending -= self._gain(load, load.cycle_s + load.prefill_s, load.prefill_s)
        if load.new:  # nobody owes anybody a compilation
            step_s = min(step_s, load.cycle_s + load.prefill_s)
            taken = min(taken, load.prefill_s)
        horizon = self._share * HORIZON_S
        low = min(-min(taken, horizon), self._credit)  # no step pays what another owes
        high = max(horizon, self._need, self._credit)
        self._credit = min(max(self._credit + self._gain(load, step_s, taken), low), high)

    def _taken(self, load: Load, step_s: float) -> float:
        """Seconds of the step that its chunks took: their part of the estimate, so that a slow step
        is not all their fault, or what is left of a cycle as long as there is no estimate."""
        if not load.work.chunks:
            return 0.0
        if not self.costs.samples:
            return max(step_s - load.cycle_s, 0.0)
        return step_s * load.prefill_s / max(load.cycle_s + load.prefill_s, 1e-9)

    def _gain(self, load: Load, step_s: float, prefill_s: float) -> float:
        return self._share * step_s - prefill_s if load.contended else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Fields of `Statistics`."""
        return {
            "mixed_step_error": self._error or 0.0,
            "gap_exceeded": self._gap_exceeded,
            "contended_s": self._contended_s,
            "contended_prefill_s": self._contended_prefill_s,
        }
