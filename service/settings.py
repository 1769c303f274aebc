"""From the options of a command to the one checked config. Heavy imports wait until needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from service import options

if TYPE_CHECKING:
    from service.config import ServiceConfig


class UsageError(Exception):
    """An option's value is not one of those that exist."""


def of_serve(given: Any) -> ServiceConfig:
    """The config that the options of `serve`, attributes of `given`, ask for. Raises UsageError,
    SettingError, ConfigError and ModelNotFoundError."""
    from service.config import RequestLimits, ServerConfig

    memory = given.prefix_memory
    table = given.cost_table
    return make_config(
        model=given.model,
        revision=given.revision,
        max_rows=given.max_rows,
        max_queue=given.max_queue,
        kv_memory=given.kv_memory,
        prefix_memory=memory if given.prefix_cache else memory or "0",
        deterministic=given.deterministic,
        policy=_policy(given),
        context=given.context,
        depth=given.depth,
        dtype=given.dtype,
        blas=given.blas,
        weights=given.weights,
        mtp_gate=given.mtp_gate,
        prefill_chunk=given.prefill_chunk,
        log_format=given.log_format,
        log_all=given.log_all,
        cost_table=table if table in ("auto", "off") else Path(table),
        limits=RequestLimits(default_max_tokens=given.default_max_tokens),
        server=ServerConfig(
            host=given.host,
            port=given.port,
            metrics_port=given.metrics_port if given.metrics else None,
            gateway=given.gateway,
            metrics_host=given.metrics_host,
            insecure=given.insecure,
            drain_s=given.drain_seconds,
            max_concurrent_rpcs=given.max_calls,
            max_connections=given.max_connections,
        ),
        security=options.security_config(
            *(given.tls_cert, given.tls_key, given.tls_client_ca),
            tokens=given.tokens,
            session_dir=given.session_dir,
            share_prefixes_between_tenants=given.share_prefixes,
            open_reflection=given.reflection,
        ),
        tracing=options.tracing_config(
            given.otlp_endpoint, given.otlp_insecure, given.otlp_ca, given.trace_ratio
        ),
        download=not given.check,
    )


def _policy(given: Any) -> dict[str, Any]:
    """What the options of `serve` say of the scheduler."""
    from service.config import parse_seconds

    gap = given.max_token_gap
    return {
        "prefix_cache": given.prefix_cache,
        "session_ttl_s": given.session_ttl,
        "max_sessions": given.max_sessions,
        "max_queued_tokens": given.max_queued_tokens,
        "ageing_s": given.ageing,
        "page_watermark": given.page_watermark,
        "slow_reader_timeout_s": given.slow_reader_timeout,
        "max_token_gap_s": None if gap is None else parse_seconds(gap),
        "prefill_share": given.prefill_share,
        "share_kept": given.share_prefixes,
        **_tenants(given.tenants),
    }


def make_config(
    *,
    model: str | None,
    revision: str | None,
    max_rows: int,
    kv_memory: str | None,
    context: int | None,
    depth: str,
    dtype: str,
    blas: str,
    weights: str,
    mtp_gate: str,
    max_queue: int = 64,
    prefill_chunk: int | None = None,
    prefix_memory: str | None = None,
    deterministic: bool = False,
    policy: dict[str, Any] | None = None,
    log_format: str = "pretty",
    download: bool = True,
    **parts: Any,
) -> ServiceConfig:
    """The options as one checked config; `policy` is the scheduler's. Raises UsageError,
    SettingError, ConfigError and ModelNotFoundError."""
    from engine.config import (
        BlasChoice,
        DtypeChoice,
        EngineConfig,
        GateChoice,
        WeightsChoice,
    )
    from engine.plan import MAX_DEPTH
    from scheduler.config import SchedulerConfig
    from service import models
    from service.config import LogFormat, ServiceConfig, parse_bytes

    fixed = None if depth == "auto" else fixed_depth(depth)
    try:
        scheduler = SchedulerConfig(
            max_queue=max_queue,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            depth="auto" if fixed is None else fixed,
            **(policy or {}),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    path = Path("unresolved")
    engine: dict[str, Any] = {
        "dtype": choice("--dtype", dtype, DtypeChoice),
        "blas": choice("--blas", blas, BlasChoice),
        "weights": choice("--weights", weights, WeightsChoice),
        "mtp_gate": choice("--mtp-gate", mtp_gate, GateChoice),
        "max_rows": max_rows,
        "kv_memory": None if kv_memory is None else parse_bytes(kv_memory),
        "prefix_memory": None if prefix_memory is None else _or_none(prefix_memory),
        "deterministic": deterministic,
        "max_depth": MAX_DEPTH if fixed is None else fixed,
        "prefill_chunk": prefill_chunk,
        "context": context,
    }
    EngineConfig(model=path, **engine).validate()  # before minutes of downloading
    shape = choice("--log-format", log_format, LogFormat)
    try:
        path = models.resolve(model, revision=revision, download=download)
    except models.ModelNotFoundError as error:
        if download:
            raise
        raise UsageError(str(error)) from error  # a check finds faults of the configuration
    return ServiceConfig(
        engine=EngineConfig(model=path, **engine),
        scheduler=scheduler,
        log_format=shape,
        model_name=models.display_name(model),
        **parts,
    )


def _or_none(size: str) -> int:
    """Bytes, of which there may be none."""
    from service.config import parse_bytes

    return 0 if size.strip() == "0" else parse_bytes(size)


def _tenants(path: Path | None) -> dict[str, Any]:
    """The scheduler's settings for tenants. Raises UsageError and SettingError."""
    from service.tenant import read_tenants

    return {} if path is None else read_tenants(_read("--tenants", path))


def fixed_depth(text: str) -> int:
    from engine.plan import MAX_DEPTH

    if not text.isdecimal() or int(text) > MAX_DEPTH:
        raise UsageError(f"--depth: must be auto or 0 … {MAX_DEPTH}, not {text!r}")
    return int(text)


def form(**forms: Path | str | None) -> dict[str, str]:
    """The form a text must have, read from its file where it is in one. Raises UsageError."""
    given = {form: value for form, value in forms.items() if value is not None}
    options = [f"--{form.replace('_', '-')}" for form in given]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(options)}: a text has one form")
    return {
        form: _read(option, value) if isinstance(value, Path) else value
        for option, (form, value) in zip(options, given.items(), strict=True)
    }


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: cannot read {path}: {error}") from error


def choice(option: str, value: str, choices: Any) -> Any:
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"{option}: must be one of {', '.join(known)}, not {value!r}")
    return value
