"""The `Admin` servicer: operation over all tenants. Who may call is `service.auth`'s matter."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message
from selfdraft.v1 import admin_pb2 as pb

from engine.plan import ForeignFileError
from scheduler.request import NotRunningError
from scheduler.sessions import NoRoomError, SessionInfo, UnknownSessionError
from service.auth import Scope
from service.backend import Door
from service.config import ServiceConfig
from service.endings import Context, abort
from service.errors import Reason, ServiceError
from service.ledger import Ledger
from service.logs import Logger
from service.sessionfiles import SessionFiles
from service.tokens import TENANT
from service.validation import Violations, check_id, check_known

T = TypeVar("T")


class AdminServicer:
    """Serves `selfdraft.v1.Admin`. `drain` starts a drain; `clock` is the scheduler's."""

    def __init__(
        self,
        *,
        door: Door,
        config: ServiceConfig,
        ledger: Ledger,
        files: SessionFiles | None,
        drain: Callable[[], None],
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        self._door = door
        self._config = config
        self._ledger = ledger
        self._files = files
        self._drain = drain
        self._logger = logger
        self._clock = clock
        self._one_file = asyncio.Lock()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:  # noqa: N802
        """Starts a drain."""

        async def answer() -> pb.DrainResponse:
            self._drain()
            active = sum(account.active for _, account in self._ledger)
            return pb.DrainResponse(active=active, limit_seconds=self._config.server.drain_s)

        return await self._answer(request, context, answer)

    async def GetConfig(  # noqa: N802
        self, request: pb.GetConfigRequest, context: Context
    ) -> pb.GetConfigResponse:
        """All settings."""

        async def answer() -> pb.GetConfigResponse:
            found = settings(self._config)
            return pb.GetConfigResponse(
                settings=[pb.Setting(name=name, value=value) for name, value in found]
            )

        return await self._answer(request, context, answer)

    async def GetTenantStatistics(  # noqa: N802
        self, request: pb.GetTenantStatisticsRequest, context: Context
    ) -> pb.GetTenantStatisticsResponse:
        """Counts by tenant."""

        async def answer() -> pb.GetTenantStatisticsResponse:
            sessions = Counter(session.tenant for session in self._sessions())
            return pb.GetTenantStatisticsResponse(
                tenants=[
                    pb.TenantStatistics(
                        tenant=tenant, sessions=sessions[tenant], **dataclasses.asdict(account)
                    )
                    for tenant, account in self._ledger
                ]
            )

        return await self._answer(request, context, answer)

    async def ListAllSessions(  # noqa: N802
        self, request: pb.ListAllSessionsRequest, context: Context
    ) -> pb.ListAllSessionsResponse:
        """Sessions of all tenants."""

        async def answer() -> pb.ListAllSessionsResponse:
            return pb.ListAllSessionsResponse(sessions=self._sessions())

        return await self._answer(request, context, answer)

    async def FlushPrefixCache(  # noqa: N802
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """Nothing is kept afterwards that nobody waits for."""

        async def answer() -> pb.FlushPrefixCacheResponse:
            scheduler = self._door.look().scheduler
            freed = await scheduler.flush_prefixes()
            counts = dataclasses.asdict(freed)
            info = scheduler.info
            size = freed.pages * info.page_bytes + freed.boundaries * info.boundary_bytes
            self._logger.info("prefix cache flushed", **counts, bytes=size)
            return pb.FlushPrefixCacheResponse(**counts, bytes=size)

        return await self._answer(request, context, answer)

    async def ExportSession(  # noqa: N802
        self, request: pb.ExportSessionRequest, context: Context
    ) -> pb.ExportSessionResponse:
        """A session to a file of the folder."""

        async def answer() -> pb.ExportSessionResponse:
            files, scope = self._folder(), self._scope(request)
            path = files.place(request.name)
            async with self._one_file:
                files.free(request.name, overwrite=request.overwrite)
                scheduler = self._door.look().scheduler
                info = await scheduler.export_session(scope.inside(request.session_id), path)
                size = path.stat().st_size
            self._note("session exported", request, tokens=info.tokens)
            return pb.ExportSessionResponse(tokens=info.tokens, bytes=size)

        return await self._answer(request, context, answer)

    async def ImportSession(  # noqa: N802
        self, request: pb.ImportSessionRequest, context: Context
    ) -> pb.ImportSessionResponse:
        """A file of the folder to a session."""

        async def answer() -> pb.ImportSessionResponse:
            files, scope = self._folder(), self._scope(request)
            path = files.existing(request.name)
            async with self._one_file:
                info = await self._door.look().scheduler.import_session(
                    path,
                    scope.inside(request.session_id),
                    cache_salt=self._config.security.cache_salt(scope.tenant),
                )
            self._note("session imported", request, tokens=info.tokens)
            return pb.ImportSessionResponse(session=self._session(info))

        return await self._answer(request, context, answer)

    async def ListSessionFiles(  # noqa: N802
        self, request: pb.ListSessionFilesRequest, context: Context
    ) -> pb.ListSessionFilesResponse:
        """What can be imported."""

        async def answer() -> pb.ListSessionFilesResponse:
            found = self._folder().list()
            return pb.ListSessionFilesResponse(
                files=[pb.SessionFile(name=file.name, bytes=file.bytes) for file in found]
            )

        return await self._answer(request, context, answer)

    # --- parts -----------------------------------------------------------------------------------

    def _folder(self) -> SessionFiles:
        if self._files is None:
            raise ServiceError(
                Reason.NOT_CONFIGURED, "the server has no folder for sessions (serve --session-dir)"
            )
        return self._files

    def _scope(self, request: pb.ExportSessionRequest | pb.ImportSessionRequest) -> Scope:
        """Whose session it is. Raises ServiceError for an id or a tenant that is none."""
        complain = Violations()
        check_id("session_id", request.session_id, complain, self._config.limits)
        if self._config.security.tokens is None:
            if request.tenant:
                complain("tenant", "must be absent: this server has no tenants")
        elif not TENANT.fullmatch(request.tenant):
            complain("tenant", "must be 1 … 64 of A-Z a-z 0-9 . _ -")
        complain.raise_found()
        return Scope(request.tenant)

    def _sessions(self) -> list[pb.TenantSession]:
        return [self._session(info) for info in self._door.look().scheduler.sessions()]

    def _session(self, info: SessionInfo) -> pb.TenantSession:
        tenant, name = "", info.session_id
        if self._config.security.tokens is not None:
            tenant, _, name = info.session_id.partition("/")
        return pb.TenantSession(
            tenant=tenant,
            session_id=name,
            tokens=info.tokens,
            pages=info.pages,
            expires_in_seconds=max(info.expires_at - self._clock(), 0.0),
        )

    def _note(
        self,
        event: str,
        request: pb.ExportSessionRequest | pb.ImportSessionRequest,
        *,
        tokens: int,
    ) -> None:
        named = {"name": request.name, "session_id": request.session_id, "tokens": tokens}
        self._logger.info(event, tenant=request.tenant, **named)

    async def _answer(
        self, request: Message, context: Context, answer: Callable[[], Awaitable[T]]
    ) -> T:
        try:
            complain = Violations()
            check_known(request, complain)
            complain.raise_found()
            return await answer()
        except Exception as found:
            error = self._error(found)
        return await abort(context, error)

    def _error(self, found: Exception) -> ServiceError:
        """What an admin hears: paths of this machine stay in the log."""
        match found:
            case ServiceError():
                return found
            case UnknownSessionError():
                return ServiceError(Reason.NOT_FOUND, "session_id: nothing is kept for it")
            case NoRoomError():
                return ServiceError(Reason.NO_ROOM, str(found))
            case NotRunningError():
                return ServiceError(Reason.ENGINE_FAILED, str(found))
            case ForeignFileError():
                self._logger.warning("session file refused", why=str(found))
                message = "name: the file is of another model or version, or damaged"
                return ServiceError(Reason.FOREIGN_FILE, message)
            case OSError():
                self._logger.error("session file failed", why=str(found))
                return ServiceError(Reason.STORAGE_FAILED, f"the disk says: {found.strerror}")
        self._logger.error("unexpected error", exc_info=found)
        return ServiceError(Reason.INTERNAL, "internal error; the server's log has the cause")


def settings(config: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a tree of configuration, as (dotted name, text)."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{name}.")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from settings(item, f"{name}[{key}].")
        elif callable(value):
            yield name, "(set)"
        else:
            yield name, "" if value is None else str(value)
