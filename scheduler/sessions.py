"""Sessions: a name that pins the prefix its last turn left, so the next turn prefills only what is
new. A cache with better manners, not a reservation: see `SchedulerConfig.max_sessions`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler.pages import IntegrityError
from scheduler.prefix import Entry, PrefixCache


class UnknownSessionError(Exception):
    """No prefix is kept under this session id."""


class NoRoomError(Exception):
    """A file's prefix does not fit beside what runs; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What one session keeps."""

    session_id: str
    tokens: int
    pages: int
    expires_at: float
    """Scheduler-clock seconds."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Session:
    entry: Entry
    turn: int
    """Order in which the turn that left `entry` ended."""
    used_at: float


class Sessions:
    """Pins by session id, least recently used first."""

    def __init__(self, *, limit: int, ttl_s: float, cache: PrefixCache) -> None:
        self.ended: Counter[str] = Counter()
        """Pins that ended before their client said so, by cause."""
        self._limit = limit
        self._ttl_s = ttl_s
        self._cache = cache
        self._sessions: dict[str, _Session] = {}
        cache.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._sessions)

    def touch(self, session_id: str, now: float) -> None:
        """The session is in use: its time starts anew."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.used_at = now
            self._sessions[session_id] = session
            self._cache.touch(session.entry)

    def pin(self, session_id: str, entry: Entry, *, turn: int, now: float) -> None:
        """A turn has left `entry`; it replaces what an earlier turn left."""
        old = self._sessions.get(session_id)
        if old is not None and old.turn > turn:
            return
        self.release(session_id)
        if len(self._sessions) >= self._limit:
            oldest = next(iter(self._sessions))
            self.release(oldest)
            self.ended["max_sessions"] += 1
        self._sessions[session_id] = _Session(entry=entry, turn=turn, used_at=now)
        entry.sessions.add(session_id)

    def release(self, session_id: str) -> bool:
        """Unpin; the entry stays for whoever comes with its tokens. False when there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.entry.sessions.discard(session_id)
        return True

    def expire(self, now: float) -> None:
        """End what nobody used for the TTL."""
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if now < session.used_at + self._ttl_s:
                break
            self.release(session_id)
            self.ended["ttl"] += 1

    def _evicted(self, entry: Entry, cause: str) -> None:
        for session_id in sorted(entry.sessions):
            self.release(session_id)
            self.ended[cause] += 1

    def entry(self, session_id: str) -> Entry:
        """Raises UnknownSessionError."""
        if (session := self._sessions.get(session_id)) is None:
            raise UnknownSessionError(f"session_id: nothing is kept for {session_id!r}")
        return session.entry

    def list(self) -> list[SessionInfo]:
        """Least recently used first."""
        return [
            SessionInfo(
                session_id=session_id,
                tokens=session.entry.position,
                pages=len(session.entry.pages),
                expires_at=session.used_at + self._ttl_s,
            )
            for session_id, session in self._sessions.items()
        ]

    def integrity(self) -> None:
        """Every pin is known to both sides. Raises IntegrityError."""
        pins = {(name, id(session.entry)) for name, session in self._sessions.items()}
        held = {(name, id(entry)) for entry in self._cache for name in entry.sessions}
        if pins != held:
            raise IntegrityError("sessions and the entries they pin disagree")
        if len(self._sessions) > self._limit:
            raise IntegrityError("more sessions than the limit")
        times = [session.used_at for session in self._sessions.values()]
        if times != sorted(times):
            raise IntegrityError("sessions are out of order")
