"""The log of kept blocks: a router that reads it knows what is kept, whatever it missed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from scheduler import kv_events, prefix
from scheduler.kv_events import KvEvent, KvEventLog, Removed, Stored, live_chains
from scheduler.pages import PagePool
from scheduler.prefix import PrefixCache, Yield, page_hashes, root
from tests.scheduler.bench import fuzz

PAGE = 4


class Reader:
    """What a router knows: block -> (parent, its tokens)."""

    def __init__(self) -> None:
        self.cursor = 0
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.restarts = 0

    def read(self, cache: PrefixCache) -> None:
        events: Sequence[KvEvent] | None = cache.events.since(self.cursor)
        if events is None:
            self.restarts += 1
            self.blocks.clear()
            events = cache.live_blocks()
        for event in events:
            self.apply(event)
        self.cursor = cache.events.newest

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, Removed):
            for gone in event.hashes:
                children = [key for key, (parent, _) in self.blocks.items() if parent == gone]
                assert not children, "a block went before its children"
                del self.blocks[gone]  # KeyError: it was never stored, or went before
            return
        parent = event.parent
        assert parent is None or parent in self.blocks, "a child came before its parent"
        assert len(event.tokens) == len(event.hashes) * PAGE
        for number, key in enumerate(event.hashes):
            assert key not in self.blocks, "stored twice"
            tokens = event.tokens[number * PAGE : (number + 1) * PAGE]
            self.blocks[key] = (parent, tuple(tokens.tolist()))
            parent = key


def truth(cache: PrefixCache) -> dict[bytes, tuple[bytes | None, tuple[int, ...]]]:
    """The same from the entries themselves."""
    blocks = {}
    for entry in cache:
        hashes = page_hashes(entry.tokens, PAGE, entry.hashes[:1])
        for n in range(1, len(hashes)):
            tokens = entry.tokens[(n - 1) * PAGE : n * PAGE]
            blocks[hashes[n]] = (hashes[n - 1] if n > 1 else None, tuple(tokens.tolist()))
    return blocks


def check_readers(seed: int = 7, steps: int = 400, **log: int) -> list[Reader]:
    """A reader of every event and one that looks now and then both end up with the truth."""
    rng = random.Random(seed)
    pool = PagePool(pages=400)
    cache = PrefixCache(boundaries=12, page_size=PAGE, pool=pool)
    cache.events = KvEventLog(**log)
    eager, lazy = Reader(), Reader()
    for step in range(steps):
        if rng.random() < 0.7:
            cache.make_boundary(Yield.LOOSE)
            # Few kinds of prompts, so that prefixes are shared, whole prompts included.
            tokens = np.array([rng.randrange(3)] * 9 + [rng.randrange(9)] * 7, np.int32)
            tokens = tokens[: rng.randrange(1, 17)]
            pages = pool.take(-(-len(tokens) // PAGE))
            cache.add(
                tokens=tokens,
                hashes=cache.hashes(tokens, root(rng.choice(["", "", "ada"]))),
                pages=pages,
                mtp=True,
                row=step,
                ready=True,
            )
            cache.planned()
        elif len(cache):
            cache.evict(rng.choice(list(cache)), "flush")
        eager.read(cache)
        assert eager.blocks == truth(cache)
        if rng.random() < 0.1:
            lazy.read(cache)
            assert lazy.blocks == truth(cache)
    return [eager, lazy]


def test_readers_know_what_is_kept() -> None:
    eager, lazy = check_readers()
    assert eager.restarts == lazy.restarts == 0
    assert eager.cursor > 100


@pytest.mark.parametrize("log", [{"max_events": 5}, {"max_tokens": 20}])
def test_who_falls_behind_starts_over(log: dict[str, int]) -> None:
    eager, lazy = check_readers(**log)
    assert eager.restarts == 0, "the newest event is always there"
    assert lazy.restarts > 5


def test_a_log_of_random_requests() -> None:
    """The core's own use of the cache: prompts, samples, sessions, faults, cancels."""
    core = fuzz(seed=5, requests=120, in_flight=2).core
    reader = Reader()
    reader.read(core.keeping.cache)
    assert reader.restarts == 0, "the log reaches back to its first event"
    assert reader.blocks == truth(core.keeping.cache)
    assert core.keeping.cache.events.newest > 50
    core.keeping.cache.clear("flush")
    reader.read(core.keeping.cache)
    assert not reader.blocks


def test_numbers_that_never_were_and_are_no_more() -> None:
    log = KvEventLog(max_events=2)
    assert (log.since(0), log.since(1), log.since(-1)) == ([], None, None)
    removed = [Removed(hashes=(bytes([n]),)) for n in range(3)]
    for event in removed:
        log.record(event)
    assert log.newest == 3
    assert log.since(0) is None
    assert log.since(1) == removed[1:]
    assert log.since(3) == []
    assert log.since(4) is None


def test_an_event_keeps_its_own_tokens_only() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    [stored] = live_chains([(page_hashes(tokens, PAGE), tokens)], PAGE)
    assert len(stored.hashes) == 250
    tail = kv_events.chain(page_hashes(tokens, PAGE), tokens, 249, PAGE)
    assert tail.tokens.base is None
    assert tail.tokens.tolist() == [996, 997, 998, 999]


# --- planted faults -------------------------------------------------------------------------------


def a_shared_block_is_removed_with_its_first_entry(patch: pytest.MonkeyPatch) -> None:
    def evict(self: PrefixCache, entry: prefix.Entry, cause: str) -> None:
        before = self.events.newest
        evict_well(self, entry, cause)
        if self.events.newest == before and len(entry.hashes) > 1:
            self.events.record(Removed(hashes=tuple(reversed(entry.hashes[1:]))))

    evict_well = PrefixCache.evict
    patch.setattr(PrefixCache, "evict", evict)


def a_kept_block_is_stored_again(patch: pytest.MonkeyPatch) -> None:
    def again(hashes: Any, tokens: Any, known: int, page: int) -> Stored:
        return chain_well(hashes, tokens, 0, page)

    chain_well = kv_events.chain
    patch.setattr(prefix, "chain", again)


def a_salt_is_a_block(patch: pytest.MonkeyPatch) -> None:
    def under_the_root(hashes: Any, tokens: Any, known: int, page: int) -> Stored:
        return replace(chain_well(hashes, tokens, known, page), parent=hashes[known] or None)

    chain_well = kv_events.chain
    patch.setattr(prefix, "chain", under_the_root)


def evictions_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "Removed", lambda hashes: Removed(hashes=()))


def a_reader_that_is_behind_is_not_told(patch: pytest.MonkeyPatch) -> None:
    def since(self: KvEventLog, number: int) -> list[KvEvent]:
        return since_well(self, max(number, self.newest - len(self._events))) or []

    since_well = KvEventLog.since
    patch.setattr(KvEventLog, "since", since)


def a_snapshot_repeats_what_entries_share(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(entries: Any, page: int) -> list[Stored]:
        return [kv_events.chain(h, t, 0, page) for h, t in entries if len(h) > 1]

    patch.setattr(prefix, "live_chains", all_of_them)


Patch = Callable[[pytest.MonkeyPatch], None]
BEHIND = partial(check_readers, max_events=5)
PLANTED: list[tuple[Patch, Callable[[], object]]] = [
    (a_shared_block_is_removed_with_its_first_entry, check_readers),
    (a_kept_block_is_stored_again, check_readers),
    (a_salt_is_a_block, check_readers),
    (evictions_are_not_told, check_readers),
    (a_reader_that_is_behind_is_not_told, BEHIND),
    (a_snapshot_repeats_what_entries_share, BEHIND),
]


@pytest.mark.parametrize(("patch", "check"), PLANTED, ids=[patch.__name__ for patch, _ in PLANTED])
def test_a_planted_fault_is_seen(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check()
