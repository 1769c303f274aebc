"""The catalogue is what is exported: names, types, labels, their values, and how many series."""

from __future__ import annotations

import random
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import grpc
import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from selfdraft import AdminClient, Client, SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MemoryUse, StepPlan, StepResult
from scheduler.config import TenantPolicy
from scheduler.loop import StepRecord
from service.catalogue import CATALOGUE, most_series
from service.config import SecurityConfig
from service.families import METHODS, PREFIX, Family
from service.metrics import Metrics
from service.reference import PAGES
from service.tokens import entry_text, new_token
from tests.checkout import ROOT
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import VOCAB, Running, running, service_config
from tests.service.test_tls import Files

pytestmark = pytest.mark.anyio

POLICIES = {"search": TenantPolicy(), "chat": TenantPolicy()}
FAMILIES = {family.full_name: family for family in CATALOGUE.values()}


@pytest.mark.parametrize("name", list(PAGES))
def test_the_committed_page_is_what_the_command_prints(name: str) -> None:
    page = (ROOT / "deploy" / f"{name}.md").read_text(encoding="utf-8")
    assert page == PAGES[name](), f"selfdraft reference {name} > deploy/{name}.md"


def test_the_metrics_that_the_readme_names_are_those() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (counter|gauge|histogram) \|", readme, re.M
    )
    named = {name: kind for names, kind in rows for name in re.findall(r"[a-z_]+", names)}
    assert len(named) >= 12
    assert named == {
        name: FAMILIES[PREFIX + name].kind for name in named if PREFIX + name in FAMILIES
    }


def test_every_declaration_is_whole() -> None:
    for family in CATALOGUE.values():
        assert family.text.endswith("."), family.name
        assert family.unit, family.name
        assert bool(family.buckets) is (family.kind == "histogram"), family.name
        assert list(family.buckets) == sorted(set(family.buckets)), family.name
        for label in family.labels:
            assert label.size > 0, family.name
            assert bool(label.values) is not bool(label.most), family.name
        if family.name.endswith(("_seconds", "_bytes")):
            assert family.unit == family.name.rpartition("_")[2]
        if family.name.endswith("_ratio"):
            assert family.unit == "ratio"


def test_methods_have_labels_of_their_own() -> None:
    assert len(set(METHODS.values())) == len(METHODS) > 30


async def fetch(up: Running, accept: str = "") -> tuple[str, str]:
    """Content type and text of the endpoint."""
    assert up.server.addresses is not None
    request = urllib.request.Request(f"http://{up.server.addresses.metrics}/metrics")
    if accept:
        request.add_header("Accept", accept)

    def ask() -> tuple[str, str]:
        with urllib.request.urlopen(request, timeout=5) as answer:
            body: bytes = answer.read()
            return answer.headers["Content-Type"], body.decode()

    return await anyio.to_thread.run_sync(ask)


def ours(text: str, parse: Any = text_string_to_metric_families) -> Iterator[Any]:
    return (family for family in parse(text) if family.name.startswith(PREFIX))


def declared(family: Any) -> Family:
    """What the catalogue says of a family as the parser names it."""
    return FAMILIES.get(f"{family.name}_total") or FAMILIES[family.name]


def series(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in ours(text)
        for sample in family.samples
    }


def check_labels(text: str, tenants: set[str]) -> None:
    """Every sample has its family's labels, with values from their sets."""
    for family in ours(text):
        labels = {label.name: label for label in declared(family).labels}
        for sample in family.samples:
            given = {key: value for key, value in sample.labels.items() if key != "le"}
            assert set(given) == set(labels), sample
            for key, value in given.items():
                if labels[key].values:
                    assert value in labels[key].values, sample
                elif key == "tenant":
                    assert value in tenants | {"other"}, sample


async def test_a_server_exports_exactly_what_is_declared() -> None:
    config = service_config(tenants=POLICIES)
    async with running(metrics=True, config=config) as up:
        assert await up.works()
        await up.idle()
        kind, text = await fetch(up)
        assert kind.startswith("text/plain")
        found = {family.name: family.type for family in ours(text)}
        wanted = {
            family.full_name.removesuffix("_total"): family.kind for family in CATALOGUE.values()
        }
        assert found == wanted
        assert "# TYPE selfdraft_errors_total counter" in text
        for family in ours(text):
            assert family.documentation == declared(family).text
            assert family.samples, f"{family.name} has no series"
        check_labels(text, set(POLICIES))


async def test_before_the_model_is_loaded() -> None:
    go = threading.Event()

    def slow() -> FakeEngine:
        go.wait(10)
        return FakeEngine(vocab_size=VOCAB)

    async with running(metrics=True, engine=slow, ready=False) as up:
        _, text = await fetch(up)
        found = {declared(family).name for family in ours(text)}
        assert found == {family.name for family in CATALOGUE.values() if not family.loaded}
        assert 'selfdraft_server_state{state="loading"} 1.0' in text
        go.set()


async def test_open_metrics_on_request() -> None:
    async with running(metrics=True) as up:
        assert await up.works()
        kind, text = await fetch(up, "application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")
        families = {family.name: family for family in ours(text, open_metrics_families)}
        for family in CATALOGUE.values():
            found = families[f"{PREFIX}{family.name}"]
            assert (found.type, found.unit) == (family.kind, family.open_metrics_unit)


async def hostile(up: Running, seed: int, calls: int = 40) -> None:
    """Calls with names that nobody chose beforehand, in every place where a name fits."""
    rng = random.Random(seed)
    priorities: Any = (0, 1, 99)

    def name() -> str:
        return f"x{rng.randrange(16**12):012x}"

    options = [("grpc.primary_user_agent", name())]
    async with grpc.aio.insecure_channel(up.target, options=options) as channel:
        for _ in range(calls):
            metadata = [
                ("selfdraft-tenant", name()),
                ("selfdraft-session", name()),
                ("user-agent", name()),
                ("traceparent", name()),
                (name(), name()),
            ]
            request = pb.GenerateRequest(
                text=name(), request_id=name(), session_id=name(), priority=rng.choice(priorities)
            )
            request.sampling_params.max_tokens = rng.randrange(4)
            request.sampling_params.regex = rng.choice(("[a-z]{2}", "(", ""))
            paths = (
                "/selfdraft.v1.Inference/Generate",
                f"/selfdraft.v1.Inference/{name()}",
                f"/{name()}/{name()}",
                f"/vllm.grpc.engine.VllmEngine/{name()}",
            )
            stream: Any = channel.unary_stream
            call = stream(paths[rng.randrange(4)])(
                request.SerializeToString(), metadata=metadata, timeout=5
            )
            try:
                async for _message in call:
                    pass
            except grpc.aio.AioRpcError:
                pass
            unary: Any = channel.unary_unary
            bad = unary("/selfdraft.v1.Inference/Tokenize")(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError):
                await bad


async def test_no_client_makes_a_series() -> None:
    config = service_config(tenants=POLICIES)
    async with running(metrics=True, config=config) as up:
        await hostile(up, 1, calls=80)
        await up.idle()
        _, text = await fetch(up)
        first = series(text)
        await hostile(up, 2, calls=80)
        await up.idle()
        _, text = await fetch(up)
        check_labels(text, set(POLICIES))
        assert len(series(text)) <= most_series()
        new = series(text) - first
        assert new == set(), "a second kind of strangers left something new"
        unknown = {dict(labels).get("method") for name, labels in first if "grpc_calls" in name}
        assert "other" in unknown
        assert unknown <= {*METHODS.values(), "other"}


async def test_calls_are_counted_by_method_and_status() -> None:
    async with running(metrics=True, step_s=0.002) as up, AdminClient(up.target) as admin:
        await up.client.generate(text="x", max_tokens=3).text()
        await up.client.tokenize(text="x")
        with pytest.raises(SelfdraftError):
            await up.client.tokenize(text="")
        with pytest.raises(SelfdraftError):
            await admin.export_session("s", "f")
        left = up.client.generate(text="x", max_tokens=3000, ignore_eos=True)
        await left.request_id()
        now = await up.metrics()
        assert now['selfdraft_grpc_calls_in_flight{method="Inference/Generate"}'] == 1
        left.cancel()
        await up.until_idle()
        late = up.client.generate(text="x", max_tokens=3000, ignore_eos=True, timeout=0.5)
        with pytest.raises(SelfdraftError):
            await late.text()
        await up.until_idle()
        await up.idle()
        await anyio.sleep(0.05)
        now = await up.metrics()
        calls = 'selfdraft_grpc_calls_total{code="%s",method="%s"}'
        # Of the last two one was cancelled; the other one's client may be first to say so as well.
        logged = Counter(line["status"] for line in up.log_lines())
        assert logged["OK"] == 1
        assert logged["CANCELLED"] >= 1
        assert logged["CANCELLED"] + logged["DEADLINE_EXCEEDED"] == 2
        for code, count in logged.items():
            assert now[calls % (code, "Inference/Generate")] == count
        assert now[calls % ("OK", "Inference/Tokenize")] == 1
        assert now[calls % ("INVALID_ARGUMENT", "Inference/Tokenize")] == 1
        assert now[calls % ("FAILED_PRECONDITION", "Admin/ExportSession")] == 1
        errors = 'selfdraft_errors_total{reason="%s"}'
        assert now[errors % "INVALID_ARGUMENT"] == 1
        assert now[errors % "NOT_CONFIGURED"] == 1
        assert now[errors % "CANCELLED"] == logged["CANCELLED"]
        assert now[errors % "DEADLINE_EXCEEDED"] == logged["DEADLINE_EXCEEDED"]
        assert now['selfdraft_grpc_calls_in_flight{method="Inference/Generate"}'] == 0


async def test_what_a_token_does_not_allow_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    token = new_token()
    path.write_text(entry_text(token, tenant="ada"))
    path.chmod(0o600)
    config = service_config(security=SecurityConfig(tokens=path))
    async with running(metrics=True, config=config) as up:
        with pytest.raises(SelfdraftError):
            await up.client.tokenize(text="x")
        async with AdminClient(up.target, token=token) as admin:
            with pytest.raises(SelfdraftError):
                await admin.tenants()
        now = await up.metrics()
        calls = 'selfdraft_grpc_calls_total{code="%s",method="%s"}'
        assert now[calls % ("UNAUTHENTICATED", "Inference/Tokenize")] == 1
        assert now[calls % ("PERMISSION_DENIED", "Admin/GetTenantStatistics")] == 1
        path.write_text("not TOML")
        now = await up.metrics()
        assert now['selfdraft_reloads_total{result="failed",what="tokens"}'] == 1
        path.write_text(entry_text(new_token(), tenant="bob"))
        now = await up.metrics()
        assert now['selfdraft_reloads_total{result="ok",what="tokens"}'] == 1


async def test_the_certificate_s_end_is_known_and_follows_a_new_one(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with running(metrics=True, config=files.config(), client={"tls": files.tls()}) as up:
        name = "selfdraft_tls_certificate_expiry_timestamp_seconds"
        tls = up.server.metrics.facts.tls
        assert tls is not None
        now = await up.metrics()
        assert now[name] == tls.certificates.expires.timestamp()
        files.write(files.issue())
        now = await up.metrics()
        assert now['selfdraft_reloads_total{result="ok",what="tls"}'] == 1


async def test_lengths_and_times_of_sequences() -> None:
    async with running(metrics=True, step_s=0.001) as up:
        done: list[pb.GenerateComplete] = []
        for n, asked in ((1, 5), (2, 9)):
            generation = up.client.generate(text="abc", max_tokens=asked, n=n, ignore_eos=True)
            await generation.texts()
            done += generation.completes.values()
        await up.until_idle()
        await up.idle()
        now = await up.metrics()

        def total(name: str) -> Any:
            return now[f"selfdraft_request_{name}_count"], now[f"selfdraft_request_{name}_sum"]

        assert total("prompt_tokens") == (3, sum(c.prompt_tokens for c in done))
        assert total("generation_tokens") == (3, 5 + 9 + 9)
        assert total("params_n") == (2, 3)
        assert total("params_max_tokens") == (2, 14)
        prefill = sum(c.time_to_first_token_seconds - c.queue_seconds for c in done)
        assert total("prefill_time_seconds") == (3, pytest.approx(prefill, abs=1e-6))
        assert total("decode_time_seconds")[0] == 3
        assert total("time_per_output_token_seconds")[0] == 3
        assert now["selfdraft_rows_used"] == 0 < now["selfdraft_rows"]


async def test_the_state_is_one_of_all() -> None:
    async with running(metrics=True, step_s=0.003) as up:
        states = ("loading", "serving", "draining", "failed")

        async def state() -> list[float]:
            now = await up.metrics()
            return [now[f'selfdraft_server_state{{state="{name}"}}'] for name in states]

        assert await state() == [0, 1, 0, 0]
        async with Client(up.target, retry=None) as client:
            last = client.generate(text="x", max_tokens=60, ignore_eos=True)
            await last.request_id()
            up.server.stop.begin()
            with anyio.fail_after(3):
                while await state() != [0, 0, 1, 0]:
                    await anyio.sleep(0.01)
            await last.text()


def test_memory_is_that_of_the_newest_step() -> None:
    metrics = Metrics(lambda: None, version="0")
    metrics.planned({"weights": 7, "kv pool": 9})
    for use in (5, 3):
        memory = MemoryUse(active=use, peak=8, cache=1)
        metrics.step(StepRecord.of(StepPlan(step=0), StepResult(step=0, memory=memory), 0.0))
    assert metrics.facts.memory == MemoryUse(active=3, peak=8, cache=1)
    assert metrics.facts.planned == {"weights": 7, "kv_pool": 9}
