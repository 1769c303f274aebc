"""Shares of what tenants compete for: who holds more than its own.

Each tenant with a policy has an *account*; all others have one together, with the default policy's
weight: there are as many accounts as policies and one more, whatever names clients choose. The
*share* of an account of `total` is

    total * weight / (weights of all accounts that hold something, and of the one that comes)

It may hold more while there is some left. When something must go for a newcomer, it goes from the
account that, the newcomer counted, holds most for its weight. What all hold and the newcomer is
more than `total`, so that account holds more than its share: one at or below its share loses
nothing to another's newcomer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scheduler.config import TenantPolicy
from scheduler.pages import IntegrityError
from scheduler.tenants import OTHER


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Account:
    """A tenant with a policy, or all others together."""

    name: str
    policy: TenantPolicy


class Accounts:
    """By tenant. `fair` is false when there is only one, or it is not to matter."""

    def __init__(
        self,
        policies: Mapping[str, TenantPolicy] | None = None,
        default: TenantPolicy | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: nothing is kept apart by tenant."""
        self._other = Account(name=OTHER, policy=default or TenantPolicy())
        self._named = {n: Account(name=n, policy=p) for n, p in (policies or {}).items()}
        self.fair = bool(self._named) and not shared

    def of(self, tenant: str) -> Account:
        return self._named.get(tenant, self._other)

    def keeper(self, tenant: str) -> Account:
        """Whose entries a tenant's are: its own, or everybody's when nothing is kept apart."""
        return self.of(tenant) if self.fair else self._other

    def all(self) -> list[Account]:
        return [*self._named.values(), self._other]


Key = tuple[float, int, Account]
"""(held for its weight, minus the number of its last change, account); numbers are unique."""


class Ranking:
    """How much of one thing each account holds. A change costs O(log n) comparisons."""

    def __init__(self) -> None:
        self._held: dict[Account, int] = {}
        """Of those that hold something."""
        self._keys: dict[Account, Key] = {}
        self._order: list[Key] = []
        """Least for its weight first; of equals, first whose holding changed last."""
        self._weights = 0.0
        self._changes = 0

    def __getitem__(self, account: Account) -> int:
        return self._held.get(account, 0)

    def add(self, account: Account, change: int) -> None:
        """It holds so much more, or less."""
        if not change:
            return
        held = self._held.pop(account, 0)
        if held:
            del self._order[bisect_left(self._order, self._keys.pop(account))]
        if held + change:
            self._changes += 1
            self._held[account] = held + change
            key = ((held + change) / account.policy.weight, -self._changes, account)
            self._keys[account] = key
            insort(self._order, key)
        if not held or not held + change:
            self._weights = math.fsum(other.policy.weight for other in self._held)

    def most_first(self) -> Iterator[Account]:
        """Who holds most for its weight comes first. Nothing may change meanwhile."""
        return (account for *_, account in reversed(self._order))

    def above(self, account: Account, total: int, newcomer: Account | None = None) -> bool:
        """Whether an account holds more than its share of `total`."""
        weights = self._weights
        if newcomer is not None and newcomer not in self._held:
            weights += newcomer.policy.weight
        return self[account] * weights > total * account.policy.weight

    def givers(self, newcomer: Account, total: int) -> Iterator[Account]:
        """From whom one more of the newcomer's may take something, who should give first: those
        that hold more for their weight than it would then, and more than their share; last itself.
        One that holds nothing may take from its equals, too: else the first to come would stay for
        ever where there is less than one for each."""
        mine = (self[newcomer] + 1) / newcomer.policy.weight
        for ratio, _, account in reversed(self._order):
            less = ratio < mine or (ratio == mine and self[newcomer])
            if less or not self.above(account, total, newcomer):
                break
            if account is not newcomer:
                yield account
        yield newcomer

    def integrity(self, held: Mapping[Account, int], what: str) -> None:
        """Raises IntegrityError unless accounts hold this much."""
        held = {account: amount for account, amount in held.items() if amount}
        ratios = {account: amount / account.policy.weight for account, amount in held.items()}
        keys = {account: key[0] for account, key in self._keys.items()}
        same = self._held == held and keys == ratios
        same &= self._order == sorted(self._keys.values())
        if not same or self._weights != math.fsum(account.policy.weight for account in held):
            raise IntegrityError(f"the shares of {what} are off")
