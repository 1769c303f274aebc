"""All kinds of hostile clients at once; what they did, as JSON on standard output."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from tests.benchmarks.soak.hostile import (
    big,
    connections,
    floods,
    garbage,
    slow_reader,
    vanishing,
)
from tests.benchmarks.soak.hostile.wire import Deeds

FLOOD = 500


async def everything(given: argparse.Namespace) -> dict[str, Deeds]:
    """Runs each kind until the time is up."""
    until, target, round_s = time.monotonic() + given.seconds, given.target, given.round
    done: dict[str, Deeds] = {}

    def deeds(kind: str) -> Deeds:
        return done.setdefault(kind, Deeds())

    attacks: dict[str, Coroutine[Any, Any, None]] = {
        "slow readers": slow_reader.attack(
            target, deeds("slow readers"), until, given.slow_readers
        ),
        "vanishing": vanishing.attack(target, deeds("vanishing"), until, round_s),
        "garbage": garbage.attack(target, deeds("garbage"), until, round_s),
        "floods": floods.attack(target, deeds("floods"), until, round_s, FLOOD),
        "too large": big.attack(target, deeds("too large"), until, round_s, given.big_bytes),
        "connections": connections.attack(
            target, deeds("connections"), until, round_s, given.connections
        ),
    }
    async with asyncio.TaskGroup() as tasks:
        for attack in attacks.values():
            tasks.create_task(attack)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--round", type=float, required=True)
    parser.add_argument("--slow-readers", type=int, required=True)
    parser.add_argument("--big-bytes", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    done = asyncio.run(everything(parser.parse_args()))
    json.dump({kind: asdict(deeds) for kind, deeds in done.items()}, sys.stdout)


if __name__ == "__main__":
    main()
