"""A short soak of a real server, and what its ledgers would say if something were miscounted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.soak.ledger import Call, Check, Log, checks
from tests.benchmarks.soak.run import soak
from tests.benchmarks.soak.samples import Sample, growth
from tests.benchmarks.soak.scale import full, short


@pytest.mark.timeout(240)
def test_every_request_of_a_short_soak_is_accounted_for() -> None:
    report = soak(short(40.0))
    assert report.faults() == [], report.markdown()
    kinds = {call.kind for call in report.calls}
    assert {"plain", "crowd-wait", "vanish", "slow-window", "slow-socket", "garbage"} <= kinds
    hostile = report.hostile
    assert hostile["connections"]["connections opened"] >= report.scale.connections
    assert hostile["too large"]["RESOURCE_EXHAUSTED, clear"] >= 1
    assert hostile["floods"]["calls reset at once"] >= 100
    assert sum(check.numbers.get("log", 0) for check in report.checks) > 0


# --- the join, on ledgers that were tampered with ------------------------------------------------

Ledgers = dict[str, Any]


def ledgers() -> Ledgers:
    """A small server's, in order: a finished call of two sequences, a refused one, one whose client
    left while it ran, one that left before its message, and one that never arrived."""
    calls = [
        Call(request_id="a", kind="n2", status="OK", tokens=9, told=9, admitted=True),
        Call(request_id="b", kind="wrong", status="INVALID_ARGUMENT", reason="INVALID_ARGUMENT"),
        Call(request_id="c", kind="vanish"),
        Call(request_id="d", kind="cancel", status="CANCELLED"),
    ]
    finished: dict[str, Any] = {
        "event": "request",
        "request_id": "a",
        "status": "OK",
        "reason": "length,stop",
    }
    finished |= {"ends": ["length", "stop_string"]}
    refused = {"event": "request", "request_id": "b", "status": "INVALID_ARGUMENT"}
    left = {"event": "request", "request_id": "c", "status": "CANCELLED", "reason": "CANCELLED"}
    early = {"event": "call not taken", "reason": "CANCELLED", "method": "/x/Generate"}
    lines: list[dict[str, Any]] = [
        {**finished, "completion_tokens": 10, "delivered_tokens": 9},
        {**refused, "reason": "INVALID_ARGUMENT"},
        {**left, "ends": ["cancelled"], "completion_tokens": 4, "delivered_tokens": 3},
        early,
        {"event": "calls not taken", "reason": "CANCELLED", "methods": "generate", "calls": 2},
        {**early, "method": "/x/Tokenize"},
    ]
    metrics = {
        'requests_refused_total{reason="INVALID_ARGUMENT"}': 1.0,
        'requests_refused_total{reason="CANCELLED"}': 3.0,
        'requests_refused_total{reason="DRAINING"}': 0.0,
        'spec_decode_requests_total{mode="coupled"}': 2.0,
        "requests_admitted_total": 3.0,
        'request_success_total{finish_reason="length"}': 1.0,
        'request_success_total{finish_reason="stop"}': 1.0,
        'requests_cancelled_total{reason="cancelled"}': 1.0,
        'requests_cancelled_total{reason="deadline"}': 0.0,
        "generation_tokens_total": 14.0,
        "requests_running": 0.0,
        "requests_waiting": 0.0,
        "kv_pages_used": 5.0,
        "kv_pages_cached": 5.0,
    }
    return {"calls": calls, "lines": lines, "metrics": metrics}


def broken(given: Ledgers) -> list[Check]:
    metrics = {f"selfdraft_{name}": value for name, value in given["metrics"].items()}
    found = checks(given["calls"], Log.of(given["lines"]), metrics)
    return [check for check in found if not check.holds]


def test_ledgers_that_agree() -> None:
    assert broken(ledgers()) == []


def counted(name: str, change: float) -> Callable[[Ledgers], None]:
    def tamper(given: Ledgers) -> None:
        given["metrics"][name] += change

    return tamper


def said(number: int, **fields: Any) -> Callable[[Ledgers], None]:
    def tamper(given: Ledgers) -> None:
        given["lines"][number] |= fields

    return tamper


def saw(number: int, **fields: Any) -> Callable[[Ledgers], None]:
    def tamper(given: Ledgers) -> None:
        for name, value in fields.items():
            setattr(given["calls"][number], name, value)

    return tamper


def lost(ledger: str, number: int) -> Callable[[Ledgers], None]:
    def tamper(given: Ledgers) -> None:
        del given[ledger][number]

    return tamper


def doubled(ledger: str, number: int) -> Callable[[Ledgers], None]:
    def tamper(given: Ledgers) -> None:
        given[ledger].append(copy.copy(given[ledger][number]))

    return tamper


TAMPERED: dict[str, Callable[[Ledgers], None]] = {
    "a refusal is not counted": counted('requests_refused_total{reason="INVALID_ARGUMENT"}', -1),
    "a refusal is counted as another": counted('requests_refused_total{reason="DRAINING"}', 1),
    "a client that left early is not counted": counted(
        'requests_refused_total{reason="CANCELLED"}', -1
    ),
    "an admission is not counted": counted('spec_decode_requests_total{mode="coupled"}', -1),
    "a sequence is not counted": counted("requests_admitted_total", -1),
    "an end is not counted": counted('request_success_total{finish_reason="stop"}', -1),
    "an end is counted as another": counted('requests_cancelled_total{reason="deadline"}', 1),
    "a token is counted twice": counted("generation_tokens_total", 1),
    "a row leaks": counted("requests_running", 1),
    "a place in the queue leaks": counted("requests_waiting", 1),
    "a page leaks": counted("kv_pages_used", 1),
    "a finished call has no line": lost("lines", 0),
    "a refused call has no line": lost("lines", 1),
    "a cancelled call has no line": lost("lines", 2),
    "an early end has no line": lost("lines", 3),
    "a flood is not counted in full": said(4, calls=1),
    "a call has two lines": doubled("lines", 0),
    "a line has no call": lost("calls", 2),
    "a status is another one for the log": said(1, status="INTERNAL"),
    "a reason is another one for the log": said(1, reason="QUEUE_FULL"),
    "an end is missing in the log": said(0, ends=["length"]),
    "tokens were delivered and not sent": said(0, delivered_tokens=10),
    "tokens were sent and not told": saw(0, told=8),
    "a chunk is lost": saw(0, tokens=8),
    "a vanished client got more than there was": saw(2, tokens=5),
    "a call that never arrived was answered": saw(3, admitted=True),
    "a finished call was refused, says its client": saw(
        0, status="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_miscount_is_seen(what: str) -> None:
    given = ledgers()
    TAMPERED[what](given)
    assert broken(given), what


def sizes(slope_mb_h: float, *, wave_mb: float = 5.0) -> list[Sample]:
    """An hour in samples of ten seconds: a fill of kept prefixes, then a wave on a slope."""
    return [
        Sample(
            at=at,
            rss_mb=600 + min(at, 900) / 9 + slope_mb_h * at / 3600 + wave_mb * (at // 60 % 2),
            device_active_mb=0.0,
            device_cache_mb=0.0,
            files=20,
            threads=20,
            cpu_s=0.0,
            running=0,
            waiting=0,
            pages_used=0,
            pages_cached=0,
            boundaries_used=0,
            sessions=0,
        )
        for at in range(0, 3600, 10)
    ]


@pytest.mark.parametrize(("slope", "flat"), [(0.0, True), (20.0, True), (80.0, False)])
def test_growth_is_told_from_waves(slope: float, flat: bool) -> None:
    found = growth(sizes(slope))
    assert found.slope_mb_h == pytest.approx(slope, abs=max(2 * found.error_mb_h, 1.0))
    assert found.flat(full(3600)) is flat


def test_a_jump_is_growth_too() -> None:
    samples = sizes(0.0)
    jumped = [s for s in samples if s.at < 2400] + [
        Sample(**(s.as_json() | {"rss_mb": s.rss_mb + 60})) for s in samples if s.at >= 2400
    ]
    assert not growth(jumped).flat(full(3600))
