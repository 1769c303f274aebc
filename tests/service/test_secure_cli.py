"""The command line where it is about secrets: TLS, tokens, and an operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from service.cli import main
from service.config import SecurityConfig, ServerConfig, ServiceConfig, TlsFiles
from service.tokens import digest_of, read_entries
from tests.service.test_cli import Served, model

__all__ = ["model"]  # a fixture

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfdraft", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    return run


class Secure:
    """Files of a site, and a server that uses them."""

    def __init__(self, folder: Path, model: Path) -> None:
        ca = trustme.CA()
        leaf, own = ca.issue_cert("localhost", "127.0.0.1"), ca.issue_cert("operator@example")
        self.folder = folder
        self.ca = self.write("ca.pem", ca.cert_pem.bytes())
        cert = self.write("cert.pem", leaf.cert_chain_pems[0].bytes())
        key = self.write("key.pem", leaf.private_key_pem.bytes())
        self.own_cert = self.write("own.pem", own.cert_chain_pems[0].bytes())
        self.own_key = self.write("own-key.pem", own.private_key_pem.bytes())
        self.tokens = folder / "tokens.toml"
        self.server = Served(
            *("--model", str(model), "--mtp-gate", "off", "--max-rows", "2", "--depth", "1"),
            *("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", self.ca),
            *("--tokens", str(self.tokens), "--session-dir", str(folder / "sessions")),
        )
        self.tls = ("--tls-ca", self.ca, "--tls-cert", self.own_cert, "--tls-key", self.own_key)

    def write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return str(path)


@pytest.fixture
def secure(tmp_path: Path, model: Path, run: Run) -> Iterator[Secure]:
    tokens = str(tmp_path / "tokens.toml")
    for name, more in (("ada", ()), ("root", ("--admin", "--days", "9"))):
        code, token, note = run("token", "new", "--tenant", name, "--append", tokens, *more)
        assert code == 0
        (tmp_path / name).write_text(token)
        assert token.strip() not in note
        assert digest_of(token.strip()) in note
    site = Secure(tmp_path, model)
    yield site
    site.server.process.kill()
    site.server.process.wait()


def test_tokens_tls_and_an_operator(secure: Secure, run: Run) -> None:
    assert secure.tokens.stat().st_mode & 0o777 == 0o600
    entries = read_entries(secure.tokens.read_bytes(), secure.tokens)
    assert [(e.identity.tenant, e.identity.admin) for e in entries] == [
        ("ada", False),
        ("root", True),
    ]
    target = ("--target", secure.server.grpc)
    ada = ("--token-file", str(secure.folder / "ada"))
    ask = ("generate", "def add", *target, "--max-tokens", "4")
    code, said, err = run(*ask, *secure.tls, *ada, "--session-id", "chat")
    assert (code, bool(said)) == (0, True), err
    for arguments, why in (
        ((*ask, *secure.tls), "UNAUTHENTICATED"),
        ((*ask, "--tls-ca", secure.ca, *ada), "UNAVAILABLE"),  # no certificate of its own
        ((*ask, *ada), "UNAVAILABLE"),  # plain text
    ):
        code, said, err = run(*arguments)
        assert (code, said) == (1, "")
        assert why in err

    def admin(*arguments: str, by: str = "root") -> tuple[int, str, str]:
        token = ("--token-file", str(secure.folder / by))
        return run("admin", *target, *secure.tls, *token, *arguments)

    code, said, err = admin("sessions", by="ada")
    assert (code, said) == (1, "")
    assert "PERMISSION_DENIED" in err
    assert "ada     chat" in admin("sessions")[1]
    assert "security.tokens = " in admin("config")[1]
    assert "tokens" in admin("export", "chat", "monday", "--tenant", "ada")[1]
    assert "monday" in admin("files")[1]
    assert "again: " in admin("import", "monday", "again", "--tenant", "ada")[1]
    tenants = admin("tenants")[1].splitlines()
    assert tenants[1].split()[:4] == ["ada", "0", "1", "0"]
    assert "of 2 sessions and others: " in admin("flush")[1]
    assert "chat" not in admin("sessions")[1]
    assert "draining: 0 running" in admin("drain")[1]
    secure.server.wait_for("stopped")
    assert secure.server.process.wait(timeout=20) == 0
    secrets = [(secure.folder / name).read_text().strip() for name in ("ada", "root")]
    assert not any(secret in repr(secure.server.lines) for secret in secrets)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("token", "new", "--tenant", "a/b"), "tenant: must be 1 … 64"),
        (("token", "new", "--tenant", "a", "--append", "/no/such/folder/x"), "/no/such/folder"),
        (("serve", "--host", "0.0.0.0"), "give --tls-cert and --tls-key"),
        (("serve", "--tls-cert", "/no/such", "--tls-key", "/no/such"), "/no/such: No such file"),
        (("serve", "--tokens", "/no/such"), "/no/such: No such file"),
        (("serve", "--tls-cert", "x"), "needs --tls-key"),
        (("generate", "x", "--target", "t:1", "--token-file", "TOKEN"), "see --tls"),
        (("generate", "x", "--target", "t:1", "--token-file", "/no/such"), "/no/such: No such"),
        (("generate", "x", "--target", "t:1", "--tls-ca", "/no/such"), "/no/such: No such file"),
        (("generate", "x", "--target", "t:1", "--tls-cert", "TOKEN"), "needs --tls-key"),
        (("generate", "x", "--target", "t:1", "--token-file", "TWO"), "must hold one token"),
        (("admin", "--target", "t:1", "--token-file", "TOKEN", "drain"), "see --tls"),
    ],
)
def test_errors_of_usage(arguments: tuple[str, ...], said: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "TOKEN").write_text("sd_secret\n")
    (tmp_path / "TWO").write_text("sd_secret sd_secret\n")
    given = [str(tmp_path / word) if word in ("TOKEN", "TWO") else word for word in arguments]
    code, out, err = run(*given)
    assert (code, out) == (2, "")
    assert said in err
    assert "sd_secret" not in err
    assert len([line for line in err.splitlines() if line.startswith("selfdraft: ")]) == 1


def test_options_of_security_reach_the_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    from service import launch

    seen: list[ServiceConfig] = []

    def serve(config: ServiceConfig, *_: object) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    assert run("serve", "--model", str(model))[0] == 0
    assert (
        run(
            *("serve", "--model", str(model), "--insecure", "--metrics-host", "10.0.0.5"),
            *("--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--tokens", "t"),
            *("--session-dir", "s", "--share-prefixes", "--no-reflection"),
        )[0]
        == 0
    )
    plain, secure = seen
    assert (plain.security, plain.server) == (SecurityConfig(), ServerConfig())
    assert secure.server == ServerConfig(insecure=True, metrics_host="10.0.0.5")
    assert secure.security == SecurityConfig(
        tls=TlsFiles(cert=Path("c"), key=Path("k"), client_ca=Path("a")),
        tokens=Path("t"),
        open_reflection=False,
        share_prefixes_between_tenants=True,
        session_dir=Path("s"),
    )


def test_an_entry_is_added_to_what_is_there(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("# ours\n")
    os.chmod(path, 0o640)
    for name in ("a", "b"):
        assert run("token", "new", "--tenant", name, "--append", str(path))[0] == 0
    assert path.read_text().startswith("# ours\n")
    assert [e.identity.tenant for e in read_entries(path.read_bytes(), path)] == ["a", "b"]
    assert path.stat().st_mode & 0o777 == 0o640
    path.write_text("[[token")
    code, out, err = run("token", "new", "--tenant", "c", "--append", str(path))
    assert (code, out) == (2, "")
    assert "is not TOML" in err
    assert path.read_text() == "[[token"
