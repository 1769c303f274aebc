"""What a noisy neighbour costs: `python -m tests.benchmarks.neighbour`.

Tenant a has ten chat sessions, each with a turn every `PAUSE_S` seconds or so; tenant b floods
requests of one turn with long prompts, with or without a session id each. The real core on a
simulated machine, virtual time: a alone, then both, with one LRU for both and with shares.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from statistics import median

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.simulation import (
    AcceptanceModel,
    Arrival,
    MachineCosts,
    MachineSpec,
    Open,
    Scenario,
    Simulation,
    WidthCosts,
)

SESSIONS, TURNS, PAUSE_S = 10, 12, 20.0
FIRST_S = 60.0
"""From here on turns count: by then every session has had one."""

MACHINE = MachineSpec(
    costs=MachineCosts(decode=WidthCosts([(1, 0.02), (64, 0.04)]), token_s=0.0005),
    acceptance=AcceptanceModel(rates=(0.7, 0.6)),
    max_rows=8,
    max_depth=2,
    pages=4096,
    boundaries=32,
    prefill_chunk=512,
)


def chats(rng: random.Random) -> list[Arrival]:
    """Every turn brings some 80 tokens and gets 60; `OpenLoop` puts the conversation before it."""
    found = []
    for session in range(SESSIONS):
        start, length = rng.uniform(0, PAUSE_S), 600
        for turn in range(TURNS):
            at = start + turn * PAUSE_S + rng.uniform(-4, 4)
            found.append(
                Arrival(
                    arrival_s=max(at, 0.0),
                    prompt_tokens=length,
                    output_tokens=60,
                    session=f"chat-{session}",
                    tenant="a",
                    priority="default",
                )
            )
            length += 60 + rng.randint(40, 120)
    return found


def flood(rng: random.Random, rate: float, tokens: int, *, sessions: bool) -> list[Arrival]:
    """Prompts that nobody sends again, each in a session of its own or in none."""
    at = 0.0
    found: list[Arrival] = []
    while at < TURNS * PAUSE_S:
        at += rng.expovariate(rate)
        length = rng.randint(tokens // 2, 2 * tokens)
        found.append(
            Arrival(
                arrival_s=at,
                prompt_tokens=length,
                output_tokens=20,
                session=f"once-{len(found)}" if sessions else None,
                tenant="b",
                priority="default",
            )
        )
    return found


def run(trace: list[Arrival], scheduler: SchedulerConfig) -> dict[str, float]:
    scenario = Scenario(
        machine=MACHINE,
        load=Open(trace=tuple(sorted(trace, key=lambda arrival: arrival.arrival_s))),
        scheduler=scheduler,
        duration_s=TURNS * PAUSE_S + 10,
        attempts=1,
    )
    simulation = Simulation(scenario)
    simulation.run()
    works = simulation.clients.works
    mine = [w for w in works if w.tenant == "a" and w.complete and w.arrived_at >= FIRST_S]
    others = [w for w in works if w.tenant == "b" and w.complete]
    waits = sorted(w.first_token_at - w.arrived_at for w in mine if w.first_token_at is not None)
    return {
        "turns": len(mine),
        "cached share": sum(w.cached for w in mine) / sum(w.prompt_tokens for w in mine),
        "TTFT p50": median(waits),
        "TTFT p90": waits[int(0.9 * len(waits))],
        "b's requests": len(others),
        "b's prompt tokens": sum(w.prompt_tokens for w in others),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="b's requests per second")
    parser.add_argument("--tokens", type=int, default=1000, help="b's typical prompt")
    options = parser.parse_args()
    policies = {"a": TenantPolicy(), "b": TenantPolicy()}
    shares = SchedulerConfig(tenants=policies, max_queue=64)
    talk = chats(random.Random(1))
    runs = {"a alone": (talk, shares)}
    for sessions in (False, True):
        noise = flood(random.Random(2), options.rate, options.tokens, sessions=sessions)
        name = "with sessions" if sessions else "without"
        runs[f"one LRU, b {name}"] = (talk + noise, replace(shares, share_kept=True))
        runs[f"shares, b {name}"] = (talk + noise, shares)
    for name, (trace, scheduler) in runs.items():
        numbers = run(trace, scheduler)
        print(f"{name:25}", *(f"{key} {value:.4g}" for key, value in numbers.items()), sep="  ")


if __name__ == "__main__":
    main()
