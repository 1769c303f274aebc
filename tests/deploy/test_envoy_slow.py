"""A client behind Envoy that stops reading: its stream is paused and then ended, others go on, and
what it does not read stays small wherever it waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import Client, SelfdraftError

from tests.deploy.envoy import Change, Config, cluster, fleet, leaves
from tests.service.harness import saying, service_config

pytestmark = pytest.mark.anyio

HELD_BYTES = 4 << 20
"""Most that Envoy may hold of an answer many times as large; its buffers and windows are 1.3 MiB
together."""


async def slow_reader_is_ended(folder: Path, change: Change | None = None) -> None:
    config = service_config(slow_reader_timeout_s=0.5, stream_buffer=64)
    config = replace(config, server=replace(config.server, write_timeout_s=1.0))
    worker: dict[str, Any] = {
        "config": config,
        "token": saying("x" * 50),
        "context_length": 200_000,
        "pages": 20_000,
    }
    async with fleet(folder, change=change, each=[worker]) as up:
        # No reads at all: the client's window fills up, then Envoy's buffers, then the stream's.
        window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384))
        async with Client(up.envoy.target, options=window, retry=None) as lazy:
            before = largest = await up.envoy.allocated()
            slow = lazy.generate(text="x", max_tokens=150_000, ignore_eos=True, logprobs=20)
            await slow.request_id()
            quick: list[str] = []
            with anyio.fail_after(60):
                while not up.workers[0].finished("slow_reader"):
                    largest = max(largest, await up.envoy.allocated())
                    assert largest - before < HELD_BYTES, "it waits in Envoy"
                    answer = up.client.generate(text="x", max_tokens=5, ignore_eos=True)
                    quick.append(await answer.text())
                    await anyio.sleep(0.02)
            assert quick
            assert all(quick)
            with pytest.raises(SelfdraftError) as caught, anyio.fail_after(10):
                await slow.text()
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.reason == "SLOW_READER"
        await up.workers[0].until_idle()


async def test_a_client_that_stops_reading(tmp_path: Path) -> None:
    await slow_reader_is_ended(tmp_path)


def boundless(config: Config) -> None:
    """Envoy takes as much as a worker gives."""
    (listener,) = config["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = 1 << 30
    workers = cluster(config)
    workers["per_connection_buffer_limit_bytes"] = 1 << 30
    (protocol,) = workers["typed_extension_protocol_options"].values()
    options = protocol["explicit_http_config"]["http2_protocol_options"]
    options["initial_stream_window_size"] = options["initial_connection_window_size"] = 1 << 30


async def test_without_bounds_the_answer_would_wait_in_envoy(tmp_path: Path) -> None:
    """Mutation of the configuration."""
    with pytest.raises(BaseExceptionGroup) as caught:
        await slow_reader_is_ended(tmp_path, boundless)
    assert any("it waits in Envoy" in str(error) for error in leaves(caught.value))
