"""TLS and mTLS with real certificates: who is let in, and what happens when files change."""

from __future__ import annotations

import asyncio
import io
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from selfdraft import AdminClient, Client, SelfdraftError, Tls

from service.config import SecurityConfig, ServerConfig, ServiceConfig, SettingError, TlsFiles
from service.exposure import check_exposure, is_loopback, metrics_host
from service.logs import make_logger
from service.reload import FileError, Reloading
from service.server import Server
from service.tls import Tls as ServerTls
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import Running, running, service_config, tokenizer

pytestmark = pytest.mark.anyio


class Files:
    """Certificates of one server and its clients, on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.client_ca = folder / "clients.pem"
        self.clients = trustme.CA()
        self.clients.cert_pem.write_to_path(str(self.client_ca))
        self.write(self.issue())

    def issue(self, ca: trustme.CA | None = None) -> trustme.LeafCert:
        return (ca or self.ca).issue_cert("localhost", "127.0.0.1")

    def write(self, leaf: trustme.LeafCert) -> None:
        self.write_cert(leaf)
        self.write_key(leaf)

    def write_cert(self, leaf: trustme.LeafCert) -> None:
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))

    def write_key(self, leaf: trustme.LeafCert) -> None:
        self.key.write_bytes(leaf.private_key_pem.bytes())

    def config(self, *, mutual: bool = False) -> ServiceConfig:
        client_ca = self.client_ca if mutual else None
        files = TlsFiles(cert=self.cert, key=self.key, client_ca=client_ca)
        return service_config(security=SecurityConfig(tls=files))

    def tls(self, leaf: trustme.LeafCert | None = None, ca: trustme.CA | None = None) -> Tls:
        """As a client has it, with or without a certificate of its own."""
        return Tls(
            root_certificates=(ca or self.ca).cert_pem.bytes(),
            certificate_chain=leaf.cert_chain_pems[0].bytes() if leaf else None,
            private_key=leaf.private_key_pem.bytes() if leaf else None,
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def works(up: Running, tls: Tls | None) -> bool:
    """A client of its own connection is served."""
    async with Client(up.target, tls=tls, retry=None) as client:
        try:
            text = await client.generate(text="x", max_tokens=2, ignore_eos=True, timeout=5).text()
        except SelfdraftError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return bool(text)


async def serial(up: Running) -> int:
    """Of the certificate that a new connection is shown."""
    host, port = up.target.split(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    from cryptography import x509

    return x509.load_der_x509_certificate(found).serial_number


def serial_of(leaf: trustme.LeafCert) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).serial_number


async def test_tls_serves_those_who_trust_it(files: Files) -> None:
    async with running(config=files.config(), client={"tls": files.tls()}) as up:
        assert await up.works()
        assert not await works(up, None)  # plain text
        assert not await works(up, files.tls(ca=trustme.CA()))  # another root
        assert await works(up, files.tls())


async def test_mtls_refuses_clients_without_a_certificate_of_the_right_root(files: Files) -> None:
    good, foreign = files.issue(files.clients), files.issue(trustme.CA())
    config = files.config(mutual=True)
    async with running(config=config, client={"tls": files.tls(good)}) as up:
        assert await up.works()
        assert not await works(up, files.tls())
        assert not await works(up, files.tls(foreign))
        assert not await works(up, files.tls(files.issue()))  # of the server's root, not clients'
        assert await works(up, files.tls(good))


async def test_a_new_pair_is_shown_to_new_connections_and_old_ones_go_on(files: Files) -> None:
    async with running(config=files.config(), client={"tls": files.tls()}, step_s=0.005) as up:
        stream = up.client.generate(text="x", max_tokens=200, ignore_eos=True)
        await stream.request_id()
        for _ in range(2):
            fresh = files.issue()
            files.write(fresh)
            assert await serial(up) == serial_of(fresh)
        assert await works(up, files.tls())
        assert await stream.text()
        assert len(up.log_lines("reloaded")) == 2


async def test_half_written_files_leave_the_last_good_pair_and_one_line(files: Files) -> None:
    async with running(config=files.config(), client={"tls": files.tls()}) as up:
        before, fresh = await serial(up), files.issue()
        spoils: list[tuple[Callable[[], object], int]] = [
            (lambda: files.write_cert(fresh), 1),  # the key is still the old one
            (lambda: files.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\nMII"), 2),
            (lambda: files.cert.write_bytes(b""), 2),  # for the same reason
            (lambda: files.cert.unlink(), 3),
        ]
        for spoil, count in spoils:
            spoil()
            for _ in range(3):
                assert await serial(up) == before
            assert await works(up, files.tls())
            assert len(up.log_lines("not reloaded, the last good one stays")) == count
        files.write(fresh)
        assert await serial(up) == serial_of(fresh)
        assert "PRIVATE" not in up.log.getvalue()


async def test_client_roots_rotate_too(files: Files) -> None:
    old, newer = files.clients, trustme.CA()
    async with running(config=files.config(mutual=True), client={"tls": files.tls()}) as up:
        assert await works(up, files.tls(files.issue(old)))
        newer.cert_pem.write_to_path(str(files.client_ca))
        assert not await works(up, files.tls(files.issue(old)))
        assert await works(up, files.tls(files.issue(newer)))


BAD: dict[str, tuple[Callable[[Files], object], str]] = {
    "no certificate": (lambda f: f.cert.unlink(), "cert.pem: No such file"),
    "no key": (lambda f: f.key.unlink(), "key.pem: No such file"),
    "not PEM": (lambda f: f.cert.write_text("hello"), "cert.pem: holds no PEM certificate"),
    "key is none": (lambda f: f.key.write_text("sesame"), "key.pem: holds no PEM private key"),
    "another's key": (lambda f: f.write_key(f.issue()), "is not the key of the certificate"),
    "no roots": (lambda f: f.client_ca.write_text(""), "clients.pem: holds no PEM certificate"),
    "huge": (lambda f: f.cert.write_bytes(b"x" * (5 << 20)), "larger than"),
}


@pytest.mark.parametrize("name", BAD)
async def test_files_that_cannot_be_used_stop_the_start(name: str, files: Files) -> None:
    spoil, said = BAD[name]
    spoil(files)
    loaded = []
    server = Server(
        config=files.config(mutual=True),
        engine_factory=lambda: loaded.append(1) or FakeEngine(),  # type: ignore[func-returns-value]
        tokenizer_factory=tokenizer,
        logger=make_logger("json", io.StringIO()),
    )
    with pytest.raises(FileError, match=said) as caught:
        await server.run()
    assert not loaded
    assert "sesame" not in str(caught.value)


def test_a_certificate_that_ends_soon_is_told(files: Files) -> None:
    assert files.config().security.tls is not None
    tls = ServerTls(files.config().security.tls, make_logger("json", io.StringIO()))  # type: ignore[arg-type]
    assert set(tls.certificates.names) == {"localhost", "127.0.0.1"}
    end = tls.certificates.expires
    assert tls.warnings(end - timedelta(days=60)) == []
    assert "expires in 3 days" in tls.warnings(end - timedelta(days=3, hours=1))[0]
    assert "expired on" in tls.warnings(end + timedelta(seconds=1))[0]
    assert end > datetime.now(UTC)


def test_the_newest_content_is_seen_within_one_tick_of_the_clock(tmp_path: Path) -> None:
    """Same size, same time stamp, same inode: only the content tells."""
    path = tmp_path / "file"
    path.write_text("one")
    seen = Reloading(
        [path], lambda c: c[0].decode(), what="x", logger=make_logger("json", io.StringIO())
    )
    at = path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(at, at))
    assert seen.current() == "two"


# --- who may listen where ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.0.2.7", False), ("::ffff:10.0.0.1", False)),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_names_are_what_they_resolve_to(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "inside": ["127.0.0.1", "::1"],
        "both": ["127.0.0.1", "192.0.2.1"],
    }

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        if host not in answers:
            raise OSError("unknown")
        return [(0, 0, 0, "", (address, 0)) for address in answers[host]]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    assert is_loopback("inside")
    assert not is_loopback("both")
    with pytest.raises(SettingError, match="'elsewhere' does not resolve"):
        is_loopback("elsewhere")


async def test_plain_text_stays_on_this_machine_unless_told_otherwise(files: Files) -> None:
    def config(**server: object) -> ServiceConfig:
        return service_config(server=ServerConfig(port=0, **server))  # type: ignore[arg-type]

    server = Server(
        config=config(host="0.0.0.0"),
        engine_factory=lambda: pytest.fail("loaded"),
        tokenizer_factory=lambda: pytest.fail("loaded"),
        logger=make_logger("json", io.StringIO()),
    )
    with pytest.raises(SettingError, match=r"0\.0\.0\.0 .* --tls-cert .* --insecure"):
        await server.run()
    check_exposure(config(host="0.0.0.0", insecure=True))
    check_exposure(config(host="127.0.0.1"))
    secured = service_config(
        server=ServerConfig(host="0.0.0.0", port=0), security=files.config().security
    )
    check_exposure(secured)
    # The metrics page is plain HTTP: it goes out only where somebody said so.
    assert metrics_host(secured) == "127.0.0.1"
    assert metrics_host(config(host="127.0.0.1")) == "127.0.0.1"
    assert metrics_host(config(host="0.0.0.0", insecure=True)) == "0.0.0.0"
    assert metrics_host(config(metrics_host="10.0.0.5")) == "10.0.0.5"


async def test_no_admin_for_others_without_tokens() -> None:
    """Beyond loopback nobody could tell an admin from anybody else."""
    for host, insecure, offered in (("127.0.0.1", False, True), ("0.0.0.0", True, False)):
        config = service_config(server=ServerConfig(host=host, insecure=insecure))
        async with running(config=config) as up:
            target = up.target.replace("0.0.0.0", "127.0.0.1")
            async with AdminClient(target) as admin:
                if offered:
                    assert (await admin.config())["server.host"] == host
                    continue
                with pytest.raises(SelfdraftError) as caught:
                    await admin.config()
                assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
