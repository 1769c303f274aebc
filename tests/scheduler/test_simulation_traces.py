"""Arrival processes have the rates and the dispersion they should; trace files are checked."""

from __future__ import annotations

import itertools
import json
import math
import random

import numpy as np
import pytest

from scheduler.simulation import Amount, Kind, TraceError, read_trace
from scheduler.simulation.traces import bursts, diurnal, mixed, poisson, until


def counts(times: list[float], width: float, end: float) -> np.ndarray:
    return np.histogram(times, bins=np.arange(0, end + width, width))[0]


def dispersion(times: list[float], width: float, end: float) -> float:
    """Variance over mean of counts: 1 for a Poisson process, at any width."""
    found = counts(times, width, end)
    return float(found.var() / found.mean())


def test_poisson() -> None:
    times = list(until(poisson(random.Random(1), 5.0), 4000))
    assert len(times) == pytest.approx(20_000, abs=3 * math.sqrt(20_000))
    assert dispersion(times, 10, 4000) == pytest.approx(1, abs=0.25)


def test_bursts() -> None:
    process = bursts(random.Random(2), quiet_rate=1, busy_rate=11, quiet_s=30, busy_s=10)
    times = list(until(process, 40_000))
    assert times == sorted(times)
    assert len(times) / 40_000 == pytest.approx((1 * 30 + 11 * 10) / 40, rel=0.1)
    assert dispersion(times, 10, 40_000) > 5


def test_bursts_may_be_silent_between() -> None:
    process = bursts(random.Random(3), quiet_rate=0, busy_rate=10, quiet_s=10, busy_s=10)
    gaps = np.diff(list(itertools.islice(process, 2000)))
    assert gaps.max() > 10
    assert np.median(gaps) < 0.2


def test_diurnal() -> None:
    times = list(until(diurnal(random.Random(4), rate=4, amplitude=0.75, period_s=1000), 20_000))
    assert len(times) / 20_000 == pytest.approx(4, rel=0.03)
    phase = np.array(times) % 1000
    noon, night = ((abs(phase - 500) < 50).sum(), ((phase < 50) | (phase > 950)).sum())
    assert noon / night == pytest.approx(1.75 / 0.25, rel=0.15)


def test_amounts() -> None:
    rng = random.Random(5)
    drawn = np.array([Amount(median=100, p95=400).sample(rng) for _ in range(20_000)])
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert np.quantile(drawn, 0.95) == pytest.approx(400, rel=0.05)
    bounded = Amount(median=100, p95=400, low=50, high=150)
    cut = [bounded.sample(rng) for _ in range(1000)]
    assert (min(cut), max(cut)) == (50, 150)
    assert Amount(median=0.001).tokens(rng) == 1


def test_a_mix_has_its_shares() -> None:
    kinds = (
        Kind(prompt_tokens=Amount(median=10), output_tokens=Amount(median=5), share=3),
        Kind(prompt_tokens=Amount(median=9000), output_tokens=Amount(median=5), tenant="books"),
    )
    found = list(mixed(range(8000), kinds, random.Random(6)))
    long = [arrival for arrival in found if arrival.prompt_tokens == 9000]
    assert len(long) == pytest.approx(2000, abs=150)
    assert {arrival.tenant for arrival in long} == {"books"}


def test_the_same_seed_gives_the_same_times() -> None:
    one, two, other = (list(until(poisson(random.Random(n), 2.0), 50)) for n in (7, 7, 8))
    assert one == two != other


def test_a_trace_is_read_and_sorted() -> None:
    lines = [
        json.dumps({"arrival_s": 2, "prompt_tokens": 10, "output_tokens": 3}),
        "",
        json.dumps(
            {
                "arrival_s": 0.5,
                "prompt_tokens": 7,
                "output_tokens": 1,
                "session": "s",
                "priority": "batch",
                "tenant": "t",
                "deadline_s": 3,
            }
        ),
    ]
    first, second = read_trace(lines)
    assert (first.arrival_s, first.session, first.priority, first.deadline_s) == (
        0.5,
        "s",
        "batch",
        3,
    )
    assert (second.arrival_s, second.prompt_tokens, second.tenant) == (2, 10, "")


GOOD = {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": -1}, "arrival_s: must be >= 0"),
        ({"arrival_s": "now"}, "arrival_s: must be a number"),
        ({"prompt_tokens": 0}, "prompt_tokens: must be in 1"),
        ({"prompt_tokens": 1.5}, "prompt_tokens: must be an integer"),
        ({"output_tokens": True}, "output_tokens: must be an integer"),
        ({"priority": "urgent"}, "priority must be one of batch, default, interactive"),
        ({"deadline_s": 0}, "deadline_s: must be a number > 0"),
        ({"session": 3}, "session: must be a string"),
        ({"colour": 1}, "colour: no such field"),
    ],
)
def test_a_bad_line_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=f"line 2: {message}"):
        read_trace([json.dumps(GOOD), json.dumps(GOOD | change)])


@pytest.mark.parametrize("line", ["{", "[]", "3"])
def test_a_line_that_is_no_object(line: str) -> None:
    with pytest.raises(TraceError, match="line 1"):
        read_trace([line])


@pytest.mark.parametrize(
    "wrong", [{"median": 0}, {"median": 10, "p95": 5}, {"median": 1, "low": 3, "high": 2}]
)
def test_amounts_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"median|p95|low"):
        Amount(**wrong)
