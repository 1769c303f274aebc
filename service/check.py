"""`selfdraft serve --check`: everything that can stop a start, found without one.

Reads configuration, certificates, tokens and the checkpoint's headers; asks for the ports and gives
them back at once. Loads no weights, writes nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.budget import size
from engine.errors import EngineError
from service.config import ServiceConfig, SettingError
from service.costs import CostSource, CostTableError
from service.exposure import check_exposure, metrics_host
from service.logs import Logger
from service.reload import FileError
from service.text.tokenizer import Tokenizer, TokenizerError
from service.tls import Tls
from service.tokens import Tokens
from service.tracing import check_tracing

Verdict = Literal["ok", "warning", "error"]

_FOUND = (SettingError, FileError, EngineError, CostTableError, TokenizerError)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    text: str


class CheckError(Exception):
    """Something would stop the start; the text says what."""


def examine(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    """The report, line by line; a failed check does not keep the others from being made."""
    checks: tuple[tuple[str, Callable[[ServiceConfig, Logger], Iterator[Finding]]], ...] = (
        ("address", _address),
        ("TLS", _tls),
        ("tokens", _tokens),
        ("tracing", _tracing),
        ("session folder", _session_folder),
        ("cost table", _cost_table),
        ("model", _model),
        ("tokenizer", _tokenizer),
        ("memory", _memory),
    )
    for what, check in checks:
        try:
            yield from check(config, logger)
        except (*_FOUND, CheckError) as error:
            yield Finding("error", what, str(error))


def _address(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    check_exposure(config)
    server = config.server
    if server.insecure and config.security.tls is None:
        yield Finding("warning", "address", "--insecure: prompts and tokens travel in plain text")
    yield _port("gRPC", server.host, server.port)
    if server.metrics_port is not None:
        yield _port("metrics", metrics_host(config), server.metrics_port)


def _port(what: str, host: str, port: int) -> Finding:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise CheckError(f"{what}: {host}:{port}: {error.strerror}") from error
        return Finding("warning", "address", f"{what} on {host}:{port}: in use at this moment")
    return Finding("ok", "address", f"{what} on {host}:{port}")


def _tls(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    if config.security.tls is None:
        yield Finding("ok", "TLS", "none")
        return
    tls = Tls(config.security.tls, logger)
    found = tls.certificates
    clients = "asked for" if config.security.tls.client_ca else "not asked for"
    names = ", ".join(found.names) or "no name"
    text = f"{names}; until {found.expires:%Y-%m-%d}; client certificates {clients}"
    yield Finding("ok", "TLS", text)
    yield from (Finding("warning", "TLS", warning) for warning in tls.warnings())


def _tokens(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    if config.security.tokens is None:
        yield Finding("ok", "tokens", "none: whoever reaches the port may generate")
        return
    tokens = Tokens(config.security.tokens, logger)
    tenants = {entry.identity.tenant for entry in tokens.entries}
    admins = sum(entry.identity.admin for entry in tokens.entries)
    text = f"{len(tokens.entries)} of {len(tenants)} tenants, {admins} of them admins'"
    yield Finding("ok", "tokens", text)
    yield from (Finding("warning", "tokens", warning) for warning in tokens.warnings())


def _tracing(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    if config.tracing is not None:
        check_tracing(config.tracing)
        yield Finding("ok", "tracing", f"spans go to {config.tracing.endpoint}")


def _session_folder(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    folder = config.security.session_dir
    if folder is None:
        return
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckError(f"{there}: is no folder this user can write to")
    yield Finding("ok", "session folder", str(folder))


def _cost_table(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    if isinstance(config.cost_table, Path):
        CostSource(config.cost_table, logger)
    yield Finding("ok", "cost table", str(config.cost_table))


def _model(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    from engine.inspect import inspect_model

    found = inspect_model(config.engine.model)
    if not found.runnable:
        raise CheckError(f"{found.path}: {found.reason}")
    text = f"{found.family}, {found.parameters:,} parameters, {found.quantization}; {found.reason}"
    yield Finding("ok", "model", text)


def _tokenizer(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    tokenizer = Tokenizer.load(config.engine.model)
    chat = "with" if tokenizer.chat_template is not None else "no"
    yield Finding("ok", "tokenizer", f"{tokenizer.vocab_size:,} tokens, {chat} chat template")


def _memory(config: ServiceConfig, logger: Logger) -> Iterator[Finding]:
    from engine.load import plan_memory

    budget = plan_memory(config.engine)
    text = f"{size(budget.total)} of {size(budget.working_set)}, {budget.pages} KV pages"
    yield Finding("ok", "memory", text)


def run_check(config: ServiceConfig, logger: Logger) -> int:
    """Prints the report on standard output. 0 when a server would start, else 2."""
    from service import console

    findings = []
    for finding in examine(config, logger):
        findings.append(finding)
        console.show_finding(finding.verdict, finding.what, finding.text)
    return 2 if any(finding.verdict == "error" for finding in findings) else 0
