"""The Admin service: what an operator can do, and that names stay names."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from selfdraft import AdminClient, Client, Retry, SelfdraftError
from selfdraft.v1 import admin_pb2 as pb

from service.admin import settings
from service.config import SecurityConfig, ServerConfig
from service.reload import FileError
from service.sessionfiles import SessionFiles
from service.tokens import digest_of, entry_text, new_token
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import Running, running, service_config

pytestmark = pytest.mark.anyio


Call = Callable[[AdminClient], Awaitable[object]]


class Site:
    """A server with two tenants, an admin and a folder for sessions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sessions"
        self.path = folder / "tokens.toml"
        self.tokens = {name: new_token() for name in ("ada", "bob", "root")}
        self.path.write_text(
            "".join(
                entry_text(token, tenant=name, admin=name == "root")
                for name, token in self.tokens.items()
            )
        )
        self.path.chmod(0o600)
        self.security = SecurityConfig(tokens=self.path, session_dir=self.folder)

    @asynccontextmanager
    async def serving(self, **more: Any) -> AsyncIterator[tuple[Running, AdminClient]]:
        security = more.pop("security", self.security)
        config = service_config(security=security, server=more.pop("server", None))
        async with (
            running(config=config, boundaries=8, **more) as up,
            AdminClient(up.target, token=self.tokens["root"]) as admin,
        ):
            yield up, admin

    async def chat(self, up: Running, tenant: str, **more: Any) -> int:
        """One turn of the tenant's session `chat`; its cached tokens."""
        async with Client(up.target, token=self.tokens[tenant], retry=None) as client:
            ask: dict[str, Any] = {"text": "hello there", "max_tokens": 3, "ignore_eos": True}
            generation = client.generate(**{**ask, "session_id": "chat", **more})
            self.ids = [token async for chunk in generation for token in chunk.token_ids]
            self.prompt = await client.tokenize(text="hello there")
            await up.until_idle()
            assert generation.complete is not None
            return generation.complete.cached_tokens

    def next_turn(self) -> dict[str, Any]:
        return {"text": None, "token_ids": [*self.prompt, *self.ids, 7]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_a_drain_is_that_of_sigterm_and_is_not_hurried(site: Site) -> None:
    async with site.serving(step_s=0.005) as (up, admin):
        async with Client(up.target, token=site.tokens["ada"], retry=None) as client:
            last = client.generate(text="x", max_tokens=60, ignore_eos=True)
            await last.request_id()
            found = await admin.drain()
            assert (found.active, found.limit_seconds) == (1, 5.0)
            await admin.drain()
            with pytest.raises(SelfdraftError) as caught:
                await client.generate(text="x").text()
            assert caught.value.reason == "DRAINING"
            assert await last.text()
        with anyio.fail_after(5):
            while not up.codes:
                await anyio.sleep(0.01)
        assert up.codes == [0]


async def test_the_configuration_has_every_setting_and_no_secret(site: Site) -> None:
    async with site.serving() as (up, admin):
        found = await admin.config()
        assert found["server.drain_s"] == "5.0"
        assert found["security.tokens"] == str(site.path)
        assert found["security.tls"] == ""
        assert found["limits.grammar.timeout_s"] == "5.0"
        assert set(found) == {name for name, _ in settings(up.server._config)}
        text = repr(found)
        for token in site.tokens.values():
            assert token not in text
            assert digest_of(token)[7:] not in text


async def test_tenants_are_counted_apart(site: Site) -> None:
    async with site.serving(step_s=0.003) as (up, admin):
        await site.chat(up, "ada")
        assert await site.chat(up, "ada", **site.next_turn()) > 0
        async with Client(up.target, token=site.tokens["bob"]) as bob:
            with pytest.raises(SelfdraftError):
                await bob.generate(text="x", temperature=-1).text()
            endless = bob.generate(text="x", max_tokens=3000, ignore_eos=True)
            await endless.request_id()
            found = {tenant.tenant: tenant for tenant in await admin.tenants()}
        assert set(found) == {"ada", "bob"}
        ada, his = found["ada"], found["bob"]
        assert (ada.active, ada.requests, ada.failed, ada.sessions) == (0, 2, 0, 1)
        assert ada.completion_tokens == 6
        assert 0 < ada.cached_tokens < ada.prompt_tokens
        assert (his.active, his.requests, his.failed, his.sessions) == (1, 1, 1, 0)
        await up.until_idle()


async def test_sessions_of_all_tenants_are_listed(site: Site) -> None:
    async with site.serving() as (up, admin):
        for tenant in ("ada", "bob"):
            await site.chat(up, tenant)
        found = await admin.sessions()
        assert {(s.tenant, s.session_id) for s in found} == {("ada", "chat"), ("bob", "chat")}
        assert all(s.tokens and s.pages and s.expires_in_seconds > 0 for s in found)


async def test_a_session_moves_to_another_server(site: Site) -> None:
    async with site.serving() as (up, admin):
        await site.chat(up, "ada")
        written = await admin.export_session("chat", "monday", tenant="ada")
        assert written.tokens == len(site.prompt) + 2
        files = await admin.session_files()
        assert [(file.name, file.bytes) for file in files] == [("monday", written.bytes)]
        assert [path.name for path in site.folder.iterdir()] == ["monday.safetensors"]
        with pytest.raises(SelfdraftError) as caught:
            await admin.export_session("chat", "monday", tenant="ada")
        assert caught.value.reason == "FILE_EXISTS"
        await admin.export_session("chat", "monday", tenant="ada", overwrite=True)
    async with site.serving() as (up, admin):
        found = await admin.import_session("monday", "chat", tenant="ada")
        assert (found.tenant, found.session_id) == ("ada", "chat")
        assert found.tokens == written.tokens
        turn = site.next_turn()
        assert await site.chat(up, "bob", **turn) == 0  # it is ada's
        assert await site.chat(up, "ada", **turn) == written.tokens
        assert len(up.log_lines("session imported")) == 1


NAMES = [
    *("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0b", "a b", "é"),
    *("x" * 129, "a\n", "~root", "%2e%2e", "..\\x"),
]


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_is_no_path(
    name: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.serving() as (up, admin):
        before = sorted(tmp_path.rglob("*"))
        touched: list[object] = []
        scheduler: Any = up.server.door.look().scheduler
        monkeypatch.setattr(scheduler, "export_session", touched.append)
        monkeypatch.setattr(scheduler, "import_session", touched.append)
        calls: tuple[Call, ...] = (
            lambda a: a.export_session("chat", name, tenant="ada"),
            lambda a: a.import_session(name, "chat", tenant="ada"),
        )
        for call in calls:
            with pytest.raises(SelfdraftError) as caught:
                await call(admin)
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in caught.value.violations] == ["name"]
        assert touched == []
        assert sorted(tmp_path.rglob("*")) == before


async def test_a_link_leads_nowhere(site: Site, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    outside.write_text("{}")
    async with site.serving() as (_, admin):
        os.symlink(outside, site.folder / "link.safetensors")
        with pytest.raises(SelfdraftError) as caught:
            await admin.import_session("link", "chat", tenant="ada")
        assert caught.value.reason == "NOT_FOUND"


WRONG: dict[str, tuple[Call, str, str]] = {
    "no such session": (
        lambda a: a.export_session("nobody", "x", tenant="ada"),
        "NOT_FOUND",
        "NOT_FOUND",
    ),
    "no such file": (
        lambda a: a.import_session("nothing", "x", tenant="ada"),
        "NOT_FOUND",
        "NOT_FOUND",
    ),
    "no tenant": (lambda a: a.export_session("chat", "x"), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    "a tenant that is a path": (
        lambda a: a.export_session("chat", "x", tenant="a/b"),
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
    ),
    "no session": (
        lambda a: a.import_session("x", "", tenant="ada"),
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
    ),
    "damaged file": (
        lambda a: a.import_session("damaged", "x", tenant="ada"),
        "FOREIGN_FILE",
        "FAILED_PRECONDITION",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_cannot_be_done_is_told(name: str, site: Site) -> None:
    call, reason, code = WRONG[name]
    async with site.serving() as (_, admin):
        (site.folder / "damaged.safetensors").write_text("{")
        with pytest.raises(SelfdraftError) as caught:
            await call(admin)
        assert (caught.value.reason, caught.value.code.name) == (reason, code)
        assert str(site.folder) not in str(caught.value)


async def test_unknown_fields_are_errors_here_too(site: Site) -> None:
    async with site.serving() as (_, admin):
        request = pb.DrainRequest.FromString(b"\x08\x01")
        with pytest.raises(SelfdraftError) as caught:
            await admin._call("Drain", request)
        assert caught.value.violations[0].field == "1"


async def test_without_a_folder_nothing_is_written(site: Site) -> None:
    async with site.serving(security=SecurityConfig(tokens=site.path)) as (_, admin):
        for call in (
            admin.export_session("chat", "x", tenant="ada"),
            admin.import_session("x", "chat", tenant="ada"),
            admin.session_files(),
        ):
            with pytest.raises(SelfdraftError) as caught:
                await call
            assert caught.value.reason == "NOT_CONFIGURED"


async def test_without_tokens_there_is_one_tenant_and_it_is_everybody(tmp_path: Path) -> None:
    security = SecurityConfig(session_dir=tmp_path)
    config = service_config(security=security, server=ServerConfig(port=0))
    async with (
        running(config=config, boundaries=8) as up,
        AdminClient(up.target) as admin,
    ):
        ask: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "session_id": "a/b"}
        await up.client.generate(text="hello", **ask).text()
        await up.until_idle()
        found = await admin.sessions()
        assert [(s.tenant, s.session_id) for s in found] == [("", "a/b")]
        await admin.export_session("a/b", "x")
        with pytest.raises(SelfdraftError, match="tenant: must be absent"):
            await admin.export_session("a/b", "y", tenant="ada")
        assert [tenant.tenant for tenant in await admin.tenants()] == [""]


async def test_a_disk_that_fails_is_told_without_its_paths(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(site.folder / "x"))

    monkeypatch.setattr(FakeEngine, "export_boundary", full)
    async with site.serving() as (up, admin):
        await site.chat(up, "ada")
        with pytest.raises(SelfdraftError) as caught:
            await admin.export_session("chat", "x", tenant="ada")
        assert caught.value.reason == "STORAGE_FAILED"
        assert "No space left on device" in caught.value.message
        assert str(site.folder) not in caught.value.message
        assert str(site.folder) in up.log.getvalue()


def test_leftovers_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".monday.safetensors.abc.part").write_text("half")
    (tmp_path / "monday.safetensors").write_text("whole")
    files = SessionFiles(tmp_path)
    files.prepare()
    files.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["monday.safetensors"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="session folder"):
        SessionFiles(tmp_path / "file" / "below").prepare()


async def test_a_flush_forgets_what_is_kept_and_touches_nothing_that_runs(site: Site) -> None:
    async with site.serving(step_s=0.002) as (up, admin):
        for tenant in ("ada", "bob"):
            await site.chat(up, tenant)
        turn = site.next_turn()
        info = up.server.door.look().scheduler.info
        async with Client(up.target, token=site.tokens["ada"], retry=None) as client:
            running_on = client.generate(text="x", max_tokens=40, ignore_eos=True)
            await running_on.request_id()
            freed = await admin.flush_prefix_cache()
            assert (freed.sessions, freed.boundaries >= 2, freed.pages > 0) == (2, True, True)
            kept = freed.pages * info.page_bytes + freed.boundaries * info.boundary_bytes
            assert freed.bytes == kept
            assert [s.session_id for s in await admin.sessions()] == []
            assert await running_on.text()
        await up.until_idle()
        now = up.statistics
        assert now.evictions["flush"] == freed.boundaries
        assert now.sessions_ended["flush"] == 2
        assert await site.chat(up, "bob", **turn) == 0  # nothing is left to start from
        again = await admin.flush_prefix_cache()  # what has ended since
        assert again.boundaries > 0
        last = await admin.flush_prefix_cache()
        assert (last.boundaries, last.sessions, last.pages, last.bytes) == (0, 0, 0, 0)
        assert up.statistics.boundaries_used == 0
        assert len(up.log_lines("prefix cache flushed")) == 3


async def test_a_flush_leaves_what_a_queued_group_waits_for(site: Site) -> None:
    """Members of a group start from the first one's prompt, which is kept for them."""
    async with site.serving(step_s=0.01, max_rows=1) as (up, admin):
        async with Client(up.target, token=site.tokens["ada"], retry=None) as client:
            group = client.generate(text="def add(a, b):", n=3, max_tokens=20, ignore_eos=True)
            await group.request_id()
            with anyio.fail_after(10):
                while up.statistics.boundaries_used == 0:
                    await anyio.sleep(0.005)
            freed = await admin.flush_prefix_cache()
            assert freed.boundaries == 0
            await group.texts()
        assert [group.completes[index].cached_tokens > 0 for index in (1, 2)] == [True, True]


async def test_safe_calls_are_made_again_and_those_that_move_a_session_once() -> None:
    async with AdminClient("127.0.0.1:1", timeout=5, retry=Retry(initial_delay_s=0)) as admin:
        made: list[str] = []

        def stub(name: str) -> Callable[..., Any]:
            call = getattr(real, name)

            def counted(*parts: Any, **named: Any) -> Any:
                made.append(name)
                return call(*parts, **named)

            return counted

        real, admin._stub = admin._stub, type("Stub", (), {})()
        calls: dict[str, tuple[Call, int]] = {
            "Drain": (lambda a: a.drain(), 5),
            "GetConfig": (lambda a: a.config(), 5),
            "FlushPrefixCache": (lambda a: a.flush_prefix_cache(), 5),
            "ListSessionFiles": (lambda a: a.session_files(), 5),
            "ExportSession": (lambda a: a.export_session("s", "n", overwrite=True), 1),
            "ImportSession": (lambda a: a.import_session("n", "s"), 1),
        }
        for name, (call, attempts) in calls.items():
            setattr(admin._stub, name, stub(name))
            with pytest.raises(SelfdraftError) as caught:
                await call(admin)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert made.count(name) == attempts, name
