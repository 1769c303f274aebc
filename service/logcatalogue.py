"""Every event and every field of the log, declared once; deploy/logs.md is printed from here
(`selfdraft reference logs`), and tests hold what is written to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the line about a request."""

    name: str
    unit: str
    when: str
    text: str


_ADMITTED: Final = "admitted"
_GIVEN: Final = "admitted, and given"
_RAN: Final = "accepted by the scheduler"

COMMON: Final = (
    Field("event", "–", "always", "what the line is about"),
    Field("level", "–", "always", "debug, info, warning, error or critical"),
    Field("timestamp", "UTC, ISO 8601", "always", "when the line was written"),
    Field("suppressed", "lines", "some were left out", "lines of this kind not written before it"),
)
"""Fields of every line."""

REQUEST: Final = (
    Field("request_id", "–", "always", "the client's, or one made here; `(refused)` if absurd"),
    Field("method", "–", "always", "the RPC: Inference/Generate, or the gateway's"),
    Field("status", "–", "always", "gRPC status the call ended with"),
    Field("reason", "–", "always", "finish reasons of a good end, else the error's reason"),
    Field("detail", "–", "ended with an error", "its message; of a bad request its fields' names"),
    Field("peer", "–", "always", "the client's address, or the proxy's"),
    Field("tenant", "–", "there is one", "on whose account it went"),
    Field("total_s", "s", "always", "arrival to end of the call"),
    Field(
        "trace_id", "–", "in a trace", "of the client's `traceparent`, or of the trace begun here"
    ),
    Field("parent_span_id", "–", "the client sent a `traceparent`", "the client's span"),
    Field("trace_flags", "hex", "the client sent a `traceparent`", "01: it may be recorded"),
    Field("span_id", "–", "spans are exported", "the call's own span"),
    Field("input", "–", _ADMITTED, "text, tokenized or chat"),
    Field("n", "sequences", _ADMITTED, "sequences asked for"),
    Field("max_tokens", "tokens", _ADMITTED, "of each, the default included"),
    Field("temperature", "1", _ADMITTED, ""),
    Field("top_p", "1", _ADMITTED, ""),
    Field("top_k", "tokens", _ADMITTED, "0: all"),
    Field("min_p", "1", _ADMITTED, ""),
    Field("seed", "–", _ADMITTED, "the request's, or one drawn for it"),
    Field("speculation", "–", _ADMITTED, "how drafts are verified: rejection, coupled or off"),
    Field("depth_cap", "drafts", _ADMITTED, "null: the server's"),
    Field("min_tokens", "tokens", _GIVEN, ""),
    Field("repetition_penalty", "1", _GIVEN, ""),
    Field("frequency_penalty", "1", _GIVEN, ""),
    Field("presence_penalty", "1", _GIVEN, ""),
    Field("logit_bias_tokens", "tokens", _GIVEN, "biased ones"),
    Field("logprobs", "tokens", _GIVEN, "alternatives reported with each"),
    Field("prompt_logprobs", "tokens", _GIVEN, "the same for the prompt"),
    Field(
        "constraint", "–", _GIVEN, "json_schema, regex, grammar or structural_tag; never its text"
    ),
    Field("session_id", "–", _GIVEN, ""),
    Field("reuse_prefix", "–", "admitted, and false", ""),
    Field("priority", "–", _GIVEN, "batch or interactive"),
    Field("ends", "–", _RAN, "how each sequence ended, as metrics count it"),
    Field("prompt_tokens", "tokens", _RAN, "of all sequences"),
    Field("cached_tokens", "tokens", _RAN, "of these, taken from a kept prefix"),
    Field("completion_tokens", "tokens", _RAN, "generated"),
    Field("delivered_tokens", "tokens", _RAN, "taken by the client"),
    Field("queue_s", "s", _RAN, "admission to first prefill chunk; null: it never began"),
    Field("ttft_s", "s", _RAN, "admission to first token; null without one"),
    Field("e2e_s", "s", _RAN, "admission to end"),
    Field("tokens_per_s", "tokens/s", _RAN, "after the first token; null where undefined"),
    Field("cycles", "cycles", _RAN, "decode cycles that brought something"),
    Field("preemptions", "–", _RAN, "times it gave up its row"),
    Field("spec_draft_tokens", "tokens", _RAN, "drafts up for acceptance"),
    Field("spec_accepted_tokens", "tokens", _RAN, "drafts accepted"),
    Field("acceptance", "ratio", _RAN, "accepted over drafted; null without drafts"),
    Field("spec_draft_tokens_per_pos", "tokens", _RAN, "by position in the draft"),
    Field("spec_accepted_tokens_per_pos", "tokens", _RAN, "by position in the draft"),
)
"""Fields of the line `request`, of which each Generate call has one, at its end."""


@dataclass(frozen=True, slots=True)
class Event:
    """Another kind of line."""

    name: str
    level: str
    fields: tuple[str, ...]
    text: str


_SETTINGS: Final = (
    *("version", "model", "host", "port", "metrics_port", "tls", "client_certificates", "tokens"),
    *("gateway", "max_rows", "max_queue", "depth", "max_token_gap_s", "prefix_cache", "tenants"),
    *("kv_memory_bytes", "context", "deterministic", "drain_s", "otlp_endpoint"),
)
_FACTS: Final = (
    *("model", "address", "metrics", "family", "device", "dtype", "quantization"),
    *("context_length", "kv_pages", "max_depth", "mtp_gate", "load_s"),
)

EVENTS: Final = (
    Event("starting", "info", _SETTINGS, "settings as they will be used"),
    Event("memory", "info", ("part", "size", "note"), "one line of the engine's budget"),
    Event("engine note", "info", ("note",), "why something is off, what a check found"),
    Event("serving", "info", _FACTS, "the model is loaded, requests are taken"),
    Event("health", "info", ("serving",), "what probes are told has changed"),
    Event("security", "info or warning", ("note",), "what an operator should know of its keys"),
    Event("reloaded", "info", ("what",), "a changed file is in use"),
    Event(
        "not reloaded, the last good one stays",
        "warning",
        ("what", "why"),
        "a changed file cannot be used",
    ),
    Event(
        "the tokenizer has more tokens than the model", "warning", ("tokenizer", "model"), "sizes"
    ),
    Event("cost table ignored", "warning", ("reason",), "it is not of this machine or model"),
    Event("cost table not saved", "warning", ("path", "reason"), "the disk did not take it"),
    Event(
        "call refused",
        "warning",
        ("reason", "service", "peer", "before"),
        "a token was missing or not enough; at most one a second, `before` counts those between",
    ),
    Event(
        "call not taken",
        "warning",
        ("reason", "detail", "method", "peer"),
        "it ended before its message was read: too large, too slow, no message, one call too many",
    ),
    Event(
        "calls not taken",
        "warning",
        ("reason", "methods", "calls"),
        "more of the same, in the second before: `generate`, or `other` methods",
    ),
    Event(
        "few open files allowed: fewer connections",
        "warning",
        ("max_connections", "open_files"),
        "the process's limit leaves room for these only",
    ),
    Event(
        "prefix cache flushed", "info", ("boundaries", "sessions", "pages", "bytes"), "by an admin"
    ),
    Event("session exported", "info", ("tenant", "name", "session_id", "tokens"), "by an admin"),
    Event("session imported", "info", ("tenant", "name", "session_id", "tokens"), "by an admin"),
    Event("session file refused", "warning", ("why",), "of another model or version, or damaged"),
    Event("session file failed", "error", ("why",), "the disk did not take or give it"),
    Event("slow event loop", "warning", ("lag_s",), "it came a second late or more"),
    Event(
        "lines suppressed",
        "warning",
        ("kind", "suppressed"),
        "lines of an event left out, where no later one tells of it",
    ),
    Event(
        "library message",
        "warning and up",
        ("library", "message", "exception"),
        "what a library logged",
    ),
    Event("unexpected error", "error", ("exception",), "a defect of ours, with its traceback"),
    Event("draining", "info", ("limit_s", "running"), "a stop was asked for"),
    Event("drained", "info", ("took_s", "left"), "`left` calls were dropped"),
    Event("spans not flushed", "warning", ("limit_s",), "the collector did not take the last ones"),
    Event("the engine failed", "error", ("failure",), "the process ends with a code other than 0"),
    Event("stopped", "info", (), "a clean end"),
)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell or '–' for cell in cells)} |"


def request_table() -> str:
    """Fields of the request line, as Markdown."""
    rows = [_row("field", "unit", "when", "means"), "|---|---|---|---|"]
    rows += [_row(f"`{f.name}`", f.unit, f.when, f.text) for f in (*COMMON, *REQUEST)]
    return "\n".join(rows) + "\n"


def event_table() -> str:
    """The other events, as Markdown."""
    rows = [_row("event", "level", "fields", "means"), "|---|---|---|---|"]
    for event in EVENTS:
        fields = ", ".join(f"`{name}`" for name in event.fields)
        rows.append(_row(event.name, event.level, fields, event.text))
    return "\n".join(rows) + "\n"
