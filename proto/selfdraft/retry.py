"""When a call that failed is made again, and after how long."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from selfdraft.errors import SelfdraftError

UNAVAILABLE: Final = "UNAVAILABLE"
"""Name, among the reasons, of gRPC's own status: nobody answered, or the connection broke."""

RETRYABLE: Final = frozenset(
    {"QUEUE_FULL", "TENANT_LIMIT", "DEADLINE_UNREACHABLE", "LOADING", "DRAINING", UNAVAILABLE}
)
"""Reasons after which another attempt can go better without anything being changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often, how late and for what a call is made again.

    Only calls of which nothing has arrived are: a stream that has begun is never begun again. Where
    the server names a delay (RetryInfo) no attempt comes before it; the wait is longer by up to
    `jitter`, so that those who were refused together do not come back together. The call's
    `timeout` covers all attempts and the waits between them: an attempt that could not begin within
    it is not waited for, and the last refusal is raised at once.
    """

    attempts: int = 5
    """Attempts in all, the first included. With the default delays a server may be away for seven
    seconds: a restart, not an outage."""

    max_delay_s: float = 30.0
    """Longest wait before one attempt, in seconds. A server that asks for more is taken at its
    word: its refusal is raised, for by then the caller may have somewhere better to go."""

    initial_delay_s: float = 0.5
    """Wait after the first failure when the server names none, in seconds; twice that after the
    second, and so on up to `max_delay_s`."""

    jitter: float = 0.25
    """Waits are longer by a random share of up to this, 0 … 1; never shorter."""

    reasons: frozenset[str] = RETRYABLE
    """`SelfdraftError.reason`s worth another attempt, and UNAVAILABLE for a connection that could
    not be made or broke; some of `RETRYABLE`."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: must be >= 1, is {self.attempts}")
        for name in ("max_delay_s", "initial_delay_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be >= 0 seconds, is {value}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter: must be in 0 … 1, is {self.jitter}")
        if unknown := sorted(self.reasons - RETRYABLE):
            raise ValueError(f"reasons: {', '.join(unknown)} not in {', '.join(sorted(RETRYABLE))}")


DEFAULT_RETRY: Final = Retry()


class Attempts:
    """The attempts of one call: counts them, and keeps its deadline."""

    def __init__(
        self,
        policy: Retry | None,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = random.random,
    ) -> None:
        """`timeout` of the whole call in seconds; `share` draws from [0, 1)."""
        self._policy = policy
        self._clock = clock
        self._share = share
        self._deadline = None if timeout is None else clock() + timeout
        self._unanswered = False
        self.made = 1
        """Attempts so far; the first is taken for granted."""
        self.begun = False
        """Something of the answer has arrived: no further attempt."""

    def remaining(self) -> float | None:
        """Seconds that are left of the timeout; None without one."""
        return None if self._deadline is None else self._deadline - self._clock()

    def delay_after(self, error: SelfdraftError) -> float | None:
        """Seconds to wait before the attempt that follows `error`; None when none does."""
        policy = self._policy
        if policy is None or self.begun or not self._worth(error, policy):
            return None
        if self.made >= policy.attempts:
            return None
        delay = error.retry_after_s
        if delay is None:
            delay = min(policy.initial_delay_s * 2 ** (self.made - 1), policy.max_delay_s)
        if delay > policy.max_delay_s:
            return None
        delay *= 1 + policy.jitter * self._share()
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            return None
        self.made += 1
        return delay

    def _worth(self, error: SelfdraftError, policy: Retry) -> bool:
        if not error.reason and error.code is grpc.StatusCode.UNAVAILABLE:
            self._unanswered = True
            return UNAVAILABLE in policy.reasons
        # An attempt whose connection broke may still be alive at the server, which has then not
        # noticed that its client has left: it is our own duplicate, and about to end.
        if error.reason == "DUPLICATE_REQUEST":
            return self._unanswered
        return error.reason in policy.reasons


async def until_answered(
    attempt: Callable[[float | None], Awaitable[Any]], policy: Retry | None, timeout: float | None
) -> Any:
    """The answer of a call of one request, made again as `policy` says. `attempt` opens the call
    with the seconds that are left of `timeout`. Raises SelfdraftError."""
    attempts = Attempts(policy, timeout)
    while True:
        try:
            return await attempt(attempts.remaining())
        except grpc.aio.AioRpcError as error:
            failure = SelfdraftError.of(error)
            delay = attempts.delay_after(failure)
            if delay is None:
                raise failure from error
        await asyncio.sleep(delay)
