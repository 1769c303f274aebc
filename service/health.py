"""grpc.health.v1: whether this server takes generations, for probes and for balancers' watches."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from selfdraft.v1 import selfdraft_pb2

from service.logs import Logger

SERVICE: Final = selfdraft_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
NAMES: Final = ("", SERVICE)
"""Names a client may ask about: the server as a whole, and its service. They agree."""


class Health:
    """NOT_SERVING until told otherwise."""

    def __init__(self, *more: str, logger: Logger) -> None:
        """`more`: further services a client may ask about."""
        self._logger = logger
        self._serving: bool | None = None
        self._names = (*NAMES, *more)
        # The type stubs do not know the asyncio half of the package.
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set(serving=False)

    async def set(self, *, serving: bool) -> None:
        """Tells probes and watches, and the log where it is news."""
        if serving is not self._serving and self._serving is not None:
            self._logger.info("health", serving=serving)
        self._serving = serving
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
