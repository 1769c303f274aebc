"""The numbers on /metrics are those the clients saw."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import anyio
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from selfdraft import SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import Engine, StepPlan, StepResult
from scheduler.loop import StepRecord
from scheduler.request import Tokens
from service.metrics import AcceptanceWindow, Metrics
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import VOCAB, Running, running, saying, service_config

pytestmark = pytest.mark.anyio


async def load(up: Running, sessions: int) -> list[pb.GenerateComplete]:
    done: list[pb.GenerateComplete] = []

    async def one(n: int) -> None:
        generation = up.client.generate(
            text="def " * (1 + n), max_tokens=20 + n, ignore_eos=True, seed=n
        )
        assert await generation.text()
        assert generation.complete is not None
        done.append(generation.complete)

    async with anyio.create_task_group() as tasks:
        for n in range(sessions):
            tasks.start_soon(one, n)
    await up.until_idle()
    return done


async def test_sums_equal_what_clients_saw() -> None:
    async with running(metrics=True, step_s=0.001, max_rows=4) as up:
        before = await up.metrics()
        assert before["selfdraft_generation_tokens_total"] == 0
        assert math.isnan(before["selfdraft_spec_decode_acceptance_rate"])
        done = await load(up, 10)
        after = await up.metrics()
        tokens = sum(c.completion_tokens for c in done)
        assert after["selfdraft_prompt_tokens_total"] == sum(c.prompt_tokens for c in done)
        assert after["selfdraft_generation_tokens_total"] == tokens
        drafted = sum(c.spec_draft_tokens for c in done)
        accepted = sum(c.spec_accepted_tokens for c in done)
        prefix = "selfdraft_spec_decode"
        assert after[f"{prefix}_draft_tokens_total"] == drafted
        assert after[f"{prefix}_accepted_tokens_total"] == accepted
        assert after[f"{prefix}_acceptance_rate"] == pytest.approx(accepted / drafted)
        for j in range(8):
            label = f'{{position="{j + 1}"}}'
            for kind in ("draft", "accepted"):
                seen = [list(getattr(c, f"spec_{kind}_tokens_per_pos")) for c in done]
                total = sum(counts[j] for counts in seen if j < len(counts))
                assert after[f"{prefix}_{kind}_tokens_per_pos_total{label}"] == total
        first_position = after[f'{prefix}_draft_tokens_per_pos_total{{position="1"}}']
        assert after[f"{prefix}_drafts_total"] == first_position
        for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
            assert after[f"selfdraft_{name}_seconds_count"] == 10
        # Per token, not per chunk: every token but each session's first.
        assert after["selfdraft_inter_token_latency_seconds_count"] == tokens - 10
        decoding = sum(c.e2e_seconds - c.time_to_first_token_seconds for c in done)
        assert after["selfdraft_inter_token_latency_seconds_sum"] == pytest.approx(
            decoding, rel=0.05, abs=0.02
        )
        e2e = sum(c.e2e_seconds for c in done)
        assert after["selfdraft_e2e_request_latency_seconds_sum"] == pytest.approx(e2e)
        queued = sum(c.queue_seconds for c in done)
        assert after["selfdraft_request_queue_time_seconds_sum"] == pytest.approx(queued)
        assert after['selfdraft_request_success_total{finish_reason="length"}'] == 10
        assert after['selfdraft_request_success_total{finish_reason="stop"}'] == 0
        assert after["selfdraft_tokens_per_second"] > 0
        assert after["selfdraft_kv_pages_used"] == 0
        assert after["selfdraft_kv_pages_peak"] > 0


async def test_what_the_token_gap_did() -> None:
    config = service_config(max_token_gap_s=0.001, prefill_share=0.5)
    async with running(metrics=True, config=config, step_s=0.003, max_rows=4) as up:
        before = await up.metrics()
        assert before["selfdraft_token_gap_exceeded_total"] == 0
        assert before['selfdraft_contended_seconds_total{work="prefill"}'] == 0
        await load(up, 8)
        after, statistics = await up.metrics(), up.statistics
        assert after["selfdraft_token_gap_exceeded_total"] == statistics.gap_exceeded > 10
        prefill = after['selfdraft_contended_seconds_total{work="prefill"}']
        decode = after['selfdraft_contended_seconds_total{work="decode"}']
        assert prefill == statistics.contended_prefill_s
        assert prefill + decode == pytest.approx(statistics.contended_s)
        assert decode > 0
        assert after["selfdraft_mixed_step_error_ratio"] == statistics.mixed_step_error


async def test_gauges_while_requests_run_and_wait() -> None:
    async with running(metrics=True, step_s=0.002, max_rows=2) as up:
        names = ["a", "b", "c"]
        streams = []
        for name in names:  # one after the other, so that it is the last one that waits
            streams.append(
                up.client.generate(text="x", max_tokens=3000, ignore_eos=True, request_id=name)
            )
            assert await streams[-1].request_id() == name
        with anyio.fail_after(3):
            while up.statistics.running < 2:
                await anyio.sleep(0.01)
        now = await up.metrics()
        assert now["selfdraft_requests_running"] == 2
        assert now["selfdraft_requests_waiting"] == 1
        assert 0 < now["selfdraft_kv_pages_used"] < now["selfdraft_kv_pages"]
        assert now["selfdraft_kv_cache_usage_ratio"] == pytest.approx(
            now["selfdraft_kv_pages_used"] / now["selfdraft_kv_pages"]
        )
        for name in reversed(names):  # the waiting one first, before a row is free
            await up.client.abort(name)
        await up.until_idle()
        end = await up.metrics()
        assert end['selfdraft_requests_cancelled_total{reason="aborted"}'] == 3
        assert end["selfdraft_requests_running"] == end["selfdraft_requests_waiting"] == 0
        # The one that never left the queue has no queue time.
        assert end["selfdraft_request_queue_time_seconds_count"] == 2
        assert end["selfdraft_e2e_request_latency_seconds_count"] == 0


async def test_ends_and_refusals_by_reason() -> None:
    config = service_config(max_queue=1)
    async with running(
        config=config, metrics=True, step_s=0.002, max_rows=1, token=saying("stop here. ")
    ) as up:
        await up.client.generate(text="x", stop=["here"]).text()
        for bad in (up.client.generate(text=""), up.client.generate(text="x", top_p=2.0)):
            with pytest.raises(SelfdraftError):
                await bad.text()
        first = up.client.generate(text="x", max_tokens=3000, request_id="first")
        await first.request_id()
        with anyio.fail_after(3):
            while not up.statistics.running:
                await anyio.sleep(0.005)
        second = up.client.generate(text="x", max_tokens=3000, request_id="second")
        await second.request_id()
        for request_id in ("third", "first"):
            with pytest.raises(SelfdraftError):
                await up.client.generate(text="x", request_id=request_id).text()
        first.cancel()
        second.cancel()
        await up.until_idle()
        now = await up.metrics()
        assert now['selfdraft_request_success_total{finish_reason="stop"}'] == 1
        refused = 'selfdraft_requests_refused_total{reason="%s"}'
        assert now[refused % "INVALID_ARGUMENT"] == 2
        assert now[refused % "QUEUE_FULL"] == 1
        assert now[refused % "DUPLICATE_REQUEST"] == 1
        assert now['selfdraft_requests_cancelled_total{reason="cancelled"}'] == 2


async def test_series_are_bounded_and_named_in_one_style() -> None:
    async with running(metrics=True) as up:
        await load(up, 3)
        few = set(await up.metrics())
        await load(up, 12)
        many = set(await up.metrics())
        assert few == many
        assert all(name.startswith(("selfdraft_", "process_")) for name in many)
        info = [name for name in many if name.startswith("selfdraft_model_info")]
        assert 'model="fake"' in info[0]
        assert [name for name in many if name.startswith("selfdraft_build_info{version=")]


async def test_the_endpoint_answers_while_the_model_loads() -> None:
    go = threading.Event()

    def slow() -> Engine:
        go.wait(10)
        return FakeEngine(vocab_size=VOCAB)

    async with running(engine=slow, ready=False, metrics=True) as up:
        now = await up.metrics()
        assert any(name.startswith("selfdraft_build_info") for name in now)
        assert "selfdraft_requests_running" not in now
        go.set()
        with anyio.fail_after(5):
            await up.server.ready.wait()
        assert "selfdraft_requests_running" in await up.metrics()


def test_a_burst_counts_once_per_token() -> None:
    metrics = Metrics(lambda: None, version="0")

    def burst(at: float, *ids: int) -> Tokens:
        return Tokens(ids=ids, drafted=len(ids), accepted=len(ids) - 1, at=at)

    metrics.burst(burst(1.0, 1), previous_at=None, submitted_at=0.4)
    metrics.burst(burst(1.9, 2, 3, 4), previous_at=1.0, submitted_at=0.4)
    metrics.burst(burst(2.0, 5), previous_at=1.9, submitted_at=0.4)
    value = metrics.registry.get_sample_value
    name = "selfdraft_inter_token_latency_seconds"
    assert value(f"{name}_count") == 4
    assert value(f"{name}_sum") == pytest.approx(1.0)
    assert value(f"{name}_bucket", {"le": "0.2"}) == 1
    assert value(f"{name}_bucket", {"le": "0.3"}) == 4  # three at 0.3, not one at 0.9
    assert value("selfdraft_time_to_first_token_seconds_sum") == pytest.approx(0.6)


def test_gaps_count_where_there_are_any() -> None:
    metrics = Metrics(lambda: None, version="0")
    for gap in (0.0003, None, 0.02, 0.0):
        result = StepResult(step=0, gap_s=gap)
        metrics.step(StepRecord.of(StepPlan(step=0), result, host_s=9.0))
    value = metrics.registry.get_sample_value
    assert value("selfdraft_host_gap_seconds_count") == 3
    assert value("selfdraft_host_gap_seconds_sum") == pytest.approx(0.0203)


async def test_the_scheduler_tells_of_every_step() -> None:
    """An engine that reports gaps is heard of through the real loop."""

    class Gapped(FakeEngine):
        def collect(self) -> StepResult:
            return replace(super().collect(), gap_s=0.004)

    async with running(engine=lambda: Gapped(vocab_size=VOCAB), metrics=True) as up:
        await up.client.generate(text="x", max_tokens=30, ignore_eos=True).text()
        now = await up.metrics()
        steps = now["selfdraft_steps_total"]
        assert steps > 5
        assert steps - 2 <= now["selfdraft_host_gap_seconds_count"] <= steps
        assert now["selfdraft_host_gap_seconds_sum"] == pytest.approx(
            0.004 * now["selfdraft_host_gap_seconds_count"]
        )


async def test_what_is_reused_is_read_from_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(metrics=True) as up:
        before = await up.metrics()
        assert before['selfdraft_prefix_evictions_total{cause="pages"}'] == 0
        statistics = replace(
            up.statistics,
            prefix_lookups=7,
            prefix_hits=5,
            cached_tokens=320,
            sessions=2,
            boundaries_used=3,
            pages_cached=6,
            boundaries_total=9,
            evictions={"pages": 4, "import": 1},
            sessions_ended={"ttl": 2},
        )
        monkeypatch.setattr(up.server.metrics._collector, "_take_statistics", lambda: statistics)
        now = await up.metrics()
        names = {
            "selfdraft_prefix_lookups_total": 7,
            "selfdraft_prefix_hits_total": 5,
            "selfdraft_prefix_cached_tokens_total": 320,
            "selfdraft_sessions": 2,
            "selfdraft_boundaries_used": 3,
            "selfdraft_boundaries": 9,
            'selfdraft_prefix_evictions_total{cause="pages"}': 4,
            'selfdraft_prefix_evictions_total{cause="import"}': 1,
            'selfdraft_prefix_evictions_total{cause="flush"}': 0,
            'selfdraft_sessions_ended_total{cause="ttl"}': 2,
            'selfdraft_sessions_ended_total{cause="pages"}': 0,
            "selfdraft_kv_pages_cached": 6,
        }
        assert {name: now[name] for name in names} == names


async def test_requests_by_mode() -> None:
    async with running(metrics=True) as up:
        await up.client.generate(text="x", max_tokens=2).text()
        await up.client.generate(text="x", max_tokens=2, seed=1).text()
        await up.client.generate(text="x", max_tokens=2, max_depth=0).text()
        await up.client.generate(text="x", max_tokens=2, speculation="coupled").text()
        with pytest.raises(SelfdraftError):
            await up.client.generate(text="x", max_tokens=0, seed=1).text()
        now = await up.metrics()
        name = 'selfdraft_spec_decode_requests_total{mode="%s"}'
        assert [now[name % mode] for mode in ("rejection", "coupled", "off")] == [1, 2, 1]


def test_acceptance_window_forgets() -> None:
    window = AcceptanceWindow(60.0)
    assert math.isnan(window.ratio(0.0))
    window.add(4, 1, 10.2)
    window.add(4, 3, 10.9)
    assert window.ratio(11.0) == 0.5
    window.add(2, 2, 65.0)
    assert window.ratio(69.0) == 0.6
    assert window.ratio(100.0) == 1.0
    assert math.isnan(window.ratio(500.0))


def test_registries_are_separate() -> None:
    first, second = Metrics(lambda: None, version="a"), Metrics(lambda: None, version="b")
    assert isinstance(first.registry, CollectorRegistry)
    assert first.registry is not second.registry
    assert b"selfdraft_build_info" in generate_latest(first.registry)  # type: ignore[no-untyped-call]
