"""Whose rows leave when tenants compete for pages."""

from __future__ import annotations

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.sequence import Preempted
from tests.scheduler.bench import Bench, make_request, small_engine


def test_no_row_leaves_for_a_tenant_above_its_share() -> None:
    """b's rows are older and fill the pool; when they can grow no more, b's own youngest leaves
    and not a's, which is younger still."""
    for policies, leaves in (({"a": TenantPolicy(), "b": TenantPolicy()}, "b1"), ({}, "a")):
        bench = Bench(
            engine=small_engine(pages=24, boundaries=0, max_rows=8),
            config=SchedulerConfig(tenants=policies, prefill_chunk=16, depth=0, page_watermark=0.0),
        )
        for number in range(2):
            bench.submit(make_request(f"b{number}", prompt=20, max_tokens=40, tenant="b"))
        for _ in range(4):
            bench.step()
        bench.submit(make_request("a", prompt=8, max_tokens=32, tenant="a"))
        first: str | None = None
        while first is None and bench.step():
            gone = [s for s in bench.core._rows.values() if s.leaving is Preempted.PAGES]
            first = gone[0].request_id if gone else None
        assert first == leaves
        bench.finish()


def test_a_row_is_pushed_out_for_its_tenants_share_a_few_times_only() -> None:
    """Newcomers of other tenants never end; b's old row, above its share, gets on all the same."""
    policies = {name: TenantPolicy() for name in ("b", "c", "d", "e")}
    bench = Bench(
        engine=small_engine(pages=20, boundaries=0, max_rows=8),
        config=SchedulerConfig(
            tenants=policies, prefill_chunk=16, depth=0, page_watermark=0.0, max_queue=10
        ),
    )
    old = bench.submit(make_request("old", prompt=20, max_tokens=44, tenant="b"))
    while old.finished is None:
        for tenant in ("c", "d", "e"):
            if sum(s.request.tenant == tenant for s in bench.live.values()) < 2:
                name = f"{tenant}{len(bench.streams)}"
                bench.submit(make_request(name, prompt=6, max_tokens=14, tenant=tenant))
        bench.step()
        assert len(bench.streams) < 60
    bench.finish()
