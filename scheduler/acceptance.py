"""How many tokens a cohort's next cycle is expected to emit, at every depth.

The chance that draft j of row i stands, given that the ones before it did, is modelled as

    p_ij = q_i · c_j

`q_i` is the row's own rate (some texts are easier than others), drawn towards the rate of all rows
as long as little is known of it; `c_j` says what position j is worth beside the average position.
A pooled rate per position would not do: those who reach position 3 are mostly rows that are
accepted more, and when such a row leaves, the others inherit its numbers.

All evidence fades, the overall rate towards its long-run mean and the positions towards 1. An
*optimistic* estimate has `PRIOR` in place of that mean: a cohort that does not draft looks better
with time that way, and gets another try.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan import RowResult

FADE = 0.99
"""Weight that evidence keeps per cycle, of rows and of all of them: half is gone after 69."""
PRIOR, PRIOR_WEIGHT = 0.7, 3.0
"""Acceptance assumed without evidence, and how many trials that assumption is worth."""
LONG_RUN = 0.005
"""Weight of one trial in the long-run mean, which starts at `PRIOR`."""
ROW_WEIGHT = 12.0
"""Trials that the overall rate is worth in a row's own."""
POSITION_WEIGHT = 4.0
"""Trials that c_j = 1 is worth."""
MOST_TRIALS = 200.0
"""Trials remembered in all: enough to know a rate to 3 %, and many rows must not make old evidence
last longer."""


class Acceptance:
    """See the module docstring. O(rows + depth) per cycle."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._reached = np.zeros(depth)
        """[j]: sum of q over rows that reached draft j + 1, faded."""
        self._stood = np.zeros(depth)
        self._trials = self._successes = 0.0
        """Over all rows and positions, trials weighted with c_j, faded."""
        self._mean = PRIOR
        """Rate in the long run."""
        self._rows: list[int] = []
        """Rows of the newest cycle observed, in its order; those of the next arrays."""
        self._row_trials = np.zeros(0)
        self._row_successes = np.zeros(0)
        self._present = np.zeros(0, dtype=bool)
        """Rows that had not finished in it."""

    def observe(self, results: Iterable[RowResult]) -> None:
        """What the rows of one cycle drafted and got accepted."""
        found = list(results)
        self._align([result.row for result in found])
        drafted = np.array([result.drafted for result in found], dtype=np.intp)
        stood = np.array([result.accepted for result in found], dtype=np.intp)
        self._present = np.array([result.finish is None for result in found], dtype=bool)
        np.minimum(drafted, self._depth, out=drafted)
        np.minimum(stood, drafted, out=stood)
        tried = np.minimum(stood + 1, drafted)
        rates = self._row_rates(self.overall())
        worth = np.concatenate(([0.0], np.cumsum(self._positions())))[tried]
        keep = FADE * min(1.0, MOST_TRIALS / max(self._trials, 1.0))
        self._trials = keep * self._trials + float(worth.sum())
        self._successes = keep * self._successes + float(stood.sum())
        trials = float(worth.sum())
        if trials > 0:
            weight = min(0.5, LONG_RUN * trials)
            self._mean += weight * (min(1.0, float(stood.sum()) / trials) - self._mean)
        self._reached = keep * self._reached + self._more_than(tried, rates)
        self._stood = keep * self._stood + self._more_than(stood, None)
        self._row_trials = FADE * self._row_trials + worth
        self._row_successes = FADE * self._row_successes + stood

    def _more_than(
        self, counts: NDArray[np.intp], weights: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """[j]: summed weight of the rows whose count is above j."""
        histogram = np.bincount(counts, weights=weights, minlength=self._depth + 1)
        return np.cumsum(histogram[::-1])[::-1][1:].astype(np.float64)

    def _align(self, rows: list[int]) -> None:
        """Bring the rows' evidence into the order of this cycle; rows not in it are forgotten."""
        if rows == self._rows:
            return
        before = {row: index for index, row in enumerate(self._rows)}
        source = [before.get(row, len(before)) for row in rows]
        self._row_trials = np.append(self._row_trials, 0.0)[source]
        self._row_successes = np.append(self._row_successes, 0.0)[source]
        self._rows = rows

    def overall(self, *, optimistic: bool = False) -> float:
        """Rate of a row nothing is known of, at an average position."""
        prior = max(PRIOR, self._mean) if optimistic else self._mean
        return (self._successes + prior * PRIOR_WEIGHT) / (self._trials + PRIOR_WEIGHT)

    def _positions(self) -> NDArray[np.float64]:
        """[j]: c of draft j + 1."""
        return (self._stood + POSITION_WEIGHT) / (self._reached + POSITION_WEIGHT)

    def _row_rates(self, overall: float) -> NDArray[np.float64]:
        """q of the rows of the newest cycle."""
        return (self._row_successes + ROW_WEIGHT * overall) / (self._row_trials + ROW_WEIGHT)

    def expected_tokens(
        self, caps: Sequence[int], deepest: int, *, optimistic: bool = False
    ) -> NDArray[np.float64]:
        """[K]: tokens a cohort of rows with these draft limits emits in a cycle at depth K, for
        K = 0 … deepest.

        The cohort is taken to be the rows of the newest cycle observed that had not finished, in
        the same order, followed by new ones: the scheduler keeps it in order of age.
        """
        overall = self.overall(optimistic=optimistic)
        rates = self._row_rates(overall)[self._present][: len(caps)]
        if len(rates) < len(caps):
            rates = np.concatenate((rates, np.full(len(caps) - len(rates), overall)))
        chance = np.minimum(rates[:, None] * self._positions()[:deepest], 1.0)
        reach = np.cumprod(chance, axis=1)
        if min(caps) < deepest:
            reach *= np.arange(deepest) < np.asarray(caps)[:, None]
        tokens = np.empty(deepest + 1)
        tokens[0] = len(caps)
        np.cumsum(reach.sum(axis=0), out=tokens[1:])
        tokens[1:] += len(caps)
        return tokens
