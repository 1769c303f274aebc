"""What the waiting queue costs: `python -m tests.benchmarks.waiting`. No model, no device.

CPU microseconds per operation with n requests waiting, of 100 tenants in three classes: a push, a
removal from anywhere, a step that starts eight, a charge to a running row, an estimate for a
deadline; and the ageing of everybody at once: the first of each tenant and class.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from engine.plan import SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.queue import WaitingQueue
from scheduler.request import GenerationRequest, Priority
from scheduler.sequence import Sequence

SIZES = (100, 1_000, 10_000, 100_000)
TENANTS = 100
REPEATS = 500


def make(rng: random.Random, number: int, now: float) -> Sequence:
    request = GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=(1,),
        sampling=SamplingParams(),
        max_tokens=1,
        tenant=f"t{rng.randrange(TENANTS)}",
        priority=rng.choice(list(Priority)),
    )
    prompt = np.zeros(rng.randint(1, 2000), dtype=np.int32)
    return Sequence(request=request, prompt=prompt, submitted_at=now, depth_cap=0, work=len(prompt))


def micros(action: Callable[[], object], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        action()
    return (time.process_time() - started) / repeats * 1e6


def measure(size: int) -> list[float]:
    rng = random.Random(size)
    queue = WaitingQueue(SchedulerConfig(max_queue=10**9, max_queued_tokens=10**12))
    for number in range(size):  # they came evenly over the last 29 s
        queue.push(make(rng, number, number / size * 29.0))
    fresh = [make(rng, size + number, 29.0) for number in range(REPEATS)]
    rows: list[Sequence] = []

    def start_eight() -> None:
        for count, sequence in enumerate(queue.candidates(29.0)):
            if count == 8:
                break
            sequence.row = len(rows)
            queue.start(sequence, 29.0)
            rows.append(sequence)

    waiting = iter(list(fresh))
    push = micros(lambda: queue.push(next(waiting)), REPEATS)
    for sequence in fresh:
        queue.remove(sequence)
    gone = iter(rng.sample(list(queue), min(REPEATS, size // 10)))
    remove = micros(lambda: queue.remove(next(gone)), min(REPEATS, size // 10))
    steps = min(100, size // 32)
    start = micros(start_eight, steps)
    charge = micros(lambda: queue.charge(rng.choice(rows), 1), REPEATS)
    ahead = micros(lambda: queue.ahead("t1", Priority.DEFAULT, generated=100.0), REPEATS)
    ageing = micros(lambda: next(queue.candidates(60.0)), 1)
    return [push, remove, start, charge, ahead, ageing]


def main() -> None:
    names = ("push", "remove", "start 8", "charge", "estimate", "age all")
    print(f"{'waiting':>8} " + " ".join(f"{name:>9}" for name in names))
    for size in SIZES:
        print(f"{size:>8} " + " ".join(f"{value:9.1f}" for value in measure(size)))


if __name__ == "__main__":
    main()
