"""`SubscribeKvEvents`: which prefixes are kept here, and how busy the engine is.

Event n of the scheduler's log is batch base + n, alone in it. `base` is the wall clock when the
server started, in milliseconds: numbers of a server that was there before are too low to be taken
for one's own, and its subscribers start over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from smg_grpc_proto.generated import common_pb2 as common

from scheduler.kv_events import KvEvent, Removed, Stored
from scheduler.loop import Scheduler
from scheduler.statistics import Statistics
from service.errors import Reason, ServiceError
from service.gateway.load import LoadRecords

POLL_S: Final = 0.1
"""How late a subscriber may learn of something."""
HEARTBEAT_S: Final = 1.0
"""A load record at least this often: the gateway takes a few seconds of silence for a wedge."""
SNAPSHOT_BLOCKS: Final = 2048
"""Blocks per message of a snapshot, about."""


class KvSubscription:
    """One subscriber. `poll` gives what is to be sent now."""

    def __init__(self, scheduler: Scheduler, *, base: int, wall: Callable[[], float]) -> None:
        """`wall` gives seconds since the epoch."""
        self._scheduler = scheduler
        self._base = base
        self._wall = wall
        self._page = scheduler.info.page_size
        self._cursor = 0
        self._loads = LoadRecords(scheduler.info)
        self._sent: tuple[int, ...] = ()
        self._sent_at = float("-inf")

    def begin(self, start: int) -> list[common.KvEventBatch]:
        """The first batches. `start`: number of the last batch the subscriber knows, 0 for none.

        Raises ServiceError (EVENTS_EXPIRED) when what followed it is not known any more.
        """
        now = self._scheduler.statistics()
        self._loads.observe(now)
        if start == 0:
            self._cursor = self._scheduler.newest_kv_event
            return list(self._snapshot(self._scheduler.kv_blocks(), now))
        if start < self._base or self._scheduler.kv_events(start - self._base) is None:
            raise ServiceError(
                Reason.EVENTS_EXPIRED,
                f"start_sequence_number: batches after {start} are not known any more; "
                "subscribe from 0 for a snapshot",
            )
        self._cursor = start - self._base
        return self.poll()

    def poll(self) -> list[common.KvEventBatch]:
        """What happened since the last call. Raises ServiceError (EVENTS_MISSED) when the
        subscriber read so slowly that some of it is gone."""
        now = self._scheduler.statistics()
        self._loads.observe(now)
        events = self._scheduler.kv_events(self._cursor)
        if events is None:
            raise ServiceError(
                Reason.EVENTS_MISSED, "the subscriber fell behind; subscribe from 0 for a snapshot"
            )
        batches = [self._batch(event, now) for event in events]
        if not batches and self._is_news(now):
            batches = [self._load_only(now)]
        return batches

    def _is_news(self, now: Statistics) -> bool:
        return now.at >= self._sent_at + HEARTBEAT_S or _essence(now) != self._sent

    def _load_only(self, now: Statistics) -> common.KvEventBatch:
        heartbeat = now.at >= self._sent_at + HEARTBEAT_S
        batch = self._empty(now, self._cursor, load_only=True, telemetry=heartbeat)
        if heartbeat:
            self._sent_at = now.at
        return batch

    def _batch(self, event: KvEvent, now: Statistics) -> common.KvEventBatch:
        self._cursor += 1
        batch = self._empty(now, self._cursor, load_only=False, telemetry=False)
        batch.events.append(self._event(event, self._cursor))
        return batch

    def _snapshot(self, blocks: Sequence[Stored], now: Statistics) -> Iterator[common.KvEventBatch]:
        """Everything that is kept, in batches that end with the number of the newest event."""
        parts = list(_parts(blocks))
        # An old server's numbers leave room for any count of parts before the newest one.
        first = self._cursor - len(parts) + 1
        total = sum(len(chain.hashes) for chain in blocks)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            batch = self._empty(now, first + index, load_only=False, telemetry=last)
            if index == 0:
                batch.events.add(cleared=common.KvCacheCleared())
            batch.events.extend(self._event(chain, 0) for chain in part)
            batch.snapshot.CopyFrom(
                common.KvSnapshotChunk(index=index, count=len(parts), blocks=total)
            )
            yield batch
        self._sent_at = now.at

    def _empty(
        self, now: Statistics, number: int, *, load_only: bool, telemetry: bool
    ) -> common.KvEventBatch:
        self._sent = _essence(now)
        load = self._loads.record(now, load_only=load_only, telemetry=telemetry)
        return common.KvEventBatch(
            sequence_number=self._base + number, timestamp=self._wall(), dp_rank=0, load=load
        )

    def _event(self, event: KvEvent, number: int) -> common.KvCacheEvent:
        if isinstance(event, Removed):
            removed = common.KvBlocksRemoved(
                block_hashes=[block_number(block) for block in event.hashes],
                tier=common.KV_CACHE_TIER_DEVICE,
            )
            return common.KvCacheEvent(event_id=number, removed=removed)
        stored = common.KvBlocksStored(tier=common.KV_CACHE_TIER_DEVICE)
        if event.parent is not None:
            stored.parent_block_hash = block_number(event.parent)
        tokens = event.tokens.tolist()
        for index, block in enumerate(event.hashes):
            stored.blocks.add(
                block_hash=block_number(block),
                token_ids=tokens[index * self._page : (index + 1) * self._page],
                block_size=self._page,
            )
        return common.KvCacheEvent(event_id=number, stored=stored)


def block_number(block: bytes) -> int:
    """A block's hash as the protocol has it: 64 bits, signed."""
    return int.from_bytes(block[:8], "big", signed=True)


def _essence(now: Statistics) -> tuple[int, ...]:
    """What a router decides by: a change is worth a record of its own."""
    return (now.running, now.queued_requests, now.queued_tokens, now.pages_used - now.pages_cached)


def _parts(blocks: Sequence[Stored]) -> Iterator[list[Stored]]:
    """`blocks` in at least one part; a part ends with the chain that fills it."""
    part: list[Stored] = []
    size = 0
    for chain in blocks:
        part.append(chain)
        size += len(chain.hashes)
        if size >= SNAPSHOT_BLOCKS:
            yield part
            part, size = [], 0
    if part or not blocks:
        yield part
