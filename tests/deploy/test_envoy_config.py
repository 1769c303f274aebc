"""deploy/'s configuration of Envoy: valid, in step with the servers, and each part of it needed.

A planted fault takes a part away or changes it; a guarantee of `test_envoy.py` must then fail.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from selfdraft import SelfdraftError
from selfdraft.client import SESSION_HEADER

from service.config import ServerConfig
from service.health import SERVICE
from tests.deploy import envoy
from tests.deploy.envoy import Change, Config
from tests.deploy.test_envoy import (
    deadline_travels,
    draining_worker_is_left_alone,
    full_worker_is_passed_over,
    loading_workers_get_no_calls,
    long_request_is_passed_on,
    policy_is_not_the_callers,
    sessions_stay,
)

pytestmark = pytest.mark.anyio


async def test_envoy_accepts_the_configuration_as_it_is() -> None:
    command = [str(envoy.PROGRAM), "--mode", "validate", "-c", str(envoy.SHIPPED)]
    done = await anyio.run_process([*command, "--log-level", "warning"], check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()


def test_it_is_in_step_with_the_servers() -> None:
    server, config = ServerConfig(), envoy.shipped()
    (listener,) = config["static_resources"]["listeners"]
    for listens in (config["admin"], listener):
        assert listens["address"]["socket_address"]["address"] == "127.0.0.1"
    assert envoy.virtual_host(config)["request_body_buffer_limit"] > server.max_message_bytes
    (protocol,) = envoy.cluster(config)["typed_extension_protocol_options"].values()
    http2 = protocol["explicit_http_config"]["http2_protocol_options"]
    assert float(http2["connection_keepalive"]["interval"][:-1]) > server.min_ping_interval_s
    assert http2["max_concurrent_streams"] <= server.max_concurrent_rpcs
    (check,) = envoy.cluster(config)["health_checks"]
    assert check["grpc_health_check"]["service_name"] == SERVICE
    ports = [
        at["endpoint"]["address"]["socket_address"]["port_value"]
        for at in envoy.cluster(config)["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert ports[0] == server.port
    routes = envoy.virtual_host(config)["routes"]
    assert f"/{SERVICE}/" in {at["match"]["prefix"] for at in routes}
    assert envoy.route(config)["hash_policy"][0]["header"]["header_name"] == SESSION_HEADER


# --- planted faults ------------------------------------------------------------------------------


def no_retry(config: Config) -> None:
    del envoy.route(config)["retry_policy"]


def no_retry_when_full(config: Config) -> None:
    envoy.route(config)["retry_policy"]["retry_on"] = "connect-failure,refused-stream,unavailable"


def same_worker_again(config: Config) -> None:
    del envoy.route(config)["retry_policy"]["retry_host_predicate"]


def no_deadline(config: Config) -> None:
    envoy.virtual_host(config)["request_headers_to_remove"] = ["grpc-timeout"]


def its_own_deadline(config: Config) -> None:
    envoy.route(config)["max_stream_duration"] = {"max_stream_duration": "3600s"}


def trusting(config: Config) -> None:
    everybody = {"address_prefix": "0.0.0.0", "prefix_len": 0}
    envoy.manager(config)["internal_address_config"] = {"cidr_ranges": [everybody]}


def small_requests_only(config: Config) -> None:
    del envoy.virtual_host(config)["request_body_buffer_limit"]


def no_hash(config: Config) -> None:
    del envoy.route(config)["hash_policy"]


def no_health_checks(config: Config) -> None:
    del envoy.cluster(config)["health_checks"]


def panic(config: Config) -> None:
    del envoy.cluster(config)["common_lb_config"]["healthy_panic_threshold"]


def short_answers_only(config: Config) -> None:
    envoy.manager(config)["common_http_protocol_options"]["max_stream_duration"] = "0.5s"


FAULTS: list[tuple[Callable[..., Awaitable[None]], Change]] = [
    (full_worker_is_passed_over, no_retry),
    (full_worker_is_passed_over, no_retry_when_full),
    (full_worker_is_passed_over, same_worker_again),
    (deadline_travels, no_deadline),
    (deadline_travels, its_own_deadline),
    (policy_is_not_the_callers, trusting),
    (long_request_is_passed_on, small_requests_only),
    (sessions_stay, no_hash),
    (draining_worker_is_left_alone, no_health_checks),
    (draining_worker_is_left_alone, short_answers_only),
    (loading_workers_get_no_calls, panic),
]


@pytest.mark.parametrize(("guarantee", "fault"), FAULTS, ids=lambda part: part.__name__)
async def test_a_planted_fault_is_seen(
    tmp_path: Path, guarantee: Callable[..., Awaitable[None]], fault: Change
) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        await guarantee(tmp_path, fault)
    found = envoy.leaves(caught.value)
    seen = (AssertionError, SelfdraftError, TimeoutError, pytest.fail.Exception)
    assert all(isinstance(error, seen) for error in found), found
