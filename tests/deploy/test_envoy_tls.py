"""TLS from a client through Envoy to the workers, with what deploy/envoy/tls.yaml adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from selfdraft import SelfdraftError, Tls

from service.config import SecurityConfig, ServiceConfig, TlsFiles
from service.tokens import entry_text, new_token
from tests.deploy import envoy
from tests.deploy.envoy import Change, Config, fleet
from tests.service.harness import service_config

pytestmark = pytest.mark.anyio

SHORT: dict[str, Any] = {"text": "x", "max_tokens": 4, "ignore_eos": True}


class Files:
    """Certificates of a fleet, and a token."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        leaf = self.ca.issue_cert("worker.internal", "127.0.0.1")
        self.token = new_token()
        contents = {
            "cert.pem": b"".join(blob.bytes() for blob in leaf.cert_chain_pems),
            "key.pem": leaf.private_key_pem.bytes(),
            "ca.pem": self.ca.cert_pem.bytes(),
            "tokens.toml": entry_text(self.token, tenant="ada").encode(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)
        self.folder = folder

    def config(self) -> ServiceConfig:
        tls = TlsFiles(cert=self.folder / "cert.pem", key=self.folder / "key.pem")
        security = SecurityConfig(tls=tls, tokens=self.folder / "tokens.toml")
        return service_config(security=security)

    def tls(self) -> Tls:
        return Tls(root_certificates=self.ca.cert_pem.bytes())

    def change(self, hostname: str) -> Change:
        """Puts the pieces where they say, for workers called `hostname`."""
        text = envoy.TLS.read_text(encoding="utf-8").replace("/etc/envoy", str(self.folder))
        pieces = yaml.safe_load(text)

        def change(config: Config) -> None:
            (listener,) = config["static_resources"]["listeners"]
            listener["filter_chains"][0] |= pieces["clients"]
            workers = envoy.cluster(config)
            workers |= pieces["workers"]
            for at in workers["load_assignment"]["endpoints"][0]["lb_endpoints"]:
                at["endpoint"]["hostname"] = hostname

        return change


async def call(folder: Path, hostname: str, token: str | None = None) -> str:
    files = Files(folder)
    async with fleet(
        folder,
        change=files.change(hostname),
        connect={"tls": files.tls(), "token": token or files.token},
        config=files.config(),
        client={"tls": files.tls(), "token": files.token},
    ) as up:
        text = await up.client.generate(**SHORT, session_id="s", timeout=5).text()
        assert [line["tenant"] for worker in up.workers for line in worker.log_lines()] == ["ada"]
        return text


async def refused(folder: Path, hostname: str, token: str | None = None) -> SelfdraftError:
    with pytest.raises(BaseExceptionGroup) as caught:
        await call(folder, hostname, token)
    (error,) = envoy.leaves(caught.value)
    assert isinstance(error, SelfdraftError)
    return error


async def test_tls_and_a_token_all_the_way(tmp_path: Path) -> None:
    assert await call(tmp_path, "worker.internal")


async def test_a_worker_of_another_name_gets_nothing(tmp_path: Path) -> None:
    error = await refused(tmp_path, "somebody.else")
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "")


async def test_a_wrong_token_is_refused_by_the_worker(tmp_path: Path) -> None:
    error = await refused(tmp_path, "worker.internal", new_token())
    assert error.reason == "UNAUTHENTICATED"
