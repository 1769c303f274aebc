"""What a soak has shown, as JSON and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tests.benchmarks.soak.crowd import Crowd
from tests.benchmarks.soak.ledger import Call, Check
from tests.benchmarks.soak.probe import Probe
from tests.benchmarks.soak.samples import Growth, Sample
from tests.benchmarks.soak.scale import Scale

HEALTH_LIMIT_S: Final = 10.0
"""The longest that a health check may take, whatever goes on."""
FILES_SLACK: Final = 12
"""Open files above those before the first call: connections of the clients that look on."""


TOLERATED: Final = ("data of stream 0: left open", "huge headers: status 0")
"""What gRPC bears with. Such a connection is closed for its idleness, minutes later; metadata
above the limit are sometimes taken, and go with their call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One soak."""

    scale: Scale
    seconds: float
    crowd: Crowd
    calls: Sequence[Call]
    well_behaved: int
    """How many of the calls were theirs."""
    first_token_s: Sequence[float]
    probe: Probe
    newcomer_after: bool
    """A client that came after all attacks was let in."""
    unexpected: Sequence[str]
    hostile: Mapping[str, Mapping[str, int]]
    samples: Sequence[Sample]
    idle: Sample
    at_rest: Sample
    growth: Growth
    checks: Sequence[Check]

    def faults(self) -> list[str]:
        """Everything that is not as it must be; empty when the server stood the soak."""
        scale, found = self.scale, list(self.unexpected)
        found += [f"{c.name}: {dict(c.numbers)} {c.examples}" for c in self.checks if not c.holds]
        if self.crowd.running < scale.rows:
            found.append(f"only {self.crowd.running} of {scale.rows} streams ran at once")
        if self.crowd.waiting < scale.waiting:
            found.append(f"only {self.crowd.waiting} of {scale.waiting} requests waited at once")
        if not self.crowd.refused:
            found.append("the full queue refused nobody")
        if self.probe.failures:
            found.append(f"health or load not told: {self.probe.failures[:3]}")
        if max(self.probe.health_s) > HEALTH_LIMIT_S:
            found.append(f"a health check took {max(self.probe.health_s):.1f} s")
        if not self.newcomer_after:
            found.append("no new client was let in after the attacks")
        if self.at_rest.files > self.idle.files + FILES_SLACK:
            found.append(f"open files: {self.idle.files} before, {self.at_rest.files} after")
        if not self.growth.flat(scale):
            found.append(f"memory grows: {self.growth}")
        lost = [
            call
            for call in self.calls[: self.well_behaved]
            if call.status == "UNAVAILABLE" and not call.reason
        ]
        if lost:
            found.append(f"{len(lost)} well-behaved calls lost their connection")
        return found + self._unclear()

    def _unclear(self) -> list[str]:
        """Hostile acts that were not answered as they must be."""
        found = []
        too_large = self.hostile["too large"]
        if not too_large.get("RESOURCE_EXHAUSTED, clear"):
            found.append("no message that is too large was refused")
        for what, count in too_large.items():
            if what not in ("RESOURCE_EXHAUSTED, clear", "no connection"):
                found.append(f"{count} messages that are too large: {what}")
        for kind in ("garbage", "floods"):
            for what, count in self.hostile[kind].items():
                if what in TOLERATED:
                    continue
                if what.endswith(("left open", "status silence", "status 0")):
                    found.append(f"{count} × {what}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything but the calls one by one."""
        return {
            "scale": asdict(self.scale),
            "seconds": self.seconds,
            "crowd": asdict(self.crowd),
            "calls": self.outcomes(),
            "kinds": dict(Counter(call.kind for call in self.calls)),
            "first_token_s": percentiles(self.first_token_s),
            "health_s": percentiles(self.probe.health_s),
            "get_loads_s": percentiles(self.probe.loads_s),
            "new_connection_s": percentiles(self.probe.reconnect_s),
            "turned_away": self.probe.turned_away,
            "hostile": {kind: dict(counts) for kind, counts in self.hostile.items()},
            "growth": asdict(self.growth) | {"flat": self.growth.flat(self.scale)},
            "idle": self.idle.as_json(),
            "at_rest": self.at_rest.as_json(),
            "samples": [sample.as_json() for sample in self.samples],
            "checks": [
                {"name": check.name, "numbers": dict(check.numbers), "holds": check.holds}
                for check in self.checks
            ],
            "faults": self.faults(),
        }

    def outcomes(self) -> dict[str, int]:
        """Calls by what their clients saw."""
        counts = Counter(
            call.reason or (call.status if call.status else "left") for call in self.calls
        )
        return dict(counts.most_common())

    def markdown(self) -> str:
        """Tables for a page."""
        sizes = [sample.rss_mb for sample in self.samples]
        marks = [self.samples[len(sizes) * n // 6] for n in range(6)] + [self.at_rest]
        growth, loads = self.growth, percentiles(self.probe.loads_s)
        health, first = percentiles(self.probe.health_s), percentiles(self.first_token_s)
        rows = [
            ("seconds", f"{self.seconds:g}"),
            ("`Generate` calls", f"{len(self.calls):,}"),
            ("running, waiting at once", f"{self.crowd.running}, {self.crowd.waiting:,}"),
            ("refused by the full queue", f"{self.crowd.refused}"),
            ("memory, MB (at s)", ", ".join(f"{s.rss_mb:.0f} ({s.at:.0f})" for s in marks)),
            ("peak", f"{max(sizes):.0f} MB"),
            (
                "slope after the first third",
                f"{growth.slope_mb_h:+.1f} ± {growth.error_mb_h:.1f} MB/h, noise "
                f"{growth.noise_mb:.1f} MB; thirds {growth.middle_mb:.0f}, {growth.last_mb:.0f} MB",
            ),
            (
                "open files: before, most, after",
                f"{self.idle.files}, {max(s.files for s in self.samples)}, {self.at_rest.files}",
            ),
            ("threads: before, after", f"{self.idle.threads}, {self.at_rest.threads}"),
            ("health check p50, p99, most", _spread(health)),
            ("`GetLoads` p50, p99, most", _spread(loads)),
            ("TTFT of plain calls p50, p99, most", _spread(first)),
        ]
        lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        lines += ["", "| must be equal | | |", "|---|---|---|"]
        for check in self.checks:
            numbers = ", ".join(f"{whose} {number:,}" for whose, number in check.numbers.items())
            lines.append(f"| {check.name} | {numbers} | {'yes' if check.holds else '**NO**'} |")
        return "\n".join(lines) + "\n"


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Seconds; empty for none."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0), "count": len(values)}


def _spread(found: Mapping[str, float]) -> str:
    if not found:
        return "none"
    return ", ".join(f"{found[name]:.3f} s" for name in ("p50", "p99", "max"))
