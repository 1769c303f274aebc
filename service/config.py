"""Everything an operator can set, in one frozen tree. No environment variable is read anywhere.

A value out of range raises `SettingError` (a ValueError) that names the field and its limit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from engine.config import EngineConfig
from engine.plan import MAX_STOP_IDS
from scheduler.config import SchedulerConfig

LogFormat = Literal["json", "pretty"]


class SettingError(ValueError):
    """A setting is out of range."""

    def __init__(self, name: str, limit: str) -> None:
        super().__init__(f"{name}: {limit}")
        self.name = name
        self.limit = limit


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """Bounds on compiling one grammar, and on keeping compiled ones."""

    max_chars: int = 131_072
    """Characters of a grammar."""
    max_depth: int = 64
    """Nesting of a JSON schema."""
    timeout_s: float = 5.0
    """Seconds that compiling may take, waiting for a turn included."""
    memory_bytes: int = 1 << 30
    """Address space of the process that tries a grammar first (where the system can limit it)."""
    at_once: int = 2
    """Grammars compiled at the same time. Where tenants have policies, one tenant has at most all
    but one of these turns; with a single one, others wait for its grammar to end."""
    cached: int = 64
    """Compiled grammars kept; the least recently used one goes of the tenant that has most."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_chars", "max_depth", "at_once", "cached")
        _at_least(self, 1 << 26, "memory_bytes")
        _positive(self, "timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds on a single request, besides the model's own."""

    default_max_tokens: int = 4096
    """max_tokens of a request that names none. A forgotten limit should not hold a row until the
    context is full."""

    max_stop_strings: int = 16
    """Stop strings per request. Each costs work per character of output."""

    max_stop_string_chars: int = 256
    """Characters per stop string. As many may be held back from the stream."""

    max_stop_ids: int = MAX_STOP_IDS
    """Stop token ids per request, the model's end tokens included; the engine's limit is 64."""

    max_request_id_chars: int = 128
    """Characters of a request or session id. They appear in the log line of the request."""

    max_n: int = 16
    """Sequences one request may ask for. Each takes a row and a place in the queue."""

    max_text_chars: int = 4_000_000
    """Characters of a text or chat input. Longer ones are refused before they are tokenized."""

    max_messages: int = 4096
    """Messages of a chat: each costs the template work, empty or not."""

    max_role_chars: int = 64
    """Characters of a message's role."""

    max_template_bytes: int = 65_536
    """Bytes of the further variables a request gives the chat template."""

    max_tools: int = 128
    """Functions a chat may offer. Each becomes prompt text."""

    max_tools_chars: int = 262_144
    """Characters of their descriptions together, as JSON: parsed before any template sees them."""

    max_json_depth: int = 64
    """Nesting of that JSON and of `tool_calls`. Templates recurse into it."""

    max_documents: int = 256
    """Documents of a chat. Their characters count as those of messages."""

    max_content_parts: int = 256
    """Parts of one message."""

    max_tool_call_id_chars: int = 128
    """Characters of the id of a tool call."""

    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    """Bounds on a JSON schema, regular expression or grammar, and on compiling it."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "default_max_tokens", "max_request_id_chars", "max_text_chars")
        _at_least(self, 1, "max_n", "max_messages", "max_role_chars")
        _at_least(self, 1, "max_json_depth", "max_tool_call_id_chars")
        _at_least(self, 0, "max_template_bytes", "max_tools", "max_tools_chars", "max_documents")
        _at_least(self, 0, "max_content_parts")
        _at_least(self, 0, "max_stop_strings", "max_stop_string_chars", "max_stop_ids")
        if self.max_stop_ids > MAX_STOP_IDS:
            raise SettingError("max_stop_ids", f"must be at most {MAX_STOP_IDS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The network side."""

    host: str = "127.0.0.1"
    """Address to listen on, or a name of one. Beyond loopback it needs TLS or `insecure`."""

    insecure: bool = False
    """Listen in plain text where other machines reach it: on a trusted network, or behind a proxy
    that encrypts. Never the default, because prompts and tokens would travel readable."""

    port: int = 50051
    """gRPC port; 0 takes a free one, which the server reports."""

    metrics_port: int | None = 9464
    """Port of the Prometheus endpoint; 0 takes a free one, None serves none."""

    metrics_host: str | None = None
    """Address of the Prometheus endpoint, which is plain HTTP with numbers and the model's name,
    never prompts. None: that of gRPC where it is loopback or `insecure`, else 127.0.0.1."""

    gateway: bool = True
    """Speak the Shepherd Model Gateway's protocol on the gRPC port as well."""

    max_concurrent_rpcs: int = 1024
    """Calls served at once, streams included; more are refused with RESOURCE_EXHAUSTED. Health
    checks are answered beyond it."""

    max_connections: int = 4096
    """Connections at once; further ones are closed as they come. Each takes a file descriptor, and
    without any left nobody could connect: what the process may open bounds it too."""

    max_connection_idle_s: float = 300.0
    """A connection without a call for this long is closed, so that idle ones do not fill
    `max_connections`. Clients reconnect with their next call."""

    handshake_timeout_s: float = 20.0
    """A connection that has not begun to speak HTTP/2 by then is closed."""

    message_timeout_s: float = 30.0
    """A call whose message has not come whole by then ends with SLOW_SENDER: it counts as one of
    `max_concurrent_rpcs` and holds nothing else."""

    max_open_calls: int = 128
    """Health watches and reflection streams at once, and as many calls of theirs whose message has
    not come: of more, the oldest is given up. They need no token, or any tenant's, and do not count
    in `max_concurrent_rpcs`."""

    max_message_bytes: int = 16 * 1024 * 1024
    """Largest message in either direction, in bytes."""

    min_ping_interval_s: float = 10.0
    """Client pings closer together than this are answered by closing the connection. gRPC's own
    default is 300 s and cuts off clients that ping a silent stream every 30 s."""

    keepalive_s: float = 60.0
    """The server pings a connection that was silent this long, to notice dead clients."""

    keepalive_timeout_s: float = 20.0
    """A ping unanswered for this long ends the connection and its requests."""

    max_connection_age_s: float | None = 3600.0
    """Age at which a client is asked to reconnect, so that load spreads when a fleet grows. None:
    never."""

    max_connection_age_grace_s: float = 600.0
    """Seconds a connection past its age may finish its streams."""

    drain_s: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""

    write_timeout_s: float = 60.0
    """A single message that a client does not take for this long ends its stream."""

    retry_after_s: float = 2.0
    """What a client is told to wait when the server is loading or draining."""

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise SettingError(name, "must be in 0 … 65535")
        if not self.host:
            raise SettingError("host", "must not be empty")
        if self.metrics_host == "":
            raise SettingError("metrics_host", "must not be empty")
        _at_least(self, 1, "max_concurrent_rpcs", "max_open_calls", "max_connections")
        _at_least(self, 1024, "max_message_bytes")
        _positive(self, "min_ping_interval_s", "keepalive_s", "keepalive_timeout_s")
        _positive(self, "max_connection_age_grace_s", "write_timeout_s", "retry_after_s")
        _positive(self, "max_connection_idle_s", "handshake_timeout_s", "message_timeout_s")
        if self.max_connection_age_s is not None:
            _positive(self, "max_connection_age_s")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise SettingError("drain_s", "must be >= 0 seconds")

    @property
    def transport_calls(self) -> int:
        """Calls at which gRPC itself refuses more: enough above `max_concurrent_rpcs` for health
        checks, and for refusals with a reason."""
        return 2 * self.max_concurrent_rpcs + self.max_open_calls

    def grpc_options(self) -> list[tuple[str, int]]:
        """The gRPC channel arguments that say the same."""
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.min_ping_interval_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # Two servers on one port would share its connections at random.
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_connection_idle_ms", _ms(self.max_connection_idle_s)),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_timeout_s)),
            # Of one connection; a client keeps back what is more until others have ended. Twice
            # as many, for health checks are to pass when all calls are taken.
            ("grpc.max_concurrent_streams", 2 * self.max_concurrent_rpcs),
            # Calls that came in one go and wait for the event loop. gRPC's own bounds, 1000 and
            # 3000, would end some of them unseen.
            ("grpc.server.max_pending_requests", self.transport_calls),
            ("grpc.server.max_pending_requests_hard_limit", self.transport_calls),
        ]
        if self.max_connection_age_s is not None:
            options += [
                ("grpc.max_connection_age_ms", _ms(self.max_connection_age_s)),
                ("grpc.max_connection_age_grace_ms", _ms(self.max_connection_age_grace_s)),
            ]
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of the gRPC port. Read again when they change."""

    cert: Path
    """The server's certificate, then those between it and its root."""
    key: Path
    """Its private key, without a password."""
    client_ca: Path | None = None
    """Roots of client certificates: with them a client must show one (mTLS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Who may do what."""

    tls: TlsFiles | None = None
    """None: plain text, which only loopback may have without `ServerConfig.insecure`."""

    tokens: Path | None = None
    """TOML file of bearer tokens' hashes (see `service.tokens`). None: whoever reaches the port may
    generate, all as one tenant."""

    open_reflection: bool = True
    """Answer grpc.reflection without a token: the API is public, and tools need it before a call
    can be made. Health checks are always open."""

    share_prefixes_between_tenants: bool = False
    """Let a tenant start from a prefix that another one left. Off, because time to first token
    tells whether somebody else has sent the same beginning; on, a system prompt that all have in
    common is computed once. Without `tokens` there is one tenant, and nothing to keep apart."""

    session_dir: Path | None = None
    """Folder for sessions that an admin exports and imports by name; None turns both off. One
    server writes to it."""

    def cache_salt(self, tenant: str) -> str:
        """What keeps a tenant's prefixes apart from others' (`GenerationRequest.cache_salt`)."""
        return "" if self.share_prefixes_between_tenants else tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Export of OpenTelemetry spans. They hold numbers and ids, never prompts or texts."""

    endpoint: str
    """host:port of a collector that takes OTLP over gRPC."""

    insecure: bool = False
    """Send in plain text to another machine. To this one it is plain text unless `ca` is given."""

    ca: Path | None = None
    """PEM file: whom to trust; None: the authorities that gRPC brings along."""

    ratio: float = 1.0
    """Share of the calls without a `traceparent` that are recorded, 0 … 1; of the others their
    client has decided."""

    max_queue: int = 2048
    """Spans that wait for the collector; more are dropped. A call makes up to four."""

    flush_s: float = 3.0
    """Seconds that a stop waits for the last spans to be taken."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):\d{1,5}", self.endpoint):
            raise SettingError("otlp_endpoint", f"must be host:port, is {self.endpoint!r}")
        if not 0 <= self.ratio <= 1:
            raise SettingError("trace_ratio", "must be in 0 … 1")
        if self.insecure and self.ca is not None:
            raise SettingError("otlp_insecure", "not together with a CA: that is for TLS")
        _at_least(self, 1, "max_queue")
        _positive(self, "flush_s")

    @property
    def host(self) -> str:
        """The endpoint's."""
        return self.endpoint.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One server, whole."""

    engine: EngineConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tracing: TracingConfig | None = None
    """None: no spans."""
    log_format: LogFormat = "pretty"
    log_all: bool = False
    """A line for every call, also for those of a flood that got no token."""
    cost_table: Literal["auto", "off"] | Path = "off"
    """What decode cycles cost: a file that `selfdraft tune` wrote, or `auto` for the user's cache,
    where a clean stop also leaves what was learnt. Used at depth `auto` only."""
    model_name: str | None = None
    """Name the model is served under; None takes the engine's."""

    def __post_init__(self) -> None:
        if self.log_format not in ("json", "pretty"):
            raise SettingError("log_format", "must be 'json' or 'pretty'")
        if not isinstance(self.cost_table, Path) and self.cost_table not in ("auto", "off"):
            raise SettingError("cost_table", "must be 'auto', 'off' or a Path")
        if self.engine.deterministic and self.scheduler.max_token_gap_s is not None:
            raise SettingError("max_token_gap", "cuts prompts by time: not with deterministic")


_UNITS: Final = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS_DECIMAL: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """'512MiB', '2 GiB', '1.5GB' or '1048576' as bytes. Raises SettingError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = _UNITS | _UNITS_DECIMAL | {"B": 1}
    if match is None or match[2].upper() not in units:
        raise SettingError("size", f"{text!r} is not a size such as 512MiB or 2GiB")
    size = int(float(match[1]) * units[match[2].upper()])
    if size < 1:
        raise SettingError("size", "must be at least one byte")
    return size


def parse_seconds(text: str) -> float:
    """'0.25', '250ms' or '1.5 s' as seconds. Raises SettingError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|)\s*", text)
    if match is None:
        raise SettingError("time", f"{text!r} is not a time such as 0.25 or 250ms")
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1)
    if not seconds > 0:
        raise SettingError("time", "must be > 0 seconds")
    return seconds


def _at_least(config: object, limit: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) < limit:
            raise SettingError(name, f"must be >= {limit}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise SettingError(name, "must be > 0 seconds")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
