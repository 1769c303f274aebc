"""Parallel samples: requests with one prompt, of which the first to start prefills for all.

The first member that starts cold *leads*: its prompt is cut one token before its end and saved
there. The others wait in the queue, and whoever is behind them may pass, until that boundary
exists; then each starts from it and prefills one token. When it cannot be had (no boundaries, the
leader ended early or was preempted, the leader keeps no MTP history and a member needs some),
nobody waits. A member that was preempted after its first token neither leads nor waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.pages import IntegrityError
from scheduler.request import InvalidRequestError
from scheduler.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Members that have not ended."""

    first: Sequence
    members: int = 0
    queued: int = 0
    """Members in the queue that may start from a saved prefix."""
    leader: Sequence | None = None
    """Running, and its boundary is not there yet."""


class Groups:
    """All groups with a live member, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def of(self, sequence: Sequence) -> Group | None:
        name = sequence.request.group
        return None if name is None else self._groups.get(name)

    def check(self, name: str | None, prompt: NDArray[np.int32]) -> None:
        """Raises InvalidRequestError for another prompt than the group's."""
        group = None if name is None else self._groups.get(name)
        if group is not None and not np.array_equal(group.first.asked, prompt):
            raise InvalidRequestError("group", "its requests must have the same prompt")

    def join(self, sequence: Sequence) -> None:
        """A request that `check` lets pass is about to be queued."""
        name = sequence.request.group
        if name is None:
            return
        group = self._groups.setdefault(name, Group(first=sequence))
        group.members += 1
        group.queued += sequence.restores

    def follows(self, sequence: Sequence) -> bool:
        """Another member came before, which should prefill for this one too."""
        group = self.of(sequence)
        return group is not None and group.members > 1 and sequence.restores

    def start(self, sequence: Sequence) -> None:
        """A member leaves the queue."""
        if group := self.of(sequence):
            group.queued -= sequence.restores

    def requeue(self, sequence: Sequence) -> None:
        """A member was preempted, and is back in the queue."""
        if group := self.of(sequence):
            group.queued += sequence.restores
            if group.leader is sequence:
                group.leader = None

    def end(self, sequence: Sequence) -> None:
        """A member has ended, queued or running."""
        if group := self.of(sequence):
            group.queued -= sequence.restores and not sequence.started
            group.members -= 1
            if group.leader is sequence:
                group.leader = None
            if not group.members:
                del self._groups[sequence.request.group or ""]

    def waits(self, sequence: Sequence) -> bool:
        """Somebody else is about to save what this member can start from."""
        group = self.of(sequence)
        if group is None or group.leader is None or not sequence.restores or sequence.resumes:
            return False
        return group.leader.speculative or not sequence.speculative

    def integrity(self, live: dict[str, Sequence]) -> None:
        """Raises IntegrityError."""
        for name, group in self._groups.items():
            members = [s for s in live.values() if s.request.group == name]
            queued = sum(s.restores for s in members if not s.started)
            if (group.members, group.queued) != (len(members), queued) or not members:
                raise IntegrityError(f"group {name}: its members are miscounted")
            if group.leader is not None and (
                group.leader not in members or not group.leader.started
            ):
                raise IntegrityError(f"group {name}: its leader does not run")
