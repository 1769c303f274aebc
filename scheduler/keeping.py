"""What outlives a request: the prefix cache and its sessions, and their way to and from files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.plan import EngineInfo, SavedPrefix, pages_needed
from scheduler.config import SchedulerConfig
from scheduler.pages import PagePool
from scheduler.prefix import Entry, PrefixCache, Yield, root
from scheduler.request import FinishReason
from scheduler.sequence import Sequence
from scheduler.sessions import NoRoomError, Sessions
from scheduler.shares import Accounts

SESSION_KEY = "session_id"
"""Name of the session's id in a file's metadata."""

NOTHING_TO_KEEP = frozenset({FinishReason.FAULT, FinishReason.SHUTDOWN, FinishReason.ENGINE_FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What the engine must know to write a session's prefix to a file."""

    boundary: int
    saved: SavedPrefix
    pages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush has freed."""

    boundaries: int
    sessions: int
    pages: int
    """Pages that nobody holds any more; those of running rows are not among them."""


class Keeping:
    """The prefix cache of one core and the sessions that pin parts of it."""

    def __init__(self, *, info: EngineInfo, config: SchedulerConfig, pool: PagePool) -> None:
        accounts = Accounts(config.tenants, config.default_tenant, shared=config.share_kept)
        self.cache = PrefixCache(
            boundaries=info.boundaries if config.prefix_cache else 0,
            page_size=info.page_size,
            pool=pool,
            accounts=accounts,
        )
        self.sessions = Sessions(
            limit=config.max_sessions,
            ttl_s=config.session_ttl_s,
            cache=self.cache,
            accounts=accounts,
        )
        self._pool = pool
        self._page_size = info.page_size
        self._context_length = info.context_length
        self._vocab_size = info.vocab_size

    # --- ends of rows ----------------------------------------------------------------------------

    def end(self, sequence: Sequence, table: NDArray[np.int32], now: float) -> Entry | None:
        """An ended row that no step in flight names is about to be released: the entry of its end,
        if the engine is to keep it."""
        session = sequence.request.session_id
        entry, fresh = self._keep(
            sequence, table, Yield.LOOSE if session is None else Yield.SESSIONS
        )
        if entry is not None and session is not None:
            tenant = sequence.request.tenant
            self.sessions.pin(session, entry, turn=sequence.turn, now=now, tenant=tenant)
        return entry if fresh else None

    def leave(self, sequence: Sequence, table: NDArray[np.int32]) -> Entry | None:
        """The same for a row that is preempted: it may resume from there."""
        entry, fresh = self._keep(sequence, table, Yield.LOOSE)
        sequence.left = entry.boundary if entry is not None else 0
        return entry if fresh else None

    def end_waiting(self, sequence: Sequence, now: float) -> None:
        """A preempted request has ended before it ran again: what it left is its session's."""
        entry, session = self.cache.get(sequence.left), sequence.request.session_id
        if sequence.started or session is None or sequence.cause in NOTHING_TO_KEEP:
            return
        if entry is not None:
            tenant = sequence.request.tenant
            self.sessions.pin(session, entry, turn=sequence.turn, now=now, tenant=tenant)

    def _keep(
        self, sequence: Sequence, table: NDArray[np.int32], most: Yield
    ) -> tuple[Entry | None, bool]:
        """The entry of a row's last point, and whether it is new.

        The boundary is at the last token the device emitted. Tokens of a request that had already
        ended are in no stream, but they are in the row's state, so they count.
        """
        if not self._worth_keeping(sequence):
            return None, False
        tokens = sequence.computed_tokens()
        hashes = self.cache.hashes(tokens, sequence.hashes or root(sequence.request.cache_salt))
        entry = self.cache.find(tokens, hashes, mtp=sequence.speculative)
        if entry is not None and entry.ready:
            self.cache.touch(entry)
            return entry, False
        tenant = sequence.request.tenant
        if not self.cache.make_boundary(most, tenant):
            return None, False
        entry = self.cache.add(
            tokens=tokens,
            hashes=hashes,
            pages=table,
            mtp=sequence.speculative,
            row=sequence.row,
            ready=True,
            tenant=tenant,
        )
        return entry, True

    def _worth_keeping(self, sequence: Sequence) -> bool:
        return bool(
            self.cache.total
            and sequence.request.reuse_prefix
            and sequence.produced
            and not sequence.spoiled
            and sequence.cause not in NOTHING_TO_KEEP
        )

    def flush(self) -> Flushed:
        """Forget every prefix but those that queued requests wait for, with their sessions. Rows
        that started from one have their own state, and hold their pages. Only with no step in
        flight."""
        free, sessions = self._pool.unused, len(self.sessions)
        gone = [entry for entry in self.cache if entry.standing is not Yield.AWAITED]
        for entry in gone:
            self.cache.evict(entry, "flush")
        return Flushed(
            boundaries=len(gone),
            sessions=sessions - len(self.sessions),
            pages=self._pool.unused - free,
        )

    # --- files -----------------------------------------------------------------------------------

    def export(self, session_id: str, now: float) -> Export:
        """Raises UnknownSessionError."""
        self.sessions.expire(now)
        entry = self.sessions.entry(session_id)
        self.sessions.touch(session_id, now)
        saved = SavedPrefix(
            tokens=tuple(entry.tokens.tolist()),
            mtp=entry.mtp,
            metadata={SESSION_KEY: session_id},
        )
        return Export(boundary=entry.boundary, saved=saved, pages=entry.pages.copy())

    def begin_import(self, saved: SavedPrefix, *, rows: bool, salt: str) -> Entry:
        """Make room for a file's prefix: an entry that nobody uses before `finish_import`. Ready at
        once when these tokens are kept already. `rows`: some row runs; `salt`: that of the requests
        that may use it, which is their tenant's name or "" (`GenerationRequest.cache_salt`).

        Raises NoRoomError, with the numbers.
        """
        tokens = np.array(saved.tokens, dtype=np.int32)
        self._fits(tokens)
        hashes = self.cache.hashes(tokens, root(salt))
        there = self.cache.find(tokens, hashes, mtp=saved.mtp)
        if there is not None and there.ready:
            return there
        pages = pages_needed(len(tokens), self._page_size)
        yields = Yield.SESSIONS if rows else Yield.AWAITED
        if not self.cache.make_room(pages, most=yields):
            free = self._pool.unused + self._pool.cached
            message = f"{pages} pages are needed; running requests leave {free} of "
            raise NoRoomError(f"{message}{self._pool.total}")
        if not self.cache.make_boundary(yields, salt):
            raise NoRoomError(f"all {self.cache.total} boundaries are in use")
        return self.cache.add(
            tokens=tokens,
            hashes=hashes,
            pages=self._pool.take(pages),
            mtp=saved.mtp,
            row=-1,
            ready=False,
            tenant=salt,
        )

    def _fits(self, tokens: NDArray[np.int32]) -> None:
        if not self.cache.total:
            raise NoRoomError("this server keeps no prefixes (0 boundaries)")
        if not 0 < len(tokens) < self._context_length:
            limit = f"the limit is {self._context_length - 1} (context length)"
            raise NoRoomError(f"{len(tokens)} tokens; {limit}")

    def finish_import(self, entry: Entry, session_id: str, *, turn: int, now: float) -> None:
        """The engine has it."""
        entry.ready = True
        self.sessions.pin(session_id, entry, turn=turn, now=now, tenant=entry.tenant.name)

    def cancel_import(self, entry: Entry) -> None:
        """The engine does not have it, unless it did before."""
        if not entry.ready and entry.held:
            self.cache.evict(entry, "import")

    # --- looking in ------------------------------------------------------------------------------

    def integrity(self, *, idle: bool) -> None:
        """Raises IntegrityError."""
        self.cache.integrity(idle=idle)
        self.sessions.integrity()

    def snapshot(self) -> dict[str, Any]:
        """The numbers of `Statistics`, by field."""
        cache = self.cache
        return {
            "entries": len(cache),
            "boundaries_used": len(cache),
            "boundaries_total": cache.total,
            "prefix_lookups": cache.lookups,
            "prefix_hits": cache.hits,
            "cached_tokens": cache.cached_tokens,
            "evictions": dict(cache.evictions),
            "boundaries_by_tenant": {
                account.name: cache.shelves.by_tenant[account.name]
                for account in cache.shelves.accounts.all()
            },
            "sessions": len(self.sessions),
            "sessions_by_tenant": self.sessions.by_tenant(),
            "sessions_ended": dict(self.sessions.ended),
        }
