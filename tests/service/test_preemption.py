"""A stream whose row is taken away and computed again: what its client, log and metrics say."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.service.harness import running, service_config

pytestmark = pytest.mark.anyio


async def test_a_preempted_stream_tells_and_is_whole() -> None:
    config = service_config(page_watermark=0.0, prefix_cache=False)
    options: dict[str, Any] = {"pages": 24, "page_size": 4, "context_length": 96}
    texts: dict[str, list[int]] = {}
    preempted: dict[str, int] = {}
    async with running(config=config, metrics=True, **options) as up:

        async def generate(name: str, seed: int) -> None:
            generation = up.client.generate(
                token_ids=[1, 2, 3], max_tokens=80, ignore_eos=True, seed=seed, request_id=name
            )
            texts[name] = [token async for chunk in generation for token in chunk.token_ids]
            assert generation.complete is not None
            assert generation.complete.completion_tokens == 80
            assert generation.complete.prompt_tokens == 3
            preempted[name] = generation.complete.preemptions

        async with anyio.create_task_group() as tasks:
            for seed in range(3):
                tasks.start_soon(generate, f"beside-{seed}", seed)
        together = sum(preempted.values())
        assert together > 0
        for seed in range(3):
            await generate(f"alone-{seed}", seed)
            assert texts[f"beside-{seed}"] == texts[f"alone-{seed}"]
        assert sum(preempted.values()) == together
        await up.idle()
        lines = {line["request_id"]: line["preemptions"] for line in up.log_lines()}
        assert lines == preempted
        now = await up.metrics()
        assert now['selfdraft_preemptions_total{cause="pages"}'] == together
        assert now['selfdraft_preemptions_total{cause="priority"}'] == 0
        assert now["selfdraft_recomputed_tokens_total"] > 3 * together
        assert now["selfdraft_requests_preempted_waiting"] == 0
