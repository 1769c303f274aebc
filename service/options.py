"""Options that several commands have in common, and those of security, with what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from service.config import SecurityConfig, TracingConfig

# --- of models ---------------------------------------------------------------------------------

Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint directory or Hugging Face id; the bundled model when absent."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
MaxRows = Annotated[int, typer.Option(help="Sequences that decode together, 1 … 256.")]
KvMemory = Annotated[
    str | None, typer.Option(help="Memory for the KV cache, e.g. 512MiB; automatic when absent.")
]
Context = Annotated[
    int | None, typer.Option(help="Most tokens of prompt plus output; the model's when absent.")
]
DepthOption = Annotated[str, typer.Option(help="Drafts per cycle: auto, or 0 … 8; 0 is off.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Blas = Annotated[str, typer.Option(help="Linux CPU: auto (OpenBLAS when there) or reference.")]
Weights = Annotated[str, typer.Option(help="Quantised weights: auto, keep or dequantize.")]
Gate = Annotated[
    str, typer.Option(help="Check of the MTP head at load: auto, or off to trust it unmeasured.")
]
PrefixMemory = Annotated[
    str | None,
    typer.Option(help="Memory for saved prefixes, e.g. 1GiB, 0 for none; automatic if absent."),
]
PrefixCache = Annotated[
    bool, typer.Option(help="Start requests from prefixes that earlier ones left.")
]
SessionTtl = Annotated[
    float, typer.Option(help="Seconds for which an unused session keeps its prefix.")
]
MaxSessions = Annotated[
    int, typer.Option(help="Sessions that keep a prefix at once: as many as people in a chat.")
]
MaxQueuedTokens = Annotated[
    int, typer.Option(help="Prompt tokens that may wait, and so the longest prompt taken.")
]
Ageing = Annotated[
    float,
    typer.Option(
        help="Seconds after a higher class went before it that lift the first a tenant has waiting"
        " by one priority class."
    ),
]
PageWatermark = Annotated[
    float,
    typer.Option(
        help="Share of the KV pages kept for running rows to grow into: more where"
        " selfdraft_preemptions by pages are many, less where pages stay unused."
    ),
]
SlowReader = Annotated[
    float, typer.Option(help="Seconds for which a stream may go unread before it is ended.")
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Run every cycle at one shape: no row's result depends on its neighbours. Slow.",
    ),
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Prompt tokens per step; 64 on a CPU, 256 on a GPU.")
]
DefaultMaxTokens = Annotated[int, typer.Option(help="max_tokens of requests that name none.")]
DrainSeconds = Annotated[float, typer.Option(help="Time to finish running requests after SIGTERM.")]
CostTable = Annotated[
    str, typer.Option(help="Measured costs for --depth auto: a file of tune's, auto or off.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
LogFormatOption = Annotated[str, typer.Option(help="json or pretty.")]
LogAll = Annotated[
    bool,
    typer.Option("--log-all", help="A line for every refused call; else a flood's are counted."),
]

# --- of texts -----------------------------------------------------------------------------------

Logprobs = Annotated[
    int | None, typer.Option(help="Show log probabilities, with this many alternatives.")
]
JsonSchema = Annotated[
    Path | None, typer.Option(help="File with a JSON schema that the text must satisfy.")
]
Grammar = Annotated[Path | None, typer.Option(help="File with a Lark grammar of the text.")]
SessionId = Annotated[
    str | None, typer.Option(help="Conversation that the server keeps a prefix of.")
]

Speculation = Annotated[
    str, typer.Option(help="How drafts are verified: auto, coupled, rejection or off.")
]

# --- of `serve` -------------------------------------------------------------------------------

MaxQueue = Annotated[int, typer.Option(help="Requests that may wait for a row.")]
MaxCalls = Annotated[
    int, typer.Option(help="Calls at once, running and waiting streams included; more are refused.")
]
MaxConnections = Annotated[
    int, typer.Option(help="Connections at once; more are closed as they come.")
]
MetricsHost = Annotated[
    str | None, typer.Option(help="Address of the Prometheus port; loopback when absent.")
]
Gateway = Annotated[
    bool, typer.Option(help="Speak the gateway's protocol on the gRPC port as well.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback in plain text.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file: certificate chain of the server.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file: its private key.")]
TlsClientCa = Annotated[
    Path | None, typer.Option(help="PEM file: roots of client certificates, then required (mTLS).")
]
TokensFile = Annotated[Path | None, typer.Option(help="TOML file of bearer tokens' hashes.")]
SessionDir = Annotated[
    Path | None, typer.Option(help="Folder for sessions that an admin exports and imports.")
]
SharePrefixes = Annotated[
    bool, typer.Option("--share-prefixes", help="Let tenants start from each other's prefixes.")
]
Reflection = Annotated[bool, typer.Option(help="Answer grpc.reflection without a token.")]
Check = Annotated[
    bool, typer.Option("--check", help="Report what would stop the start, and exit: 0 or 2.")
]


OtlpEndpoint = Annotated[
    str | None, typer.Option(help="host:port of an OTLP collector: export OpenTelemetry spans.")
]
OtlpInsecure = Annotated[
    bool, typer.Option("--otlp-insecure", help="Send spans to another machine in plain text.")
]
OtlpCa = Annotated[Path | None, typer.Option(help="PEM file: whom to trust as the collector.")]
TraceRatio = Annotated[
    float, typer.Option(help="Share of calls without a trace of their own to record, 0 … 1.")
]


def tracing_config(
    endpoint: str | None, insecure: bool, ca: Path | None, ratio: float
) -> TracingConfig | None:
    """The options as one config. Raises SettingError."""
    from service.config import SettingError, TracingConfig

    if endpoint is not None:
        return TracingConfig(endpoint=endpoint, insecure=insecure, ca=ca, ratio=ratio)
    for name, given in (("insecure", insecure), ("ca", ca is not None)):
        if given:
            raise SettingError(f"--otlp-{name}", "needs --otlp-endpoint")
    if ratio != 1.0:
        raise SettingError("--trace-ratio", "needs --otlp-endpoint")
    return None


def security_config(
    cert: Path | None, key: Path | None, client_ca: Path | None, **others: Any
) -> SecurityConfig:
    """The options as one config. Raises SettingError for half a pair."""
    from service.config import SecurityConfig, SettingError, TlsFiles

    if cert is not None and key is not None:
        return SecurityConfig(tls=TlsFiles(cert=cert, key=key, client_ca=client_ca), **others)
    if cert is not None or key is not None:
        raise SettingError("--tls-cert", "needs --tls-key, and the other way round")
    if client_ca is not None:
        raise SettingError("--tls-client-ca", "needs --tls-cert and --tls-key")
    return SecurityConfig(**others)


# --- of clients -------------------------------------------------------------------------------

Target = Annotated[str, typer.Option(help="host:port of the server.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="PEM file: whom to trust. Turns TLS on, like --tls.")
]
UseTls = Annotated[
    bool, typer.Option("--tls", help="TLS with the authorities that gRPC brings along.")
]
ClientCert = Annotated[Path | None, typer.Option(help="PEM file: own certificate (mTLS).")]
ClientKey = Annotated[Path | None, typer.Option(help="PEM file: its private key.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File that holds a bearer token; - reads it from standard input."),
]
InsecureToken = Annotated[
    bool, typer.Option("--insecure-token", help="Send the token in plain text anywhere.")
]


def client_options(
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    *,
    token_file: Path | None,
    insecure_token: bool,
) -> dict[str, Any]:
    """Keyword arguments of `Client` and `AdminClient`. A token is never an argument itself: those
    show in process lists and shell histories. Raises SettingError."""
    from selfdraft import Tls

    from service.config import SettingError

    options: dict[str, Any] = {"insecure_token": insecure_token}
    try:
        if tls or tls_ca or tls_cert or tls_key:
            options["tls"] = Tls.of_files(ca=tls_ca, cert=tls_cert, key=tls_key)
        if token_file is not None:
            options["token"] = read_token(token_file)
    except OSError as error:
        raise SettingError(str(error.filename), str(error.strerror)) from error
    except ValueError as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError("--tls-cert", "needs --tls-key, and the other way round") from error
    return options


def read_token(path: Path) -> str:
    """The first word of a file. Raises SettingError, OSError."""
    import sys

    from service.config import SettingError

    text = (
        sys.stdin.read() if str(path) == "-" else path.read_text(encoding="ascii", errors="replace")
    )
    words = text.split()
    if len(words) != 1 or not words[0].isascii():
        raise SettingError("--token-file", f"{path} must hold one token and nothing else")
    return words[0]


@contextmanager
def refusals_say_so() -> Iterator[None]:
    """What a client of ours refuses to do becomes an error of usage."""
    from selfdraft import InsecureTokenError

    from service.config import SettingError

    try:
        yield
    except InsecureTokenError as error:
        raise SettingError("--token-file", f"{error}; see --tls, --insecure-token") from error


Tenants = Annotated[Path | None, typer.Option(help="TOML file with what each tenant may have.")]
MaxTokenGap = Annotated[
    str | None,
    typer.Option(
        help="Longest step with prompts while others stream, e.g. 0.25 or 250ms; any if absent."
    ),
]
PrefillShare = Annotated[float, typer.Option(help="Share of the time prompts get even so, 0 … 1.")]
PriorityOption = Annotated[str, typer.Option(help="Who goes first: batch, default or interactive.")]
