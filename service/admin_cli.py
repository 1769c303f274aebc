"""`selfdraft admin …` and `selfdraft token …`. Heavy imports wait until a command needs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.options import (
    ClientCert,
    ClientKey,
    InsecureToken,
    Target,
    TlsCa,
    TokenFile,
    UseTls,
)

if TYPE_CHECKING:
    from selfdraft import AdminClient

T = TypeVar("T")

admin_app = typer.Typer(help="Operate a running server.", no_args_is_help=True)
token_app = typer.Typer(help="Bearer tokens.", no_args_is_help=True)

Tenant = Annotated[str, typer.Option(help="Whose session; needed where the server has tokens.")]
Name = Annotated[str, typer.Argument(help="Name of the file in the server's session folder.")]
SessionId = Annotated[str, typer.Argument(help="The session, as its tenant calls it.")]

_connection: dict[str, Any] = {}
"""Where `admin`'s commands connect to, from the options before them."""


@admin_app.callback()
def connection(
    target: Target = "127.0.0.1:50051",
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: ClientCert = None,
    tls_key: ClientKey = None,
    token_file: TokenFile = None,
    insecure_token: InsecureToken = False,
) -> None:
    """Operate a running server. The options come before the command."""
    from service.options import client_options

    _connection.clear()
    _connection.update(
        target=target,
        **client_options(
            *(tls, tls_ca, tls_cert, tls_key),
            token_file=token_file,
            insecure_token=insecure_token,
        ),
    )


@admin_app.command()
def drain() -> None:
    """Finish what runs, refuse what comes, then end the process."""
    found = _ask(lambda admin: admin.drain())
    typer.echo(f"draining: {found.active} running, within {found.limit_seconds:g} s")


@admin_app.command()
def config() -> None:
    """Show every setting of the server."""
    for name, value in _ask(lambda admin: admin.config()).items():
        typer.echo(f"{name} = {value}")


@admin_app.command()
def tenants() -> None:
    """Show what each tenant has asked for."""
    _show(
        (
            *("tenant", "active", "requests", "failed", "prompt_tokens", "cached_tokens"),
            *("completion_tokens", "sessions"),
        ),
        _ask(lambda admin: admin.tenants()),
    )


@admin_app.command()
def sessions() -> None:
    """List the sessions of all tenants."""
    fields = ("tenant", "session_id", "tokens", "pages", "expires_in_seconds")
    _show(fields, _ask(lambda admin: admin.sessions()))


@admin_app.command()
def flush() -> None:
    """Forget every kept prefix and session, except what queued requests wait for."""
    found = _ask(lambda admin: admin.flush_prefix_cache())
    typer.echo(
        f"freed {found.boundaries} prefixes of {found.sessions} sessions and others:"
        f" {found.pages} pages, {found.bytes} bytes"
    )


@admin_app.command()
def files() -> None:
    """List the files of the server's session folder."""
    _show(("name", "bytes"), _ask(lambda admin: admin.session_files()))


@admin_app.command(name="export")
def export_session(
    session_id: SessionId,
    name: Name,
    tenant: Tenant = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of this name.")
    ] = False,
) -> None:
    """Write a session to a file of the server's folder."""
    found = _ask(lambda a: a.export_session(session_id, name, tenant=tenant, overwrite=overwrite))
    typer.echo(f"{name}: {found.tokens} tokens, {found.bytes} bytes")


@admin_app.command(name="import")
def import_session(name: Name, session_id: SessionId, tenant: Tenant = "") -> None:
    """Read a file of the server's folder into a session."""
    found = _ask(lambda admin: admin.import_session(name, session_id, tenant=tenant))
    typer.echo(f"{found.session_id}: {found.tokens} tokens, {found.pages} pages")


@token_app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose token: 1 … 64 of A-Z a-z 0-9 . _ -.")],
    admin: Annotated[bool, typer.Option("--admin", help="May operate the server too.")] = False,
    days: Annotated[
        float | None, typer.Option(help="Days until it expires; never when absent.")
    ] = None,
    append: Annotated[
        Path | None, typer.Option(help="Token file of a server to add its hash to.")
    ] = None,
) -> None:
    """Make a token: shown once on standard output, its hash for the server's file beside it."""
    from datetime import UTC, datetime, timedelta

    from service.tokens import append_entry, entry_text, new_token

    expires = None if days is None else datetime.now(UTC) + timedelta(days=days)
    token = new_token()
    text = entry_text(token, tenant=tenant, admin=admin, expires=expires)
    if append is not None:
        append_entry(append, text)
    typer.echo(token)
    note = "hash added" if append is not None else "add to the file of serve --tokens"
    typer.echo(f"# the token is shown this once; {note}:\n{text}", err=True, nl=False)


def _ask(what: Callable[[AdminClient], Awaitable[T]]) -> T:
    """One call. Raises SelfdraftError, SettingError."""
    import anyio
    from selfdraft import AdminClient

    from service.options import refusals_say_so

    async def main() -> T:
        with refusals_say_so():
            client = AdminClient(**_connection)
        async with client:
            return await what(client)

    return anyio.run(main, backend="asyncio")


def _show(fields: Sequence[str], rows: Sequence[Any]) -> None:
    from service import console

    console.show_rows(fields, [[getattr(row, field) for field in fields] for row in rows])
