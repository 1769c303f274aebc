"""Trace context: read as the specification says, carried by the client, exported as spans."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
import pytest
import trustme
from opentelemetry import trace as otel
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from selfdraft import AdminClient, Client, SelfdraftError
from selfdraft.propagation import trace_metadata
from smg_grpc_proto import vllm_engine_pb2 as vllm

from scheduler.request import Usage
from service.config import SettingError, TracingConfig
from service.logs import RequestRecord
from service.options import tracing_config
from service.trace import TraceContext, trace_context
from service.tracing import Tracing, phases
from tests.service.harness import Running, running, service_config
from tests.service.scripted import Act, scripted

pytestmark = pytest.mark.anyio

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"

# --- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *("", "00-xyz", f"{PARENT}0", f"{PARENT}-", f"{PARENT}-00", PARENT.upper()),
        *(b"\xff", PARENT.encode(), PARENT.replace("-", "_"), f"ff{PARENT[2:]}", f"0{PARENT[2:]}"),
        *(f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01"),
        *(f"00-{TRACE_ID}-{SPAN_ID}-1", f"00-{TRACE_ID}-{SPAN_ID}-zz", f"fg{PARENT[2:]}"),
        *(f"01{PARENT[2:]}x", f"01{PARENT[2:]}.what-ever", PARENT[:-3], f"{PARENT}, {PARENT}"),
    ],
)
def test_what_is_malformed_is_as_good_as_absent(value: str | bytes) -> None:
    assert trace_context([("traceparent", value)]) is None


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (PARENT, 1),
        (f"{PARENT[:-2]}00", 0),
        (f"{PARENT[:-2]}03", 3),
        (f" {PARENT}\t", 1),
        (f"01{PARENT[2:]}", 1),
        (f"cc{PARENT[2:]}-what-the-future-will-be-like", 1),
        (f"cc{PARENT[2:-2]}fe", 0),
    ],
)
def test_what_is_known_of_any_version_is_read(value: str, flags: int) -> None:
    found = trace_context([("traceparent", value)])
    assert found == TraceContext(trace_id=TRACE_ID, span_id=SPAN_ID, flags=flags)
    assert found.sampled is bool(flags & 1)


def test_two_parents_are_none() -> None:
    assert trace_context([("traceparent", PARENT)] * 2) is None
    assert trace_context([("traceparent", PARENT), ("traceparent", "bad")]) is None


def test_states_are_one_list_and_nothing_without_a_parent() -> None:
    states = [("tracestate", "a=1,b=2"), ("tracestate", " c=3 "), ("tracestate", "")]
    found = trace_context([*states, ("traceparent", PARENT)])
    assert found is not None
    assert found.state == "a=1,b=2,c=3"
    assert trace_context(states) is None
    long = trace_context([("tracestate", "a=" + "x" * 9999), ("traceparent", PARENT)])
    assert long is not None
    assert long.state == ""


async def test_the_log_has_the_trace() -> None:
    async with running() as up:
        for value in (PARENT, f"ff{PARENT[2:]}"):
            await up.client.generate(
                text="x", max_tokens=2, metadata=(("traceparent", value),)
            ).text()
        await up.idle()
        with_it, without = up.log_lines()
        assert with_it["trace_id"] == TRACE_ID
        assert with_it["parent_span_id"] == SPAN_ID
        assert with_it["trace_flags"] == "01"
        assert not {"trace_id", "parent_span_id", "span_id", "trace_flags"} & set(without)


# --- the client ---------------------------------------------------------------------------------


@pytest.fixture
def tracer() -> otel.Tracer:
    return TracerProvider(shutdown_on_exit=False).get_tracer("test")


async def test_the_client_carries_the_current_span(tracer: otel.Tracer) -> None:
    async with scripted(Act()) as script, Client(script.target, retry=None) as client:
        with tracer.start_as_current_span("caller") as span:
            await client.generate(text="x").text()
            await client.model_info()
            own = f"00-{'a' * 32}-{'b' * 16}-01"
            await client.generate(text="x", metadata=(("traceparent", own),)).text()
        await client.generate(text="x").text()
        ids = span.get_span_context()
        wanted = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{int(ids.trace_flags):02x}"
        found = [seen.metadata.get("traceparent") for seen in script.seen]
        assert found == [wanted, wanted, own, None]


async def test_the_admin_client_carries_it_too(tracer: otel.Tracer) -> None:
    seen = []

    class Spy(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append(dict(details.invocation_metadata).get("traceparent"))
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Spy()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AdminClient(f"127.0.0.1:{port}") as admin:
            with tracer.start_as_current_span("caller"), pytest.raises(SelfdraftError):
                await admin.drain()
    finally:
        await server.stop(None)
    assert seen[0] is not None


def test_the_client_needs_no_opentelemetry() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from selfdraft.propagation import trace_metadata\n"
        "from selfdraft import Client\n"
        "assert trace_metadata() == ()\n"
        "assert 'opentelemetry.trace' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- spans --------------------------------------------------------------------------------------


class Collector:
    """Takes OTLP over gRPC on loopback."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.target = ""

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def wait(self, count: int) -> list[Any]:
        with anyio.fail_after(10):
            while len(self.spans()) < count:
                await anyio.sleep(0.02)
        return self.spans()


@asynccontextmanager
async def collecting(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call,unused-ignore]
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    collector.target = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


@asynccontextmanager
async def exporting(target: str, **options: Any) -> AsyncIterator[Running]:
    config = replace(service_config(), tracing=TracingConfig(endpoint=target, **options))
    async with running(config=config, metrics=True, step_s=0.002) as up:
        yield up


async def stopped(up: Running) -> float:
    """Stops the server; how long that took."""
    began = time.monotonic()
    up.server.stop.begin()
    with anyio.fail_after(20):
        while not up.codes:
            await anyio.sleep(0.01)
    return time.monotonic() - began


def plain(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def check_tree(spans: list[Any]) -> Any:
    """One SERVER span with its three phases, end to start; returns it."""
    (server,) = (span for span in spans if span.kind == span.SPAN_KIND_SERVER)
    children = sorted(
        (span for span in spans if span is not server), key=lambda span: span.start_time_unix_nano
    )
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    for child in children:
        assert child.parent_span_id == server.span_id
        assert child.trace_id == server.trace_id
        assert child.kind == child.SPAN_KIND_INTERNAL
        assert server.start_time_unix_nano <= child.start_time_unix_nano
        assert child.end_time_unix_nano <= server.end_time_unix_nano
    for before, after in pairwise(children):
        assert before.end_time_unix_nano == pytest.approx(after.start_time_unix_nano, abs=1000)
    return server


async def test_a_call_is_a_span_below_its_client_s() -> None:
    async with collecting() as collector, exporting(collector.target) as up:
        began = time.time_ns()
        metadata = (("traceparent", PARENT), ("tracestate", "vendor=1"))
        generation = up.client.generate(
            text="a secret", max_tokens=20, ignore_eos=True, request_id="r-1", metadata=metadata
        )
        await generation.text()
        done = generation.complete
        assert done is not None
        spans = await collector.wait(4)
        server = check_tree(spans)
        assert server.name == "selfdraft.v1.Inference/Generate"
        assert server.trace_id.hex() == TRACE_ID
        assert server.parent_span_id.hex() == SPAN_ID
        assert server.trace_state == "vendor=1"
        assert began - 10**8 < server.start_time_unix_nano < time.time_ns()
        found = plain(server)
        expected = {
            "rpc.system.name": "grpc",
            "rpc.method": "selfdraft.v1.Inference/Generate",
            "rpc.response.status_code": "OK",
            "gen_ai.provider.name": "selfdraft",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "fake",
            "gen_ai.request.max_tokens": 20,
            "gen_ai.usage.input_tokens": done.prompt_tokens,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.response.finish_reasons": ["length"],
            "selfdraft.request_id": "r-1",
            "selfdraft.draft_tokens": done.spec_draft_tokens,
            "selfdraft.accepted_tokens": done.spec_accepted_tokens,
        }
        assert {key: found.get(key) for key in expected} == expected
        assert server.status.code == 0
        assert "secret" not in str(collector.requests)
        resource = collector.requests[0].resource_spans[0].resource
        assert plain(resource)["service.name"] == "selfdraft"
        (line,) = up.log_lines()
        assert line["span_id"] == server.span_id.hex()
        assert line["trace_id"] == TRACE_ID
        now = await up.metrics()
        assert now['selfdraft_spans_total{result="exported"}'] == 4


async def test_the_gateway_s_calls_are_spans_too() -> None:
    async with collecting() as collector, exporting(collector.target) as up:
        request = vllm.GenerateRequest(request_id="g", stream=True)
        request.tokenized.input_ids.extend([5, 6, 7])
        request.sampling_params.max_tokens = 5
        async with grpc.aio.insecure_channel(up.target) as channel:
            stream: Any = channel.unary_stream
            call = stream("/vllm.grpc.engine.VllmEngine/Generate")
            async for _ in call(request.SerializeToString(), metadata=[("traceparent", PARENT)]):
                pass
        server = check_tree(await collector.wait(4))
        assert server.name == "vllm.grpc.engine.VllmEngine/Generate"
        assert server.parent_span_id.hex() == SPAN_ID


async def test_errors_and_sampling() -> None:
    """A client's fault is no error of ours, a deadline is; an unsampled parent leaves no span."""
    unsampled = f"{PARENT[:-2]}00"
    async with collecting() as collector, exporting(collector.target, ratio=0.0) as up:
        for parent in (unsampled, None, PARENT):
            given = () if parent is None else (("traceparent", parent),)
            with pytest.raises(SelfdraftError):
                await up.client.generate(text="", metadata=given).text()
        long: dict[str, Any] = {"text": "x", "max_tokens": 3000, "ignore_eos": True}
        with pytest.raises(SelfdraftError):
            await up.client.generate(
                **long, timeout=0.5, metadata=(("traceparent", PARENT),)
            ).text()
        await up.idle()
        await stopped(up)
        servers = [span for span in collector.spans() if span.kind == span.SPAN_KIND_SERVER]
        assert len(servers) == 2
        bad, late = servers
        assert plain(bad)["error.type"] == "INVALID_ARGUMENT"
        assert bad.status.code == 0
        assert plain(late)["error.type"] in ("DEADLINE_EXCEEDED", "CANCELLED")
        assert late.status.code == (2 if plain(late)["error.type"] == "DEADLINE_EXCEEDED" else 0)


async def test_what_waits_is_handed_on_by_a_stop() -> None:
    async with collecting() as collector, exporting(collector.target) as up:
        for _ in range(3):
            await up.client.generate(text="x", max_tokens=2, ignore_eos=True).text()
        await up.idle()
        assert await stopped(up) < 5
        assert len(collector.spans()) == 12
        assert up.codes == [0]
        assert not up.log_lines("spans not flushed")
        traces = {span.trace_id for span in collector.spans()}
        logged = {bytes.fromhex(line["trace_id"]) for line in up.log_lines()}
        assert traces == logged


@pytest.mark.parametrize("kind", ["closed", "silent"])
async def test_a_collector_that_is_away_costs_no_request(kind: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":  # takes connections and never says a word
            listener.listen()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        async with exporting(target, flush_s=0.5, max_queue=8) as up:
            for _ in range(20):
                generation = up.client.generate(text="x", max_tokens=2, ignore_eos=True)
                with anyio.fail_after(5):
                    await generation.text()
            await up.idle()
            assert len(up.log_lines()) == 20
            took = await stopped(up)
            assert took < 4
            assert up.codes == [0]
            if kind == "silent":
                assert up.log_lines("spans not flushed")


async def test_tls_to_the_collector(tmp_path: Path) -> None:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    roots = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(roots))
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(leaf.private_key_pem.bytes(), chain)])
    async with collecting(credentials) as collector:
        async with exporting(collector.target, ca=roots) as up:
            assert await up.works()
            assert await collector.wait(4)
        before = len(collector.spans())
        async with exporting(collector.target, flush_s=0.3) as up:  # plain text, to one with TLS
            assert await up.works()
            await stopped(up)
        assert len(collector.spans()) == before


async def test_a_defect_of_tracing_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector, exporting(collector.target) as up:

        def broken(self: Tracing, record: RequestRecord, now: float) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(Tracing, "_record", broken)
        up.defects_expected = True
        assert await up.works()
        await up.idle()
        assert len(up.log_lines("unexpected error")) == 1
        assert len(up.log_lines()) == 1


def test_phases_of_what_did_not_come_far() -> None:
    usage = Usage(prompt_tokens=1, submitted_at=1.0, finished_at=4.0)
    assert phases(usage) == [("queue", 1.0, 4.0)]
    usage = replace(usage, started_at=2.0)
    assert phases(usage) == [("queue", 1.0, 2.0), ("prefill", 2.0, 4.0)]
    usage = replace(usage, first_token_at=3.0, last_token_at=3.5)
    assert phases(usage)[1:] == [("prefill", 2.0, 3.0), ("decode", 3.0, 3.5)]


# --- configuration --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"endpoint": "collector"}, "otlp_endpoint"),
        ({"endpoint": "http://collector:4317"}, "otlp_endpoint"),
        ({"endpoint": "c:1", "ratio": 1.5}, "trace_ratio"),
        ({"endpoint": "c:1", "ratio": float("nan")}, "trace_ratio"),
        ({"endpoint": "c:1", "insecure": True, "ca": Path("x")}, "otlp_insecure"),
        ({"endpoint": "c:1", "max_queue": 0}, "max_queue"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        TracingConfig(**options)


def test_options_go_together() -> None:
    assert tracing_config(None, False, None, 1.0) is None
    for bad in ((True, None, 1.0), (False, Path("x"), 1.0), (False, None, 0.5)):
        with pytest.raises(SettingError, match="needs --otlp-endpoint"):
            tracing_config(None, *bad)
    found = tracing_config("c:4317", True, None, 0.5)
    assert found == TracingConfig(endpoint="c:4317", insecure=True, ratio=0.5)
    assert TracingConfig(endpoint="[::1]:4317").host == "::1"


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingError, match=r"selfdraft\[tracing\]"):
        Tracing(TracingConfig(endpoint="127.0.0.1:1"), Any)  # type: ignore[arg-type]


def test_a_propagator_that_fails_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import propagate

    def fail(carrier: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(propagate, "inject", fail)
    inside = otel.SpanContext(trace_id=1, span_id=1, is_remote=False)
    with otel.use_span(otel.NonRecordingSpan(inside)):
        assert trace_metadata() == ()
