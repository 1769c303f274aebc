"""What optimistic pages bring, and how many to keep back: `python -m tests.benchmarks.preemption`.

Requests that could say 600 tokens and mostly stop much earlier, or never do, over a pool that is
too small for all of them; a fake engine, so that only the scheduler's choices count. Steps are what
a device would spend its time on.
"""

from __future__ import annotations

import random

from engine.plan import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.request import GenerationRequest
from tests.scheduler.fake_engine import FakeEngine

VOCAB = 1000
MOST = 600


def run(watermark: float, stops: int, requests: int) -> dict[str, float]:
    """One trace to its end; outputs end at each token with probability stops / VOCAB."""
    rng = random.Random(1)
    engine = FakeEngine(pages=512, page_size=16, max_rows=64, vocab_size=VOCAB)
    config = SchedulerConfig(
        max_queue=requests, max_queued_tokens=10**7, depth=2, page_watermark=watermark
    )
    core = SchedulerCore(info=engine.info, config=config, max_in_flight=2)
    for number in range(requests):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(20, 300)))
        request = GenerationRequest(
            request_id=f"r{number}",
            prompt_ids=prompt,
            sampling=SamplingParams(seed=number),
            max_tokens=MOST,
            stop_ids=tuple(range(min(stops, 64))),
        )
        core.submit(request, 0.0)
    while core.live or core.in_flight:
        plan = core.plan(0.0)
        if not plan.is_empty:
            engine.submit(plan)
        if plan.is_empty or core.in_flight == 2:
            for request_id, event in core.commit(engine.collect(), 0.0):
                core.acknowledge(request_id, len(getattr(event, "ids", ())), 0.0)
    found = core.statistics(0.0)
    return {
        "steps": found.steps,
        "rows per cycle": found.row_cycles / found.cycles,
        "preemptions": sum(found.preemptions.values()),
        "recomputed": found.recomputed_tokens,
        "prefilled": found.prompt_tokens,
    }


def main() -> None:
    for stops, requests in ((8, 200), (0, 80)):
        print(f"{requests} requests, stop probability {stops / VOCAB:g} per token")
        for watermark in (0.0, 0.02, 0.05, 0.1, 0.2):
            numbers = run(watermark, stops, requests)
            print(f"  watermark {watermark:4.2f}", *(f"{k} {v:g}" for k, v in numbers.items()))


if __name__ == "__main__":
    main()
