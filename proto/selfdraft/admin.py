"""A thin async client of `selfdraft.v1.Admin`, for operators.

    async with AdminClient("inference.example:50051", tls=tls, token=token) as admin:
        print(await admin.sessions())

Messages are those of `selfdraft.v1.admin_pb2`. Errors are `SelfdraftError`s.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc.aio

from selfdraft.channel import Tls, connect
from selfdraft.errors import SelfdraftError
from selfdraft.propagation import trace_metadata
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
    ) -> None:
        """Arguments as for `Client`; `timeout` is each call's deadline in seconds. Raises
        InsecureTokenError."""
        connection = connect(target, tls=tls, token=token, insecure_token=insecure_token)
        self._channel, self._metadata = connection.channel, connection.metadata
        self._timeout = timeout
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

    async def export_session(
        self, session_id: str, name: str, *, tenant: str = "", overwrite: bool = False
    ) -> pb.ExportSessionResponse:
        """Writes a session to the server's folder, under `name`."""
        request = pb.ExportSessionRequest(
            tenant=tenant, session_id=session_id, name=name, overwrite=overwrite
        )
        response: pb.ExportSessionResponse = await self._call("ExportSession", request)
        return response

    async def import_session(
        self, name: str, session_id: str, *, tenant: str = ""
    ) -> pb.TenantSession:
        """Reads a file of the server's folder."""
        request = pb.ImportSessionRequest(name=name, tenant=tenant, session_id=session_id)
        response: pb.ImportSessionResponse = await self._call("ImportSession", request)
        return response.session

    async def session_files(self) -> list[pb.SessionFile]:
        """What can be imported."""
        request = pb.ListSessionFilesRequest()
        response: pb.ListSessionFilesResponse = await self._call("ListSessionFiles", request)
        return list(response.files)

    async def _call(self, method: str, request: Any) -> Any:
        call, along = getattr(self._stub, method), (*self._metadata, *trace_metadata())
        try:
            return await call(request, timeout=self._timeout, metadata=along)
        except grpc.aio.AioRpcError as error:
            raise SelfdraftError.of(error) from error
