"""The `VllmEngine` servicer: each RPC that the gateway uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, cast

import anyio.to_thread
import grpc
import grpc.aio
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from service.backend import Door, State
from service.config import ServiceConfig
from service.endings import Context
from service.gateway.answer import Answer
from service.gateway.bundle import chunks, tokenizer_zip
from service.gateway.events import POLL_S, KvSubscription
from service.gateway.info import model_info, server_info
from service.gateway.load import scheduler_load
from service.gateway.request import translate
from service.inference import InferenceServicer
from service.validation import Violations, check_known
from service.version import VERSION

T = TypeVar("T")

SERVICE: Final = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_ABSENT: Final = ("Embed", "FlushCache", "StartProfile", "StopProfile")
"""RPCs of the protocol that this server does not have."""


def register(
    server: grpc.aio.Server, *, inference: InferenceServicer, door: Door, config: ServiceConfig
) -> None:
    """Adds the service to a server that has not started. `inference` answers its generations."""
    add: Any = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
    add(GatewayServicer(inference=inference, door=door, config=config), server)


class GatewayServicer:
    """Serves `vllm.grpc.engine.VllmEngine` with the same internals as `Inference`."""

    def __init__(
        self,
        *,
        inference: InferenceServicer,
        door: Door,
        config: ServiceConfig,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`wall` gives seconds since the epoch."""
        self._inference = inference
        self._door = door
        self._config = config
        self._wall = wall
        self._base = round(wall() * 1000)
        for name in _ABSENT:
            setattr(self, name, _unimplemented(name))

    # --- generations -----------------------------------------------------------------------------

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:  # noqa: N802
        """One generation, as chunks of tokens and a `complete` each, or as `complete`s alone."""
        complain = Violations()
        ours = translate(request, complain)
        answer = cast(Context, Answer(context, request))
        await self._inference.generate(ours, answer, complain, method="VllmEngine/Generate")

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:  # noqa: N802
        """Ends live requests; those that are not live are none of its business."""
        for request_id in request.request_ids:
            await self._inference.Abort(pb.AbortRequest(request_id=request_id), context)
        return vllm.AbortResponse()

    # --- what and how ----------------------------------------------------------------------------

    async def HealthCheck(  # noqa: N802
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        """Healthy while requests are taken. UNAVAILABLE while the model loads: a gateway registers
        whoever answers, and asks for the model next."""

        async def answer() -> vllm.HealthCheckResponse:
            if self._door.state is State.LOADING:
                self._door.look()
            state = self._door.state
            return vllm.HealthCheckResponse(healthy=state is State.SERVING, message=str(state))

        return await self._inference.answer(context, answer)

    async def GetModelInfo(  # noqa: N802
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        """Facts about the model."""

        async def answer() -> vllm.GetModelInfoResponse:
            return model_info(self._door.look(), self._config)

        return await self._inference.answer(context, answer)

    async def GetServerInfo(  # noqa: N802
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        """Facts about the server."""

        async def answer() -> vllm.GetServerInfoResponse:
            return server_info(
                self._door.look(),
                active=self._inference.active,
                paused=self._door.state is not State.SERVING,
                uptime_s=self._inference.uptime_s,
            )

        return await self._inference.answer(context, answer)

    async def GetLoads(  # noqa: N802
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        """The load of the one rank there is. Sections named in `include` that are not reported are
        left out, as the protocol has it."""

        async def answer() -> vllm.GetLoadsResponse:
            complain = check(request)
            if request.dp_rank:
                complain("dp_rank", "must be absent or 0: there is one rank")
            complain.raise_found()
            scheduler = self._door.look().scheduler
            return vllm.GetLoadsResponse(
                timestamp=datetime.fromtimestamp(self._wall(), UTC).isoformat(),
                version=VERSION,
                dp_rank_count=1,
                loads=[scheduler_load(scheduler.statistics(), scheduler.info)],
            )

        return await self._inference.answer(context, answer)

    # --- streams ---------------------------------------------------------------------------------

    async def GetTokenizer(  # noqa: N802
        self, request: common.GetTokenizerRequest, context: Context
    ) -> None:
        """The tokenizer's files as a zip archive."""

        async def answer() -> bytes:
            self._door.look()
            return await anyio.to_thread.run_sync(tokenizer_zip, self._config.engine.model)

        for chunk in chunks(await self._inference.answer(context, answer)):
            await context.write(chunk)

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """Kept prefixes and load, until the subscriber leaves or the engine fails."""

        async def answer() -> None:
            check(request)
            scheduler = self._door.look().scheduler
            subscription = KvSubscription(scheduler, base=self._base, wall=self._wall)
            batches = subscription.begin(request.start_sequence_number)
            while True:
                for batch in batches:
                    await context.write(batch)
                await asyncio.sleep(POLL_S)
                self._door.look()
                batches = subscription.poll()

        await self._inference.answer(context, answer)


def check(request: Any) -> Violations:
    """Violations to go on with. Raises ServiceError for fields that nobody here knows."""
    complain = Violations()
    check_known(request, complain)
    complain.raise_found()
    return complain


def _unimplemented(name: str) -> Callable[[Any, Context], Awaitable[Any]]:
    async def refuse(request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name}: this server has no such thing")

    return refuse
