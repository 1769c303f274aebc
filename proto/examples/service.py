"""Inside a service: many questions at once, each with a deadline, refusals waited for.

    python proto/examples/service.py 127.0.0.1:50051 < questions.txt

One line in, one line of JSON out, in the order in which answers come. A refusal ("the queue is
full, come back in two seconds") is the client's business; what is left of errors is ours: here
each becomes a line, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable

from selfdraft import Client, Retry, SelfdraftError

RETRY = Retry(attempts=8, max_delay_s=10.0)
AT_ONCE = 16
"""Questions on their way at the same time. More than the server has rows only makes it refuse."""


async def answer(client: Client, number: int, question: str, timeout: float) -> dict[str, object]:
    """One answer, or why there is none. `timeout` in seconds, all attempts together."""
    try:
        async with client.generate(
            text=question,
            max_tokens=64,
            temperature=0.0,
            stop=["\n\n"],
            priority="batch",
            timeout=timeout,
        ) as generation:
            text = await generation.text()
    except SelfdraftError as error:
        return {"number": number, "error": error.reason or error.code.name}
    assert generation.complete is not None
    return {
        "number": number,
        "text": text,
        "finish_reason": generation.complete.finish_reason,
        "tokens": generation.complete.completion_tokens,
        "attempts": generation.attempts,
    }


async def main(target: str, questions: Iterable[str], timeout: float) -> int:
    """Answers all of them; returns how many failed."""
    places, failed = asyncio.Semaphore(AT_ONCE), 0
    async with Client(target, retry=RETRY) as client, asyncio.TaskGroup() as tasks:

        async def one(number: int, question: str) -> None:
            nonlocal failed
            async with places:
                found = await answer(client, number, question, timeout)
            failed += "error" in found
            print(json.dumps(found, ensure_ascii=False), flush=True)

        for number, question in enumerate(questions):
            tasks.create_task(one(number, question))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="host:port of the server")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per question")
    given = parser.parse_args()
    lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    sys.exit(1 if asyncio.run(main(given.target, lines, given.timeout)) else 0)
