"""What `GetServerInfo` says."""

from __future__ import annotations

from collections.abc import Sequence

from selfdraft.v1 import selfdraft_pb2 as pb

from service.backend import Backend, State
from service.config import ServiceConfig
from service.version import VERSION


def server_info(
    backend: Backend,
    config: ServiceConfig,
    *,
    state: State,
    active: int,
    uptime_s: float,
    services: Sequence[str],
) -> pb.GetServerInfoResponse:
    """What this server is; `active` calls are being answered."""
    scheduler = backend.scheduler
    info = scheduler.info
    return pb.GetServerInfoResponse(
        version=VERSION,
        uptime_seconds=uptime_s,
        state=state,
        active_calls=active,
        model=backend.name,
        device=info.device,
        blas=info.blas,
        depth=str(scheduler.config.depth),
        prefix_cache=scheduler.config.prefix_cache and info.boundaries > 0,
        deterministic=config.engine.deterministic,
        services=services,
        limits=_limits(backend, config),
        notes=info.notes,
    )


def _limits(backend: Backend, config: ServiceConfig) -> pb.ServerLimits:
    scheduler, limits = backend.scheduler, config.limits
    return pb.ServerLimits(
        context_length=scheduler.info.context_length,
        max_prompt_tokens=scheduler.limits.prompt_tokens,
        default_max_tokens=min(limits.default_max_tokens, scheduler.limits.room(1)),
        max_rows=min(scheduler.info.max_rows, scheduler.config.max_rows),
        max_queue=scheduler.config.max_queue,
        max_queued_tokens=scheduler.config.max_queued_tokens,
        max_n=min(limits.max_n, scheduler.config.max_queue),
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_chars=limits.max_stop_string_chars,
        max_text_chars=limits.max_text_chars,
        max_grammar_chars=limits.grammar.max_chars,
        max_message_bytes=config.server.max_message_bytes,
        max_concurrent_rpcs=config.server.max_concurrent_rpcs,
        session_ttl_seconds=scheduler.config.session_ttl_s,
        max_sessions=scheduler.config.max_sessions,
        max_messages=limits.max_messages,
        max_role_chars=limits.max_role_chars,
        max_template_bytes=limits.max_template_bytes,
    )
