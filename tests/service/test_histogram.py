"""Many equal observations at once are what they would be one by one."""

from __future__ import annotations

import pytest
from prometheus_client import Histogram

from service.histogram import observe_times

BOUNDS = (0.01, 0.02, 0.5)


def samples(histogram: Histogram) -> dict[tuple[str, str], float]:
    (family,) = histogram.collect()
    found = ((s.name, s.labels.get("le", ""), s.value) for s in family.samples)
    return {(name, bound): value for name, bound, value in found if not name.endswith("_created")}


@pytest.mark.parametrize("amount", [0.0, 0.0099, 0.01, 0.0100001, 0.02, 0.5, 0.51, 100.0])
def test_as_one_by_one(amount: float) -> None:
    once = Histogram("a", "text", buckets=BOUNDS, registry=None)
    singly = Histogram("a", "text", buckets=BOUNDS, registry=None)
    for count in (1, 3, 9):
        observe_times(once, amount, count)
        for _ in range(count):
            singly.observe(amount)
    expected = samples(singly)
    assert expected["a_count", ""] == 13
    assert samples(once) == pytest.approx(expected)
