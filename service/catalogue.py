"""Every metric, declared once: name, type, unit, labels with the values they may have, meaning.

`service.metrics` counts and `service.scrape` reads what is declared here and nothing else; the
table in deploy/metrics.md is printed from here (`selfdraft reference metrics`), and so is the bound
on the number of series: no client, request or model can add one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, get_args

from engine.plan import MAX_DEPTH, MtpGate
from scheduler.request import FinishReason, Priority
from scheduler.sequence import Preempted
from service.backend import State
from service.errors import Reason
from service.families import (
    ACCEPTANCE_WINDOW_S,
    CODES,
    COUNT,
    DROPPED,
    EVICTIONS,
    GAP,
    LATENCY,
    LENGTH,
    MEMORY,
    METHODS,
    MODES,
    PARTS,
    PHASES,
    REFUSALS,
    RELOADED,
    REQUEST,
    SCHEDULER_REFUSALS,
    SESSION_ENDS,
    SPAN_RESULTS,
    SUCCESS,
    TOKEN,
    UNKNOWN_METHOD,
    Family,
    Label,
)
from service.sampling import mode_name
from service.tenant import MAX_TENANTS
from service.text.grammar import Form


def _closed(name: str, values: Iterable[str]) -> Label:
    return Label(name=name, values=tuple(dict.fromkeys(values)))


def _fact(name: str) -> Label:
    return Label(name=name, most=1, origin="one value per process")


_TENANT: Final = Label(
    name="tenant", most=MAX_TENANTS + 1, origin="tenants with a policy of their own, and `other`"
)
_PRIORITY: Final = _closed("priority", (priority.name.lower() for priority in Priority))
_POSITION: Final = _closed("position", map(str, range(1, MAX_DEPTH + 1)))
_METHOD: Final = _closed("method", (*METHODS.values(), UNKNOWN_METHOD))


def _gauge(name: str, unit: str, text: str, *labels: Label) -> Family:
    return Family(name=name, kind="gauge", unit=unit, text=text, labels=labels)


def _counter(name: str, unit: str, text: str, *labels: Label) -> Family:
    return Family(name=name, kind="counter", unit=unit, text=text, labels=labels)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Family:
    return Family(name=name, kind="histogram", unit=unit, text=text, buckets=buckets)


_COUNTED: Final = (
    _histogram("time_to_first_token_seconds", "seconds", "Admission to first token.", LATENCY),
    _histogram(
        "inter_token_latency_seconds",
        "seconds",
        "Time per token after the first; a burst of n tokens after t seconds counts n times as "
        "t/n.",
        TOKEN,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "seconds",
        "Admission to end, of sequences that ended with stop or length.",
        REQUEST,
    ),
    _histogram(
        "request_queue_time_seconds", "seconds", "Admission to the first prefill chunk.", LATENCY
    ),
    _histogram(
        "request_prefill_time_seconds",
        "seconds",
        "First prefill chunk to first token, of sequences that had one.",
        LATENCY,
    ),
    _histogram(
        "request_decode_time_seconds",
        "seconds",
        "First token to last, of sequences that had one.",
        REQUEST,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "seconds",
        "Decode time over tokens after the first, once per sequence that had more than one.",
        TOKEN,
    ),
    _histogram(
        "request_prompt_tokens", "tokens", "Prompt length, of sequences that ended.", LENGTH
    ),
    _histogram(
        "request_generation_tokens", "tokens", "Output length, of sequences that ended.", LENGTH
    ),
    _histogram("request_params_n", "sequences", "n of Generate calls admitted.", COUNT),
    _histogram(
        "request_params_max_tokens",
        "tokens",
        "max_tokens of Generate calls admitted, the default included.",
        LENGTH,
    ),
    _histogram(
        "host_gap_seconds",
        "seconds",
        "Time the device sat idle between two steps that followed each other.",
        GAP,
    ),
    _histogram(
        "event_loop_lag_seconds",
        "seconds",
        "How much later than asked the event loop woke its watch, which asks four times a second.",
        LATENCY,
    ),
    _counter(
        "requests_refused",
        "calls",
        "Generate calls refused before admission, and calls whose token does not allow them.",
        _closed("reason", (reason.value for reason in REFUSALS)),
    ),
    _counter(
        "spec_decode_requests",
        "calls",
        "Generate calls admitted, by how their drafts are verified.",
        _closed("mode", map(mode_name, MODES)),
    ),
    _counter(
        "guided_requests",
        "calls",
        "Generate calls admitted whose text must have a form.",
        _closed("form", get_args(Form)),
    ),
    _counter(
        "errors",
        "calls",
        "Calls of any method that ended with an error of ours, by its reason.",
        _closed("reason", (reason.value for reason in Reason)),
    ),
    _counter(
        "grpc_calls",
        "calls",
        "Calls that ended, by method and gRPC status. `other`: methods there are none of.",
        _METHOD,
        _closed("code", CODES),
    ),
    _gauge("grpc_calls_in_flight", "calls", "Calls being answered, streams included.", _METHOD),
)

_ALWAYS: Final = (
    _gauge("build_info", "1", "The running server; always 1.", _fact("version")),
    _gauge(
        "server_state",
        "1",
        "1 for the state the server is in. Health says SERVING in `serving` only.",
        _closed("state", (state.value for state in State)),
    ),
    _gauge(
        "load_seconds",
        "seconds",
        "Time the start took, by phase; 0 until a phase is over.",
        _closed("phase", PHASES),
    ),
    _gauge(
        "event_loop_stall_seconds",
        "seconds",
        "How long the event loop's watch is overdue at this moment; 0 when it is not.",
    ),
    _counter(
        "reloads",
        "files",
        "Changes of files that the server watches, by whether they could be used.",
        _closed("what", RELOADED),
        _closed("result", ("ok", "failed")),
    ),
    _gauge(
        "tls_certificate_expiry_timestamp_seconds",
        "seconds",
        "When the server's certificate ends, in seconds since the epoch; 0 without TLS.",
    ),
    _counter(
        "log_lines_dropped",
        "lines",
        "Log lines not written: `rate` where strangers could have filled the disk, `write` where "
        "standard error did not take them.",
        _closed("cause", DROPPED),
    ),
    _counter(
        "spans",
        "spans",
        "OpenTelemetry spans, by whether the collector took them.",
        _closed("result", SPAN_RESULTS),
    ),
)

_MODEL: Final = (
    _gauge(
        "model_info",
        "1",
        "The served model; always 1.",
        *map(_fact, ("model", "family", "dtype", "quantization", "device", "mtp_layers")),
        *map(_fact, ("max_depth", "context_length")),
    ),
    _gauge(
        "mtp_gate",
        "1",
        "1 for what the check of the MTP head at load found: `none` without a head, `unmeasured` "
        "where it was told to trust it.",
        _closed("result", (gate.value for gate in MtpGate)),
    ),
    _gauge(
        "mtp_gate_acceptance_ratio",
        "ratio",
        "First drafts accepted in that check, 0 to 1; NaN where nothing was measured.",
    ),
    _gauge(
        "memory_planned_bytes",
        "bytes",
        "The engine's memory budget, by part.",
        _closed("part", PARTS),
    ),
    _gauge(
        "device_memory_bytes",
        "bytes",
        "MLX's memory after the newest step: in use, the most ever, and freed but kept.",
        _closed("kind", MEMORY),
    ),
)

_SCHEDULER: Final = (
    _gauge("requests_running", "requests", "Requests with a row."),
    _gauge("requests_waiting", "requests", "Requests in the queue."),
    _gauge("requests_preempted_waiting", "requests", "Requests in the queue that have run before."),
    _gauge("requests_paused", "requests", "Running requests whose reader lags."),
    _gauge("rows", "rows", "Rows that may hold recurrent state at once."),
    _gauge("rows_used", "rows", "Rows that hold recurrent state, ended ones not yet let go too."),
    _gauge("kv_pages", "pages", "KV cache pages."),
    _gauge("kv_pages_used", "pages", "KV cache pages in use."),
    _gauge("kv_pages_peak", "pages", "Most KV cache pages ever in use."),
    _gauge("kv_pages_cached", "pages", "KV cache pages that only kept prefixes hold."),
    _gauge("kv_cache_usage_ratio", "ratio", "KV cache pages in use over all, 0 to 1."),
    _gauge("tokens_per_second", "tokens per second", "Tokens generated per second, recently."),
    _gauge(
        "spec_decode_acceptance_rate",
        "ratio",
        f"Accepted over drafted tokens of the last {ACCEPTANCE_WINDOW_S:.0f} s; NaN without.",
    ),
    _gauge("spec_decode_depth", "drafts", "Drafts per cycle in the newest cycle."),
    _gauge(
        "requests_waiting_by_priority",
        "requests",
        "Requests in the queue, by the priority they came with.",
        _PRIORITY,
    ),
    _gauge(
        "queue_oldest_wait_seconds",
        "seconds",
        "How long the oldest of them has waited; 0 without any.",
        _PRIORITY,
    ),
    _counter(
        "tenant_tokens",
        "tokens",
        "Tokens served, prefilled and generated, by tenants with a policy and all others.",
        _TENANT,
    ),
    _gauge(
        "tenant_boundaries",
        "boundaries",
        "Boundaries held of what a tenant's requests left.",
        _TENANT,
    ),
    _gauge("tenant_sessions", "sessions", "Sessions of a tenant that keep something.", _TENANT),
    _counter(
        "tenant_refused",
        "requests",
        "Requests that the scheduler did not take, by whose they were and what stood against them.",
        _TENANT,
        _closed("reason", SCHEDULER_REFUSALS),
    ),
    _counter("prompt_tokens", "tokens", "Prompt tokens prefilled."),
    _counter("generation_tokens", "tokens", "Tokens generated for streams."),
    _counter("discarded_tokens", "tokens", "Tokens generated for requests that had ended."),
    _counter(
        "preemptions",
        "rows",
        "Rows given up, to be computed again.",
        _closed("cause", (cause.value for cause in Preempted)),
    ),
    _counter("recomputed_tokens", "tokens", "Positions computed again after preemptions."),
    _counter("requests_admitted", "sequences", "Sequences admitted."),
    _counter("steps", "steps", "Engine steps."),
    _counter(
        "cycles",
        "cycles",
        "Decode cycles, by their depth.",
        _closed("depth", map(str, range(MAX_DEPTH + 1))),
    ),
    _counter(
        "cycle_seconds",
        "seconds",
        "Time spent in engine steps: build (host), wait (host, on the device), device.",
        _closed("phase", ("build", "wait", "device")),
    ),
    _counter(
        "token_gap_exceeded",
        "steps",
        "Steps with a decode cycle that took longer than --max-token-gap.",
    ),
    _counter(
        "contended_seconds",
        "seconds",
        "Time of steps in which rows decoded and prompts waited, under --max-token-gap: prefill is "
        "to have --prefill-share of it.",
        _closed("work", ("prefill", "decode")),
    ),
    _gauge(
        "mixed_step_error_ratio",
        "ratio",
        "Error of the estimated time of steps with prompts and a cycle, over the time; smoothed.",
    ),
    _counter("spec_decode_drafts", "row cycles", "Row cycles that drafted."),
    _counter("spec_decode_draft_tokens", "tokens", "Drafts up for acceptance."),
    _counter("spec_decode_accepted_tokens", "tokens", "Drafts accepted."),
    _counter(
        "spec_decode_draft_tokens_per_pos",
        "tokens",
        "Drafts up for acceptance, by position in the draft, 1 first; a draft stands only with all "
        "before it.",
        _POSITION,
    ),
    _counter(
        "spec_decode_accepted_tokens_per_pos",
        "tokens",
        "Drafts accepted, by position in the draft, 1 first; a draft stands only with all before "
        "it.",
        _POSITION,
    ),
    _counter("prefix_lookups", "prompts", "Prompts for which a kept prefix was sought."),
    _counter("prefix_hits", "prompts", "Prompts that started from a kept prefix."),
    _counter("prefix_cached_tokens", "tokens", "Prompt tokens whose prefill a kept prefix saved."),
    _counter(
        "prefix_evictions",
        "prefixes",
        "Kept prefixes let go.",
        _closed("cause", EVICTIONS),
    ),
    _gauge("sessions", "sessions", "Sessions for which something is kept."),
    _counter(
        "sessions_ended",
        "sessions",
        "Sessions that ended before their client said so.",
        _closed("cause", SESSION_ENDS),
    ),
    _gauge("boundaries", "boundaries", "Boundaries (states to go on from) there is room for."),
    _gauge("boundaries_used", "boundaries", "Boundaries held."),
    _counter(
        "request_success",
        "sequences",
        "Requests that ended well.",
        _closed("finish_reason", SUCCESS.values()),
    ),
    _counter(
        "requests_cancelled",
        "sequences",
        "Requests ended early, faults included.",
        _closed("reason", (reason.value for reason in FinishReason if reason not in SUCCESS)),
    ),
)


CATALOGUE: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        *_COUNTED,
        *_ALWAYS,
        *(replace(family, loaded=True) for family in (*_MODEL, *_SCHEDULER)),
    )
}
"""By name."""

PUSHED: Final = frozenset(family.name for family in _COUNTED)
"""Counted where they happen, by `service.metrics`; the others are read when Prometheus asks."""


def most_series() -> int:
    """Series that one process can have, `process_*` aside, whatever its clients do."""
    return sum(family.most_series for family in CATALOGUE.values())


def _label_text(label: Label) -> str:
    if not label.values:
        return f"`{label.name}`: {label.origin}"
    if label.name == "method":
        return "`method`: Service/Method of every service there is, and `other`"
    if label.name == "code":
        return "`code`: names of gRPC's status codes"
    if label.values == tuple(reason.value for reason in Reason):
        return f"`{label.name}`: those of [proto/README.md](../proto/README.md#errors)"
    if all(value.isdecimal() for value in label.values):
        return f"`{label.name}`: {label.values[0]} … {label.values[-1]}"
    return f"`{label.name}`: {', '.join(label.values)}"


def table() -> str:
    """The catalogue as Markdown; deploy/metrics.md holds it, and a test compares."""
    rows = ["| name | type | unit | labels | means |", "|---|---|---|---|---|"]
    for family in CATALOGUE.values():
        labels = "; ".join(map(_label_text, family.labels)) or "–"
        rows.append(
            f"| `{family.full_name}` | {family.kind} | {family.unit} | {labels} | {family.text} |"
        )
    return "\n".join(rows) + "\n"
