"""An entry of the prefix cache, and how willingly it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from scheduler.groups import Group
from scheduler.shares import Account

Tokens = NDArray[np.int32]


class Yield(IntEnum):
    """How far an eviction may go: entries of this class and the ones below."""

    LOOSE = 0
    SESSIONS = 1
    AWAITED = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One saved point: position, tokens, pages."""

    boundary: int
    tokens: Tokens
    """The tokens before the boundary; its position is their number."""
    pages: NDArray[np.int32]
    """Pages of these tokens, the last of them maybe filled in part."""
    mtp: bool
    """Whether MTP history is in it; without, only rows that never draft may use it."""
    hashes: list[bytes]
    """[n]: chained hash of the first n whole pages."""
    row: int
    """The row that left it; -1 for one that came from a file."""
    ready: bool
    """The step that saves it has come back. Only then may anybody start from it."""
    owner: Account
    """Who left it: whose it is while no session pins it."""
    tenant: Account
    """The same in statistics, where it is told apart even when nothing is kept apart."""
    used: int = 0
    """When it was last used: the number of that use."""
    held: bool = True
    """False once it is evicted."""
    busy: bool = False
    """The plan being made uses it."""
    group: Group | None = None
    """Its queued members wait for this entry."""
    sessions: dict[str, Account] = field(default_factory=dict)
    """Sessions that pin it, and whose each is."""

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def standing(self) -> Yield:
        if self.group is not None and self.group.queued:
            return Yield.AWAITED
        return Yield.SESSIONS if self.sessions else Yield.LOOSE

    @property
    def holders(self) -> set[Account]:
        """On whose accounts it counts: whose sessions pin it, or who left it."""
        return set(self.sessions.values()) or {self.owner}
