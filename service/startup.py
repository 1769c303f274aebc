"""What the log says of a server at its start: the settings that matter, and what was loaded."""

from __future__ import annotations

from typing import Any

from engine.plan import EngineInfo
from service.config import ServiceConfig


def effective(config: ServiceConfig) -> dict[str, Any]:
    """Settings as the server will use them. Names of files are not among them, nor secrets:
    whether there is one is what counts. `selfdraft admin config` has all."""
    server, scheduler, engine = config.server, config.scheduler, config.engine
    security = config.security
    return {
        "model": config.model_name or engine.model.name,
        "host": server.host,
        "port": server.port,
        "metrics_port": server.metrics_port,
        "tls": security.tls is not None,
        "client_certificates": security.tls is not None and security.tls.client_ca is not None,
        "tokens": security.tokens is not None,
        "gateway": server.gateway,
        "max_rows": scheduler.max_rows,
        "max_queue": scheduler.max_queue,
        "depth": scheduler.depth,
        "max_token_gap_s": scheduler.max_token_gap_s,
        "prefix_cache": scheduler.prefix_cache,
        "tenants": len(scheduler.tenants),
        "kv_memory_bytes": engine.kv_memory,
        "context": engine.context,
        "deterministic": engine.deterministic,
        "drain_s": server.drain_s,
        "otlp_endpoint": None if config.tracing is None else config.tracing.endpoint,
    }


def facts_of(info: EngineInfo) -> dict[str, Any]:
    """The loaded model."""
    return {
        "family": info.family,
        "device": info.device,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "context_length": info.context_length,
        "kv_pages": info.pages,
        "max_depth": info.max_depth,
        "mtp_gate": info.mtp_gate.value,
    }
