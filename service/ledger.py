"""What each tenant has asked for since the server started. Used on the event loop only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.request import Usage


@dataclass(slots=True)
class Account:
    """Counts of one tenant; all but `active` only grow."""

    active: int = 0
    """`Generate` calls being answered."""
    requests: int = 0
    """Calls that ended."""
    failed: int = 0
    """Those of them that ended with an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Ledger:
    """Accounts by tenant. There are as many as names that were let in: those of the token file."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def open(self, tenant: str) -> None:
        """A call begins."""
        self._accounts.setdefault(tenant, Account()).active += 1

    def close(self, tenant: str, usage: Usage | None, *, failed: bool) -> None:
        """A call has ended; `usage` is None when it was refused."""
        account = self._accounts[tenant]
        account.active -= 1
        account.requests += 1
        account.failed += failed
        if usage is not None:
            account.prompt_tokens += usage.prompt_tokens
            account.cached_tokens += usage.cached_tokens
            account.completion_tokens += usage.completion_tokens

    def __iter__(self) -> Iterator[tuple[str, Account]]:
        """By name."""
        return iter(sorted(self._accounts.items()))
