"""The log is complete and declared, holds nothing a client sent, is bounded, and harms nobody."""

from __future__ import annotations

import ast
import asyncio
import errno
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
import structlog
from selfdraft import Client, SelfdraftError

from service.config import SecurityConfig
from service.logcatalogue import COMMON, EVENTS, REQUEST
from service.logs import (
    BURST,
    PER_S,
    Limits,
    Lines,
    RequestRecord,
    capture_stdlib,
    dropped_by,
    make_logger,
    report_suppressed,
)
from service.loopwatch import INTERVAL_S, LoopWatch
from service.metrics import Metrics
from service.tokens import entry_text, new_token
from tests.checkout import ROOT
from tests.service.harness import Running, running, saying, service_config

pytestmark = pytest.mark.anyio

CANARY = "CANARY"


def asks() -> Iterator[dict[str, Any]]:
    """Good and bad requests with a canary in every place that holds somebody's text."""
    c = f"{CANARY} rabbit"
    schema = {"type": "object", "properties": {c: {"const": c}}, "required": [c]}
    tool = {"type": "function", "function": {"name": "f", "description": c}}
    yield {"text": c}
    yield {"text": c, "stop": [c, "x" * 9999, f"{c} 2"]}
    yield {"text": c, "stop": [c]}
    yield {"text": c, "json_schema": schema}
    yield {"text": c, "json_schema": f'{{"type": "{c}"}}'}
    yield {"text": c, "json_schema": f'{{"{c}": '}
    yield {"text": c, "regex": f"{CANARY}("}
    yield {"text": c, "regex": f"{CANARY}+"}
    yield {"text": c, "grammar": f'start: "{c}" {CANARY}'}
    yield {"text": c, "grammar": f"start: {CANARY}"}
    yield {"messages": [("user", c)]}
    yield {"messages": [(c, c)]}
    yield {"messages": [("nobody", c), ("user", c)], "template_variables": {c: c}}
    yield {"messages": [("user", c)], "tools": [tool]}
    yield {"messages": [("user", c)], "tools": [f"{{{c}"]}
    yield {"messages": [{"role": "assistant", "content": c, "tool_calls": f"[{c}"}]}
    yield {"text": c, "temperature": -1.0, "request_id": "id 1"}
    yield {"text": c, "metadata": ((f"x-{CANARY.lower()}", c), ("traceparent", c))}
    yield {"text": c, "metadata": (("selfdraft-tenant", c),)}
    yield {"token_ids": [10**6, 5]}


async def test_nothing_a_client_sends_or_gets_is_logged(tmp_path: Path) -> None:
    token = f"{new_token()}{CANARY}"
    path = tmp_path / "tokens.toml"
    path.write_text(entry_text(token, tenant="ada"))
    path.chmod(0o600)
    config = service_config(security=SecurityConfig(tokens=path))
    out = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        async with running(config=config, token=saying(f"{CANARY} out "), metrics=True) as up:
            capture_stdlib(up.server._logger)
            outcomes = Counter[str]()
            async with Client(up.target, token=token, retry=None) as client:
                for ask in asks():
                    try:
                        got = await client.generate(**{"max_tokens": 20} | ask).text()
                        outcomes["text" if CANARY in got else "other"] += 1
                    except SelfdraftError as error:
                        outcomes[error.reason or "none"] += 1
                with pytest.raises(SelfdraftError):
                    await client.tokenize(messages=[("nobody", CANARY)], tools=[f"{{{CANARY}"])
            async with Client(up.target, token=f"{CANARY}-wrong", retry=None) as stranger:
                with pytest.raises(SelfdraftError):
                    await stranger.generate(text=CANARY).text()
            await up.idle()
            lines = up.log_lines()
            # Those whose text came, and those that were refused, of either kind several.
            assert outcomes["text"] >= 4, outcomes
            assert outcomes["INVALID_ARGUMENT"] >= 8, outcomes
            assert len(lines) == sum(outcomes.values())
            told = [line for line in up.log.getvalue().splitlines() if CANARY in line.upper()]
            assert not told, told[0]
            assert CANARY.lower() not in out.getvalue().lower()
            assert CANARY.lower() not in json.dumps(await up.metrics()).lower()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


async def test_a_bad_request_s_line_names_its_fields() -> None:
    async with running() as up:
        with pytest.raises(SelfdraftError):
            await up.client.generate(text="", temperature=-1.0).text()
        await up.idle()
        (line,) = up.log_lines()
        assert line["reason"] == "INVALID_ARGUMENT"
        assert set(line["detail"].split(", ")) == {"text", "sampling_params.temperature"}


# --- what is declared -------------------------------------------------------------------------


async def test_fields_of_the_request_line_are_those_declared() -> None:
    declared = {field.name for field in (*COMMON, *REQUEST)}
    always = {f.name for f in (*COMMON, *REQUEST) if f.when == "always"}
    seen: set[str] = set()
    async with running(step_s=0.001) as up:
        trace = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)
        everything: dict[str, Any] = {
            "text": "x",
            "max_tokens": 4,
            "min_tokens": 1,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "logit_bias": {3: 1.0},
            "logprobs": 1,
            "prompt_logprobs": 1,
            "session_id": "s",
            "priority": "batch",
            "metadata": (*trace, ("selfdraft-tenant", "search")),
        }
        await up.client.generate(**everything).text()
        await up.client.generate(text="x", regex="[ab]{1,3}", max_tokens=8).text()
        await up.client.generate(text="x", max_tokens=2, reuse_prefix=False).text()
        with pytest.raises(SelfdraftError):
            await up.client.generate(text="").text()
        await up.idle()
        for line in up.log_lines():
            assert always <= set(line)
            assert set(line) <= declared
            seen |= set(line)
    # Written where lines were dropped, and where spans are exported: tested there.
    assert declared - seen == {"suppressed", "span_id"}


def written() -> Iterator[tuple[str, str, set[str]]]:
    """(event, level, fields) of every call of a logger in service/, from its source."""
    for path in sorted((ROOT / "service").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if not owner.endswith("logger") or not node.args:
                continue
            name = node.args[1] if node.func.attr == "log" else node.args[0]
            fields = {keyword.arg or "**" for keyword in node.keywords}
            if isinstance(name, ast.Constant):
                yield str(name.value), node.func.attr, fields
            else:
                assert ast.unparse(name) == "event", f"{path.name}: {ast.unparse(node)}"


def test_every_event_written_is_declared_with_its_fields() -> None:
    events = {event.name: event for event in EVENTS}
    found: dict[str, set[str]] = {}
    for name, level, fields in written():
        if name == "request":
            continue
        assert name in events, f"{name!r} is not in service/logcatalogue.py"
        declared = {*events[name].fields, "exc_info", "**"}
        assert fields <= declared, f"{name!r} has undeclared {fields - declared}"
        assert level == "log" or level in events[name].level
        found.setdefault(name, set()).update(fields)
    # Their name is given by the caller of a helper.
    assert set(events) - set(found) == {"session exported", "session imported"}
    for name, fields in found.items():
        missing = set(events[name].fields) - fields
        if not fields & {"**", "exc_info"}:
            assert not missing, f"{name!r} never has {missing}"


async def test_a_life_in_the_log() -> None:
    events = {event.name: event for event in EVENTS}
    async with running(step_s=0.002) as up:
        assert await up.works()
        last = up.client.generate(text="x", max_tokens=40, ignore_eos=True)
        await last.request_id()
        up.server.stop.begin()
        await last.text()
        with anyio.fail_after(5):
            while not up.codes:
                await anyio.sleep(0.01)
        lines = [json.loads(line) for line in up.log.getvalue().splitlines()]
        names = [line["event"] for line in lines if line["event"] != "request"]
        assert names == [
            *("starting", "health", "serving", "draining", "health", "drained", "stopped")
        ]
        for line in lines:
            if line["event"] in events:
                common = {field.name for field in COMMON}
                assert set(line) - common <= set(events[line["event"]].fields)
        (start,) = up.log_lines("starting")
        assert set(start) - {field.name for field in COMMON} == set(events["starting"].fields)
        (serving,) = up.log_lines("serving")
        assert set(serving) - {field.name for field in COMMON} == set(events["serving"].fields)
        assert [line["serving"] for line in up.log_lines("health")] == [True, False]


# --- how much ----------------------------------------------------------------------------------


async def flood(up: Running, calls: int) -> None:
    limit = asyncio.Semaphore(50)

    async def one() -> None:
        async with limit:
            with pytest.raises(SelfdraftError):
                await up.client.generate(text="").text()

    async with anyio.create_task_group() as tasks:
        for _ in range(calls):
            tasks.start_soon(one)
    await up.idle()


async def test_each_call_makes_one_line_and_a_flood_a_bounded_number() -> None:
    async with running(metrics=True) as up:
        began = anyio.current_time()
        await flood(up, 40)
        assert len(up.log_lines()) == 40
        await flood(up, 260)
        assert await up.works()  # a good one has its line all the same
        await up.idle()
        lines = up.log_lines()
        most = BURST + PER_S * (anyio.current_time() - began) + 2
        assert BURST <= len(lines) <= most
        assert lines[-1]["status"] == "OK"
        now = await up.metrics()
        dropped = now['selfdraft_log_lines_dropped_total{cause="rate"}']
        assert len(lines) + dropped == 301
        assert now['selfdraft_requests_refused_total{reason="INVALID_ARGUMENT"}'] == 300
        told = sum(line.get("suppressed", 0) for line in lines)
        report_suppressed(up.server._logger)
        told += sum(line["suppressed"] for line in up.log_lines("lines suppressed"))
        assert told == dropped


def test_a_bucket_fills_again_and_says_what_is_missing() -> None:
    now = [0.0]
    limits = Limits(lambda: now[0])

    def write(**fields: Any) -> bool:
        event = {"event": "request", **fields}
        try:
            limits(None, "info", event)
        except structlog.DropEvent:
            return False
        last.update(event)
        return True

    last: dict[str, Any] = {}
    assert [write() for _ in range(BURST + 5)].count(True) == BURST
    assert write(completion_tokens=1)
    assert "suppressed" not in last
    now[0] = 1 / PER_S
    assert write()
    assert last["suppressed"] == 5
    assert not write()
    now[0] = 1e6
    assert [write() for _ in range(BURST + 5)].count(True) == BURST
    assert limits.dropped == 5 + 1 + 5


# --- a stream that does not take it -----------------------------------------------------------


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "gone"),
        OSError(errno.ENOSPC, "full"),
        ValueError("I/O operation on closed file"),
    ],
)
async def test_a_broken_stream_fails_no_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = make_logger("json", Broken(error))
    async with running(metrics=True) as up:
        monkeypatch.setattr(up.server.servicer, "_logger", logger)
        up.server.metrics.facts.lines_dropped = dropped_by(logger)
        assert await up.works()
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="").text()
        assert caught.value.reason == "INVALID_ARGUMENT"
        await up.idle()
        now = await up.metrics()
        assert now['selfdraft_log_lines_dropped_total{cause="write"}'] == 2


def test_a_real_pipe_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    logger = make_logger("json", stream)
    logger.info("one")
    logger.info("two")
    assert dropped_by(logger)()["write"] >= 1
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_what_libraries_log_never_raises() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    raising = logging.raiseExceptions
    out = io.StringIO()
    try:
        capture_stdlib(make_logger("json", Broken(OSError(errno.EPIPE, "gone"))))
        logging.getLogger("a.library").error("broken")
        capture_stdlib(make_logger("json", out))
        logging.getLogger("a.library").error("%d of %d", 1)
        logging.getLogger("a.library").error(object())
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = raising
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0]["message"] == "%d of %d"
    assert len(lines) == 2


def test_text_that_a_stream_cannot_encode_is_written_plainly() -> None:
    raw = io.BytesIO()
    lines = Lines(io.TextIOWrapper(raw, encoding="ascii"), Limits())
    lines.msg("naïve \ud800")
    assert raw.getvalue() == b"na\\xefve \\ud800\n"
    assert lines.dropped()["write"] == 0


def test_a_record_without_anything_has_its_line() -> None:
    out = io.StringIO()
    RequestRecord(request_id="r", peer="p").emit(make_logger("json", out), 1.0)
    assert json.loads(out.getvalue())["event"] == "request"


# --- the event loop ---------------------------------------------------------------------------


async def test_a_slow_loop_is_measured_and_told_of() -> None:
    now = [100.0]
    out = io.StringIO()
    metrics = Metrics(lambda: None, version="0")
    watch = LoopWatch(metrics, make_logger("json", out), lambda: now[0])
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0)
        now[0] += INTERVAL_S + 3.5  # nothing turned meanwhile
        assert metrics.facts.stalled_s() == pytest.approx(3.5)
        value = metrics.registry.get_sample_value
        with anyio.fail_after(5):
            while not value("selfdraft_event_loop_lag_seconds_count"):
                await asyncio.sleep(0.01)
        assert value("selfdraft_event_loop_lag_seconds_sum") == pytest.approx(3.5)
        assert metrics.facts.stalled_s() == 0
    finally:
        task.cancel()
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (line["event"], line["lag_s"]) == ("slow event loop", 3.5)


async def test_an_undecodable_flood_is_bounded_and_counted() -> None:
    flood = BURST + 30
    async with running() as up:
        async with grpc.aio.insecure_channel(up.target) as channel:
            unary: Any = channel.unary_unary
            call = unary("/selfdraft.v1.Inference/Tokenize")
            for _ in range(flood):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"\xff\xff")
        with anyio.fail_after(10):
            while _not_taken(up) < flood:
                await asyncio.sleep(0.05)
        assert _not_taken(up) == flood
        assert len(up.log_lines("call not taken")) < 5
        assert len(up.log_lines("calls not taken")) < 30


def _not_taken(up: Running) -> int:
    more = sum(line["calls"] for line in up.log_lines("calls not taken"))
    return int(len(up.log_lines("call not taken")) + more)
