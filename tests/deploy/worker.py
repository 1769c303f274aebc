"""A server in a process of its own, so that a test can kill it. Prints its address."""

from __future__ import annotations

import anyio

from tests.service.harness import running


async def main() -> None:
    async with running(step_s=0.01) as up:
        print(up.target, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
