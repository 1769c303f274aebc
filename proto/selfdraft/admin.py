"""A thin async client of `selfdraft.v1.Admin`, for operators.

    async with AdminClient("inference.example:50051", tls=tls, token=token) as admin:
        print(await admin.sessions())

Messages are those of `selfdraft.v1.admin_pb2`. Errors are `SelfdraftError`s.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

from selfdraft.channel import Tls, connect
from selfdraft.propagation import trace_metadata
from selfdraft.retry import DEFAULT_RETRY, Retry, until_answered
from selfdraft.v1 import admin_pb2 as pb
from selfdraft.v1 import admin_pb2_grpc


class AdminClient:
    """A connection to one server; an async context manager. Every call raises SelfdraftError."""

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        insecure_token: bool = False,
        timeout: float = 60.0,
        retry: Retry | None = DEFAULT_RETRY,
    ) -> None:
        """Arguments as for `Client`; `timeout` is each call's deadline in seconds, over all of its
        attempts. Calls that move a session are made once whatever `retry` says: after an attempt
        whose answer was lost, another would find its own file there (FILE_EXISTS), or overwrite
        what came in between. Raises InsecureTokenError."""
        connection = connect(target, tls=tls, token=token, insecure_token=insecure_token)
        self._channel, self._metadata = connection.channel, connection.metadata
        self._timeout = timeout
        self._retry = retry
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close(grace=None)

    async def drain(self) -> pb.DrainResponse:
        """Starts a drain."""
        response: pb.DrainResponse = await self._call("Drain", pb.DrainRequest())
        return response

    async def config(self) -> dict[str, str]:
        """Every setting by its name."""
        response: pb.GetConfigResponse = await self._call("GetConfig", pb.GetConfigRequest())
        return {setting.name: setting.value for setting in response.settings}

    async def tenants(self) -> list[pb.TenantStatistics]:
        """What each tenant has asked for."""
        request = pb.GetTenantStatisticsRequest()
        response: pb.GetTenantStatisticsResponse = await self._call("GetTenantStatistics", request)
        return list(response.tenants)

    async def sessions(self) -> list[pb.TenantSession]:
        """Sessions of all tenants."""
        request = pb.ListAllSessionsRequest()
        response: pb.ListAllSessionsResponse = await self._call("ListAllSessions", request)
        return list(response.sessions)

    async def flush_prefix_cache(self) -> pb.FlushPrefixCacheResponse:
        """Forgets every kept prefix that no queued request waits for."""
        request = pb.FlushPrefixCacheRequest()
        response: pb.FlushPrefixCacheResponse = await self._call("FlushPrefixCache", request)
        return response

    async def export_session(
        self, session_id: str, name: str, *, tenant: str = "", overwrite: bool = False
    ) -> pb.ExportSessionResponse:
        """Writes a session to the server's folder, under `name`."""
        request = pb.ExportSessionRequest(
            tenant=tenant, session_id=session_id, name=name, overwrite=overwrite
        )
        response: pb.ExportSessionResponse = await self._call("ExportSession", request, once=True)
        return response

    async def import_session(
        self, name: str, session_id: str, *, tenant: str = ""
    ) -> pb.TenantSession:
        """Reads a file of the server's folder."""
        request = pb.ImportSessionRequest(name=name, tenant=tenant, session_id=session_id)
        response: pb.ImportSessionResponse = await self._call("ImportSession", request, once=True)
        return response.session

    async def session_files(self) -> list[pb.SessionFile]:
        """What can be imported."""
        request = pb.ListSessionFilesRequest()
        response: pb.ListSessionFilesResponse = await self._call("ListSessionFiles", request)
        return list(response.files)

    async def _call(self, method: str, request: Any, *, once: bool = False) -> Any:
        along = (*self._metadata, *trace_metadata())

        def attempt(remaining: float | None) -> Awaitable[Any]:
            call = getattr(self._stub, method)
            opened: Awaitable[Any] = call(request, timeout=remaining, metadata=along)
            return opened

        return await until_answered(attempt, None if once else self._retry, self._timeout)
