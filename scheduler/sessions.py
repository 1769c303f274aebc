"""Sessions: a name that pins the prefix its last turn left, so the next turn prefills only what is
new. A cache with better manners, not a reservation: see `SchedulerConfig.max_sessions`.

A tenant has at most its own `max_sessions`; one more replaces its own least recently used one. When
all together have as many as may be, one goes of the account that, the newcomer counted, has most
for its weight (`scheduler.shares`): an account at or below its share of `max_sessions` loses none
to another's newcomer. Where nothing is kept apart by tenant, the least recently used of all goes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from scheduler.pages import IntegrityError
from scheduler.prefix import Entry, PrefixCache
from scheduler.shares import Account, Accounts, Ranking


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
    account: Account


class Sessions:
    """Pins by session id, least recently used first."""

    def __init__(self, *, limit: int, ttl_s: float, cache: PrefixCache, accounts: Accounts) -> None:
        self.ended: Counter[str] = Counter()
        """Pins that ended before their client said so, by cause."""
        self._limit = limit
        self._ttl_s = ttl_s
        self._cache = cache
        self._accounts = accounts
        self._sessions: dict[str, _Session] = {}
        self._of: defaultdict[Account, dict[str, None]] = defaultdict(dict)
        """Session ids by account, least recently used first."""
        self._held = Ranking()
        cache.on_evict = self._evicted
        cache.on_unpin = self._unpinned

    def __len__(self) -> int:
        return len(self._sessions)

    def touch(self, session_id: str, now: float) -> None:
        """The session is in use: its time starts anew."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.used_at = now
            self._sessions[session_id] = session
            mine = self._of[session.account]
            mine[session_id] = mine.pop(session_id)
            self._cache.touch(session.entry)

    def pin(
        self, session_id: str, entry: Entry, *, turn: int, now: float, tenant: str = ""
    ) -> None:
        """A turn of the tenant's has left `entry`; it replaces what an earlier turn left."""
        old = self._sessions.get(session_id)
        if old is not None and old.turn > turn:
            return
        self.release(session_id)
        account = self._accounts.of(tenant)
        if not self._make_room(account):
            return
        session = _Session(entry=entry, turn=turn, used_at=now, account=account)
        self._sessions[session_id] = session
        self._of[account][session_id] = None
        self._held.add(account, 1)
        self._cache.pin(entry, session_id, tenant)

    def _make_room(self, newcomer: Account) -> bool:
        """For one more of this account's; False when it may have none."""
        most = newcomer.policy.max_sessions
        if most is not None and self._held[newcomer] >= most:
            self.release(next(iter(self._of[newcomer])))
            self.ended["tenant_max_sessions"] += 1
        if len(self._sessions) < self._limit:
            return True
        oldest: str | None = next(iter(self._sessions))
        if self._accounts.fair:
            giver = next(self._held.givers(newcomer, self._limit))
            oldest = next(iter(self._of[giver]), None)
        if oldest is None:  # the newcomer is to give, and has none
            return False
        self.ended["max_sessions"] += 1
        return self.release(oldest)

    def release(self, session_id: str) -> bool:
        """Unpin; the entry stays for whoever comes with its tokens. False when there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        del self._of[session.account][session_id]
        self._held.add(session.account, -1)
        self._cache.unpin(session.entry, session_id)
        return True

    def expire(self, now: float) -> None:
        """End what nobody used for the TTL."""
        self._cache.shelves.expire(now, self._ttl_s)
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

    def _unpinned(self, entry: Entry, account: Account, cause: str) -> None:
        for session_id in sorted(name for name, its in entry.sessions.items() if its is account):
            self.release(session_id)
            self.ended[cause] += 1

    def by_tenant(self) -> dict[str, int]:
        """How many each account has."""
        return {account.name: self._held[account] for account in self._accounts.all()}

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
        if pins != {(name, id(entry)) for entry in self._cache for name in entry.sessions}:
            raise IntegrityError("sessions and the entries they pin disagree")
        if len(self._sessions) > self._limit:
            raise IntegrityError("more sessions than the limit")
        held: Counter[Account] = Counter()
        mine: dict[Account, list[str]] = {}
        for session_id, session in self._sessions.items():
            held[session.account] += 1
            mine.setdefault(session.account, []).append(session_id)
        if mine != {account: list(names) for account, names in self._of.items() if names}:
            raise IntegrityError("sessions are not their accounts'")
        self._held.integrity(held, "sessions")
        if any(n > (a.policy.max_sessions or n) for a, n in held.items()):
            raise IntegrityError("more sessions than their tenant may have")
        times = [session.used_at for session in self._sessions.values()]
        if times != sorted(times):
            raise IntegrityError("sessions are out of order")
