"""`serve --check`: what would stop a start is found without one, and read by a person."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from engine.config import EngineConfig
from engine.load import plan_memory
from service.cli import main
from service.tokens import entry_text, new_token
from tests.engine.tiny_checkpoints import write_checkpoint
from tests.service.harness import FIXTURES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can run, with a tokenizer."""
    folder = Path(write_checkpoint(tmp_path_factory.mktemp("model"), "hf"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FIXTURES / "byte_level" / name).read_bytes())
    return folder


class Site:
    """A complete configuration on disk."""

    def __init__(self, folder: Path, model: Path) -> None:
        ca = trustme.CA()
        leaf = ca.issue_cert("inference.example")
        self.folder = folder
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.cert.write_bytes(leaf.cert_chain_pems[0].bytes())
        self.key.write_bytes(leaf.private_key_pem.bytes())
        self.tokens = folder / "tokens.toml"
        self.tokens.write_text(entry_text(new_token(), tenant="ada", admin=True))
        self.tokens.chmod(0o600)
        self.sessions = folder / "sessions"
        self.options = {
            "--model": str(model),
            "--port": "0",
            "--metrics-port": "0",
            "--tls-cert": str(self.cert),
            "--tls-key": str(self.key),
            "--tokens": str(self.tokens),
            "--session-dir": str(self.sessions),
            "--kv-memory": "1MiB",
            "--cost-table": "off",
        }


@pytest.fixture
def site(tmp_path: Path, model: Path) -> Site:
    return Site(tmp_path, model)


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command; its exit code and all it said."""

    def run(*more: str) -> tuple[int, str]:
        given = [word for pair in site.options.items() for word in pair]
        monkeypatch.setattr(sys, "argv", ["selfdraft", "serve", "--check", *given, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert isinstance(ended.value.code, int)
        return ended.value.code, out + err

    return run


def lines(report: str) -> dict[str, str]:
    """The first line about each part."""
    found: dict[str, str] = {}
    for line in report.splitlines():
        found.setdefault(line[8:24].strip(), line)
    return found


def test_a_sound_configuration(check: Check, site: Site) -> None:
    code, report = check("--host", "0.0.0.0", "--metrics-host", "127.0.0.1")
    assert code == 0, report
    assert all(line.startswith("ok") for line in report.splitlines())
    found = lines(report)
    assert "inference.example; until " in found["TLS"]
    assert "1 of 1 tenants, 1 of them admins'" in found["tokens"]
    assert "qwen3_5" in found["model"]
    assert "401 tokens" in found["tokenizer"]
    assert "KV pages" in found["memory"]
    assert not site.sessions.exists()  # a check writes nothing
    assert "sd_" not in report


WRONG: dict[str, tuple[Callable[[Site], object], str, str]] = {
    "key of another": (
        lambda s: s.key.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes()),
        "TLS",
        "is not the key of the certificate",
    ),
    "no certificate": (lambda s: s.cert.unlink(), "TLS", "No such file"),
    "bad token": (lambda s: s.tokens.write_text("[[token]]\n"), "tokens", "token[0].tenant"),
    "no tokens": (lambda s: s.tokens.unlink(), "tokens", "No such file"),
    "session file": (lambda s: s.sessions.write_text(""), "session folder", "is no folder"),
    "no memory": (
        lambda s: s.options.update({"--kv-memory": "900TiB"}),
        "memory",
        "kv_memory",
    ),
    "an address of nobody": (
        lambda s: s.options.update({"--host": "192.0.2.1"}),
        "address",
        "192.0.2.1",
    ),
    "bad cost table": (
        lambda s: s.options.update({"--cost-table": str(s.key)}),
        "cost table",
        "not JSON",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_found_and_the_rest_is_still_looked_at(
    name: str, check: Check, site: Site
) -> None:
    spoil, what, said = WRONG[name]
    spoil(site)
    code, report = check()
    assert code == 2
    faults = [line for line in report.splitlines() if line.startswith("error")]
    assert len(faults) == 1, report
    assert faults[0][8:24].strip() == what
    assert said in faults[0]
    assert lines(report)["model"].startswith("ok")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from other machines"),
        (("--model", "/no/such/folder"), "is no directory"),
        (("--tls-cert", "x"), "--tls-cert: needs --tls-key"),
        (("--tls-client-ca", "x"), "--tls-client-ca: needs --tls-cert"),
        (("--port", "70000"), "port: must be in 0 … 65535"),
        (("--depth", "9"), "--depth: must be auto or 0 … 8"),
    ],
)
def test_without_tls(options: tuple[str, ...], said: str, check: Check, site: Site) -> None:
    del site.options["--tls-cert"], site.options["--tls-key"]
    code, report = check(*options)
    assert (code, said in report) == (2, True), report


def test_a_model_that_cannot_run(check: Check, site: Site, tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    (broken / "tokenizer.json").write_text("{}")
    site.options["--model"] = str(broken)
    code, report = check()
    assert code == 2
    found = lines(report)
    assert found["model"].startswith("error")
    assert found["tokenizer"].startswith("error")


def test_a_port_in_use_is_told_and_given_back(check: Check, site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        site.options["--port"] = str(taken.getsockname()[1])
        code, report = check()
        assert code == 0  # a running server may be checked
        assert f"warning address         gRPC on 127.0.0.1:{site.options['--port']}" in report
    for _ in range(2):
        assert "in use" not in check()[1]


def test_the_plan_is_the_one_that_a_load_makes(model: Path) -> None:
    from engine.load import load_engine

    config = EngineConfig(model=model, kv_memory=1 << 20, max_rows=4, mtp_gate="off", max_depth=2)
    planned = plan_memory(config)
    engine = load_engine(config)
    try:
        assert engine.budget is not None
        assert {row.name: row.bytes for row in planned.rows} == {
            row.name: row.bytes for row in engine.budget.rows
        }
    finally:
        engine.close()
