"""Three ledgers of the same calls, and what must be equal in them.

Clients know how their calls ended, unless they left first: they cancelled, their deadline passed,
they vanished. Such a call may have been refused, finished or cancelled by the server, or have never
arrived; its log line says which, and it has one at most. All else is equal in clients, log and
metrics to the last call and token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

SUCCESS: Final = {"stop": "stop", "stop_string": "stop", "length": "length"}
"""How metrics call the ends that are good."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One `Generate` call as its client saw it."""

    request_id: str
    kind: str
    status: str = ""
    """Name of the gRPC status; "" for a client that did not stay to see it."""
    reason: str = ""
    """ErrorInfo's. Only the server gives one."""
    tokens: int = 0
    """In the chunks that came."""
    told: int = 0
    """Tokens that the `complete`s speak of."""
    admitted: bool = False
    """Something came from the server: it must know of the call."""

    @property
    def answered(self) -> bool:
        """The status is the server's."""
        return self.status == "OK" or bool(self.reason)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Numbers that must be equal, by whose they are."""

    name: str
    numbers: Mapping[str, int]
    examples: tuple[str, ...] = ()
    """Ids of some that should not be there."""

    @property
    def holds(self) -> bool:
        return len(set(self.numbers.values())) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a server's log says of calls."""

    requests: Sequence[Mapping[str, Any]]
    """Lines of calls whose message was read."""
    not_taken: Mapping[str, int]
    """Generate calls that ended before, by reason."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Log:
        requests: list[Mapping[str, Any]] = []
        not_taken: Counter[str] = Counter()
        for line in lines:
            if line["event"] == "request":
                requests.append(line)
            elif line["event"] == "call not taken" and line["method"].endswith("/Generate"):
                not_taken[line["reason"]] += 1
            elif line["event"] == "calls not taken" and line["methods"] == "generate":
                not_taken[line["reason"]] += line["calls"]
        return cls(requests=requests, not_taken=not_taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Calls and log lines of the same id, put together."""

    pairs: Sequence[tuple[Call, Mapping[str, Any]]]
    unseen: Sequence[Call]
    """Calls without a line."""
    unasked: Sequence[Mapping[str, Any]]
    """Lines without a call."""


def join(calls: Iterable[Call], log: Log) -> Joined:
    """Each line goes to one call. Where an id was used twice, calls that were answered choose
    first, and take a line that says the same if there is one."""
    lines: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in log.requests:
        lines[line["request_id"]].append(line)
    pairs, unseen = [], []
    for call in sorted(calls, key=lambda call: not call.answered):
        mine = lines[call.request_id]
        if not mine:
            unseen.append(call)
            continue
        same = [line for line in mine if _agrees(call, line)]
        line = (same or mine)[0]
        mine.remove(line)
        pairs.append((call, line))
    return Joined(
        pairs=pairs, unseen=unseen, unasked=[line for left in lines.values() for line in left]
    )


def _agrees(call: Call, line: Mapping[str, Any]) -> bool:
    if call.status != line["status"]:
        return False
    return call.status == "OK" or call.reason == line["reason"]


def _outcome(line: Mapping[str, Any]) -> str:
    if line["status"] == "OK":
        return "finished"
    return "cancelled" if "ends" in line else "refused"


def checks(calls: Sequence[Call], log: Log, metrics: Mapping[str, float]) -> list[Check]:
    """Everything that must be equal once the server is idle. `metrics` holds samples by name, of a
    server that had no other clients."""
    joined = join(calls, log)
    return [
        *_by_call(calls, joined),
        *_outcomes(calls, joined, log, metrics),
        *_sequences(log, metrics),
        *_refusals(log, metrics),
        *_at_rest(metrics),
    ]


def _by_call(calls: Sequence[Call], joined: Joined) -> list[Check]:
    answered = [(call, line) for call, line in joined.pairs if call.answered]
    agree = [(call, line) for call, line in answered if _agrees(call, line)]
    good = [(call, line) for call, line in agree if call.status == "OK"]
    others = [(call, line) for call, line in joined.pairs if call.status != "OK"]
    return [
        Check(
            name="answered calls: each has a log line of the same status and reason",
            numbers={"clients": sum(call.answered for call in calls), "log": len(agree)},
        ),
        Check(
            name="log lines that no client asked for",
            numbers={"log": len(joined.unasked), "expected": 0},
            examples=tuple(line["request_id"] for line in joined.unasked[:5]),
        ),
        Check(
            name="calls without a log line although the server had answered something",
            numbers={"clients": sum(call.admitted for call in joined.unseen), "expected": 0},
        ),
        Check(
            name="tokens of finished calls",
            numbers={
                "chunks": sum(call.tokens for call, _ in good),
                "completes": sum(call.told for call, _ in good),
                "log": sum(line["delivered_tokens"] for _, line in good),
            },
        ),
        Check(
            name="other calls with more tokens than were generated for them",
            numbers={
                "calls": sum(
                    call.tokens > line.get("completion_tokens", 0) for call, line in others
                ),
                "expected": 0,
            },
        ),
    ]


def _outcomes(
    calls: Sequence[Call], joined: Joined, log: Log, metrics: Mapping[str, float]
) -> list[Check]:
    """Of calls that were read: finished, refused or cancelled. A client that left is counted as its
    line says; that it left is the only thing it knows."""
    mine: Counter[str] = Counter()
    for call, line in joined.pairs:
        if call.status == "OK":
            mine["finished"] += 1
        elif call.reason:
            mine["cancelled" if call.admitted or "ends" in line else "refused"] += 1
        else:
            mine[_outcome(line)] += 1
    theirs = Counter(map(_outcome, log.requests))
    refused = int(total(metrics, "requests_refused_total")) - sum(log.not_taken.values())
    admitted = int(total(metrics, "spec_decode_requests_total"))
    return [
        Check(
            name="calls read and refused",
            numbers={"clients": mine["refused"], "log": theirs["refused"], "metrics": refused},
        ),
        Check(
            name="calls admitted: finished and cancelled",
            numbers={
                "clients": mine["finished"] + mine["cancelled"],
                "log": theirs["finished"] + theirs["cancelled"],
                "metrics": admitted,
            },
        ),
        Check(
            name="calls finished",
            numbers={"clients": mine["finished"], "log": theirs["finished"]},
        ),
        Check(
            name="calls cancelled, aborted or failed",
            numbers={"clients": mine["cancelled"], "log": theirs["cancelled"]},
        ),
        Check(
            name="all calls: read, and never arrived",
            numbers={"clients": len(calls), "log": len(log.requests) + len(joined.unseen)},
        ),
    ]


def _sequences(log: Log, metrics: Mapping[str, float]) -> list[Check]:
    """Of admitted calls, of which those with n > 1 have several."""
    ends: Counter[str] = Counter()
    for line in log.requests:
        ends.update(line.get("ends", ()))
    found = [
        Check(
            name="sequences admitted",
            numbers={
                "log": sum(ends.values()),
                "metrics": int(total(metrics, "requests_admitted_total")),
            },
        )
    ]
    good: Counter[str] = Counter()
    for reason in SUCCESS:
        good[SUCCESS[reason]] += ends.pop(reason, 0)
    for family, label, counts in (
        ("request_success_total", "finish_reason", good),
        ("requests_cancelled_total", "reason", ends),
    ):
        counted = by_label(metrics, family, label)
        found += [
            Check(
                name=f"sequences that ended with {reason}",
                numbers={"log": counts[reason], "metrics": int(counted.get(reason, 0))},
            )
            for reason in sorted({*counts, *counted})
        ]
    found.append(
        Check(
            name="tokens generated",
            numbers={
                "log": sum(line.get("completion_tokens", 0) for line in log.requests),
                "metrics": int(total(metrics, "generation_tokens_total")),
            },
        )
    )
    return found


def _refusals(log: Log, metrics: Mapping[str, float]) -> list[Check]:
    counts = Counter(log.not_taken)
    counts.update(line["reason"] for line in log.requests if _outcome(line) == "refused")
    counted = by_label(metrics, "requests_refused_total", "reason")
    return [
        Check(
            name=f"refused, {reason}",
            numbers={"log": counts[reason], "metrics": int(counted.get(reason, 0))},
        )
        for reason in sorted({*counts, *counted})
        if counts[reason] or counted.get(reason)
    ]


def _at_rest(metrics: Mapping[str, float]) -> list[Check]:
    """What must be left of all of it: nothing but kept prefixes."""
    held = metrics["selfdraft_kv_pages_used"] - metrics["selfdraft_kv_pages_cached"]
    left = {
        "left running": metrics["selfdraft_requests_running"],
        "left waiting": metrics["selfdraft_requests_waiting"],
        "pages left that no kept prefix holds": held,
    }
    return [
        Check(name=name, numbers={"metrics": int(number), "expected": 0})
        for name, number in left.items()
    ]


def total(metrics: Mapping[str, float], name: str) -> float:
    """A family's sum over its labels."""
    name = f"selfdraft_{name}"
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def by_label(metrics: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """A family's samples by its only label."""
    start = f'selfdraft_{name}{{{label}="'
    return {
        key[len(start) :].removesuffix('"}'): value
        for key, value in metrics.items()
        if key.startswith(start)
    }
