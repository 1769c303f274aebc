"""`selfdraft serve`: its options, and what it does with them."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import typer

from service import options, settings

if TYPE_CHECKING:
    from service.config import ServiceConfig


def serve(
    model: options.Model = None,
    revision: options.Revision = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.")] = 50051,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port; 0 takes a free one.")] = 9464,
    metrics: Annotated[bool, typer.Option(help="Serve Prometheus metrics.")] = True,
    gateway: options.Gateway = True,
    metrics_host: options.MetricsHost = None,
    insecure: options.Insecure = False,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_client_ca: options.TlsClientCa = None,
    tokens: options.TokensFile = None,
    session_dir: options.SessionDir = None,
    share_prefixes: options.SharePrefixes = False,
    reflection: options.Reflection = True,
    otlp_endpoint: options.OtlpEndpoint = None,
    otlp_insecure: options.OtlpInsecure = False,
    otlp_ca: options.OtlpCa = None,
    trace_ratio: options.TraceRatio = 1.0,
    check: options.Check = False,
    max_rows: options.MaxRows = 16,
    max_queue: options.MaxQueue = 64,
    max_calls: options.MaxCalls = 1024,
    max_connections: options.MaxConnections = 4096,
    tenants: options.Tenants = None,
    kv_memory: options.KvMemory = None,
    prefix_memory: options.PrefixMemory = None,
    prefix_cache: options.PrefixCache = True,
    session_ttl: options.SessionTtl = 600.0,
    max_sessions: options.MaxSessions = 256,
    max_queued_tokens: options.MaxQueuedTokens = 262_144,
    ageing: options.Ageing = 30.0,
    page_watermark: options.PageWatermark = 0.05,
    slow_reader_timeout: options.SlowReader = 30.0,
    deterministic: options.Deterministic = False,
    context: options.Context = None,
    depth: options.DepthOption = "auto",
    dtype: options.Dtype = "auto",
    blas: options.Blas = "auto",
    weights: options.Weights = "auto",
    mtp_gate: options.Gate = "auto",
    prefill_chunk: options.PrefillChunk = None,
    max_token_gap: options.MaxTokenGap = None,
    prefill_share: options.PrefillShare = 0.25,
    default_max_tokens: options.DefaultMaxTokens = 4096,
    drain_seconds: options.DrainSeconds = 30.0,
    log_format: options.LogFormatOption = "pretty",
    log_all: options.LogAll = False,
    cost_table: options.CostTable = "auto",
) -> None:
    """Serve a model until SIGTERM. Exit code 0 after a drain, 1 when the engine failed."""
    given = SimpleNamespace(**locals())  # by name: `settings.of_serve` reads every one
    raise typer.Exit(_serve(settings.of_serve(given), check=check))


def _serve(config: ServiceConfig, *, check: bool) -> int:
    """Serves, or checks whether that could be; returns the exit code."""
    from service import console, launch, logs

    logger = logs.make_logger(config.log_format, limited=not config.log_all)
    logs.capture_stdlib(logger)
    if check:
        from service.check import run_check

        return run_check(config, logger)
    with closing(console.LoadProgress()) as progress:
        return launch.serve(config, logger, progress, lambda _: progress.close())
