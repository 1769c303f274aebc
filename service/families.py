"""What a metric is, and the closed sets that labels take their values from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from selfdraft.v1 import admin_pb2, selfdraft_pb2
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2

from scheduler.request import FinishReason, Refusal
from service.errors import Reason

PREFIX: Final = "selfdraft_"
ACCEPTANCE_WINDOW_S: Final = 60.0

LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
REQUEST: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GAP: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
LENGTH: Final = tuple(float(2**n) for n in range(19))
COUNT: Final = (1.0, 2.0, 4.0, 8.0, 16.0)

MODES: Final = (
    pb.SPECULATION_MODE_OFF,
    pb.SPECULATION_MODE_REJECTION,
    pb.SPECULATION_MODE_COUPLED,
)

EVICTIONS: Final = ("pages", "boundaries", "fault", "import", "flush", "engine_failed")
SESSION_ENDS: Final = ("ttl", "max_sessions", "tenant_max_sessions", *EVICTIONS)
"""Causes, each of which has a series before it occurs."""

SUCCESS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
}

REFUSALS: Final = (
    Reason.INVALID_ARGUMENT,
    Reason.DUPLICATE_REQUEST,
    Reason.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED,
    Reason.QUEUE_FULL,
    Reason.TENANT_LIMIT,
    Reason.DEADLINE_UNREACHABLE,
    Reason.TOO_MANY_CALLS,
    Reason.SLOW_SENDER,
    Reason.CANCELLED,
    Reason.DEADLINE_EXCEEDED,
    Reason.LOADING,
    Reason.DRAINING,
    Reason.ENGINE_FAILED,
    Reason.INTERNAL,
)
"""CANCELLED and DEADLINE_EXCEEDED: of calls whose client left before they were admitted."""

SCHEDULER_REFUSALS: Final = (*(str(reason) for reason in Refusal), "invalid", "not_running")

PHASES: Final = ("tokenizer", "model", "warm_up", "grammar")
"""What a server does before it serves."""

PARTS: Final = ("weights", "kv_pool", "rows", "boundaries", "transient", "padding", "reserve")
"""Lines of the engine's budget."""

RELOADED: Final = ("tls", "tokens")
DROPPED: Final = ("rate", "write")
SPAN_RESULTS: Final = ("exported", "failed")
MEMORY: Final = ("active", "peak", "cache")

_SERVICES: Final = (
    selfdraft_pb2.DESCRIPTOR.services_by_name["Inference"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS: Final[Mapping[str, str]] = {
    f"/{service.full_name}/{method.name}": f"{service.name}/{method.name}"
    for service in _SERVICES
    for method in service.methods
}
"""Label of every method that any server of ours has, by its path."""

UNKNOWN_METHOD: Final = "other"
CODES: Final = tuple(code.name for code in grpc.StatusCode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One label and what it may say."""

    name: str
    values: tuple[str, ...] = ()
    """All of them; () where configuration decides."""
    most: int = 0
    """Of those that configuration decides, how many there can be in one process."""
    origin: str = ""
    """Of those: where they come from."""

    @property
    def size(self) -> int:
        """Values there can be."""
        return len(self.values) or self.most


Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. `name` is without prefix, and a counter's without `_total`."""

    name: str
    kind: Kind
    unit: str
    text: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    loaded: bool = False
    """There only once the model is loaded."""

    @property
    def full_name(self) -> str:
        """As Prometheus knows it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def open_metrics_unit(self) -> str:
        """The unit, where the name ends in it: OpenMetrics wants that."""
        return self.unit if self.name.endswith(f"_{self.unit}") else ""

    @property
    def most_series(self) -> int:
        """Series there can be of it in one process."""
        of_one = len(self.buckets) + 3 if self.kind == "histogram" else 1  # +Inf, sum, count
        return of_one * math.prod(label.size for label in self.labels)
