"""Priorities, tenants and deadlines, as clients and operators meet them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import Client, SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.config import TenantPolicy
from scheduler.request import Priority
from service.cli import _expected, app
from service.config import SettingError
from service.settings import UsageError
from service.tenant import MAX_TENANTS, TENANT_KEY, read_tenants
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio


def as_tenant(name: str) -> dict[str, Any]:
    return {"metadata": [(TENANT_KEY, name)]}


async def queued(up: Running, name: str, **others: Any) -> None:
    """A request that waits, or runs, until it is aborted or done."""
    others = others if "token_ids" in others else {"token_ids": [5], **others}
    up.streams[name] = generation = up.client.generate(  # type: ignore[assignment]
        request_id=name, ignore_eos=True, **others
    )
    assert await generation.request_id() == name


async def error_of(up: Running, **others: Any) -> SelfdraftError:
    with pytest.raises(SelfdraftError) as caught:
        await up.client.generate(text="x", **others).text()
    return caught.value


# --- priorities -----------------------------------------------------------------------------------


async def test_a_higher_priority_goes_first() -> None:
    async with running(step_s=0.001, max_rows=1, metrics=True) as up:
        await queued(up, "running", max_tokens=3000, priority="interactive")  # nobody displaces it
        with anyio.fail_after(3):
            while not up.statistics.running:
                await anyio.sleep(0.005)
        order = ("batch", None, "default", "interactive")
        for number, priority in enumerate(order):
            ids = [5] * (2 + number)
            await queued(up, f"{number}", token_ids=ids, max_tokens=2, priority=priority)
        assert up.statistics.queued_by_class == {
            Priority.BATCH: 1,
            Priority.DEFAULT: 2,
            Priority.INTERACTIVE: 1,
        }
        now = await up.metrics()
        assert now['selfdraft_requests_waiting_by_priority{priority="default"}'] == 2
        assert now['selfdraft_queue_oldest_wait_seconds{priority="batch"}'] > 0
        await up.client.abort("running")
        await up.until_idle()
        chunks = [chunk for plan in up.engines[0].plans for chunk in plan.prefill]
        assert [len(chunk.tokens) for chunk in chunks] == [1, 5, 3, 4, 2]


async def test_an_unknown_priority_is_an_error() -> None:
    async with running() as up:
        request = pb.GenerateRequest(text="x")
        request.MergeFromString(b"\x48\x09")  # field 9, an open enum: 9
        with pytest.raises(SelfdraftError) as caught:
            await up.client.start(request).text()
        assert [v.field for v in caught.value.violations] == ["priority"]
        with pytest.raises(ValueError, match="priority: must be one of batch"):
            up.client.generate(text="x", priority="urgent")  # type: ignore[arg-type]


# --- tenants --------------------------------------------------------------------------------------


async def test_tokens_go_on_the_tenants_account() -> None:
    config = service_config(tenants={"search": TenantPolicy()})
    async with running(config=config, metrics=True) as up:
        for name in ("search", "nobody-knows.me_1", "N" * 64):
            text = up.client.generate(
                token_ids=[5] * 7, max_tokens=3, ignore_eos=True, **as_tenant(name)
            )
            await text.text()
        now = await up.metrics()
        assert now['selfdraft_tenant_tokens_total{tenant="search"}'] == 10
        assert now['selfdraft_tenant_tokens_total{tenant="other"}'] == 20
        assert not any("nobody" in name for name in now)
        with anyio.fail_after(3):
            while len(up.log_lines()) < 3:
                await anyio.sleep(0.01)
        assert up.log_lines()[0]["tenant"] == "search"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/b"])
async def test_a_tenants_name_is_checked(name: str) -> None:
    async with running(metrics=True) as up:
        error = await error_of(up, **as_tenant(name))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [v.field for v in error.violations] == [TENANT_KEY]
        assert "1 … 64 characters" in error.violations[0].description
        twice = [(TENANT_KEY, "a"), (TENANT_KEY, "b")]
        assert "given 2 times" in (await error_of(up, metadata=twice)).message
        assert up.statistics.submitted == 0


async def test_what_a_tenant_may_queue() -> None:
    config = service_config(tenants={"small": TenantPolicy(max_queued_tokens=10)})
    async with running(config=config, step_s=0.002, max_rows=1, metrics=True) as up:
        await queued(up, "running", max_tokens=3000, priority="interactive")  # nobody displaces it
        with anyio.fail_after(3):
            while not up.statistics.running:
                await anyio.sleep(0.005)
        ask: dict[str, Any] = {"token_ids": [5] * 8, "max_tokens": 3}
        first = up.client.generate(**ask, request_id="first", **as_tenant("small"))
        await first.request_id()
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(**ask, **as_tenant("small")).text()
        error = caught.value
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        assert error.retry_after_s is not None
        other = up.client.generate(**ask, request_id="other", **as_tenant("another"))
        await other.request_id()
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(token_ids=[5] * 11, **as_tenant("small")).text()
        assert caught.value.violations[0].field == "tokenized"
        now = await up.metrics()
        assert now['selfdraft_requests_refused_total{reason="TENANT_LIMIT"}'] == 1
        for name in ("running", "first", "other"):
            await up.client.abort(name)
        await up.until_idle()


# --- deadlines ------------------------------------------------------------------------------------


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    """One row, 50 steps of some 4 ms a request: 15 requests ahead are about 3 s."""
    async with running(step_s=0.004, max_rows=1, max_depth=0, metrics=True) as up:
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(up.client.generate(text="x", max_tokens=10).text)
        for number in range(15):
            await queued(up, f"w{number}", max_tokens=50)
        started = time.monotonic()
        error = await error_of(up, timeout=0.4)
        assert time.monotonic() - started < 0.3
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason == "DEADLINE_UNREACHABLE"
        assert error.retry_after_s is not None
        assert "deadline" in error.message
        now = await up.metrics()
        assert now['selfdraft_requests_refused_total{reason="DEADLINE_UNREACHABLE"}'] == 1
        for number in range(15):
            await up.client.abort(f"w{number}")
        await up.until_idle()
        assert await up.client.generate(text="x", max_tokens=1, timeout=2.0).text() is not None


# --- the operator's file --------------------------------------------------------------------------

GOOD = """
[default]
max_queued_tokens = 2000

[tenants.search]
weight = 4
max_rows = 8
max_priority = "default"
max_sessions = 20

[tenants."a.b"]
"""


def test_a_file_of_tenants() -> None:
    assert read_tenants(GOOD) == {
        "default_tenant": TenantPolicy(max_queued_tokens=2000),
        "tenants": {
            "search": TenantPolicy(
                weight=4.0, max_rows=8, max_priority=Priority.DEFAULT, max_sessions=20
            ),
            "a.b": TenantPolicy(),
        },
    }
    assert read_tenants("") == {"tenants": {}, "default_tenant": TenantPolicy()}


MANY = "\n".join(f"[tenants.t{number}]" for number in range(MAX_TENANTS + 1))


@pytest.mark.parametrize(
    ("text", "name", "limit"),
    [
        ("tenants = [", "tenants", "not TOML"),
        ("tenants = 3", "tenants", "must be a table"),
        ("[tenant.a]", "tenant", "there are tenants, default"),
        ("[tenants.a]\nwieght = 1", "tenants.a.wieght", "there are weight, max_rows"),
        ("[tenants.a]\nweight = 0", "tenants.a", "weight must be finite and > 0"),
        ("[tenants.a]\nweight = nan", "tenants.a", "weight must be finite and > 0"),
        ("[tenants.a]\nweight = true", "tenants.a.weight", "must be a number"),
        ("[tenants.a]\nmax_rows = 1.5", "tenants.a.max_rows", "must be an integer >= 1"),
        ("[default]\nmax_rows = 0", "default", "max_rows must be >= 1"),
        ("[default]\nmax_sessions = 0", "default", "max_sessions must be >= 1"),
        ("[default]\nmax_priority = 'high'", "default.max_priority", "batch, default, inter"),
        ("[tenants]\na = 1", "tenants.a", "must be a table"),
        ('[tenants."a b"]', "tenants.a b", "1 … 64 characters"),
        ("[tenants.other]", "tenants.other", "metrics"),
        (MANY, "tenants", f"at most {MAX_TENANTS}"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, name: str, limit: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_tenants(text)
    assert caught.value.name == name
    assert limit in caught.value.limit


def test_the_command_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.a]\nmax_rows = 'two'\n")
    for options, message in (
        (["serve", "--tenants", str(tmp_path / "tenants.toml")], "tenants.a.max_rows: must be"),
        (["serve", "--tenants", str(tmp_path / "absent.toml")], "--tenants: cannot read"),
        (["generate", "x", "--priority", "urgent"], "--priority: must be one of batch"),
    ):
        with pytest.raises((UsageError, SettingError), match=message) as caught:
            app(options, standalone_mode=False)
        assert _expected(caught.value) == 2


async def test_a_client_sends_what_it_is_told() -> None:
    seen: list[pb.GenerateRequest] = []

    class Spy(Client):
        def start(self, request: pb.GenerateRequest, **others: Any) -> Any:
            seen.append(request)

    async with Spy("localhost:1") as client:
        client.generate(text="x")
        client.generate(text="x", priority="interactive")
    assert not seen[0].HasField("priority")
    assert seen[1].priority == pb.PRIORITY_INTERACTIVE
