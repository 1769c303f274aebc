"""Prefix reuse, groups, guided rows: one promise at a time. `FakeEngine` reads what is in its
pages, and `Bench.finish` compares every stream with what its request would have got alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from engine.plan import RowResult, StepPlan, StepResult
from scheduler import prefix
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.pages import PagePool
from scheduler.prefix import PrefixCache, Yield, page_hashes
from scheduler.request import FinishReason, InvalidRequestError, Usage
from tests.scheduler.bench import SMALL, Bench, Multiples, Stream, fuzz, make_request
from tests.scheduler.fake_engine import FakeEngine


def bench(in_flight: int = 2, config: SchedulerConfig | None = None, **engine: int) -> Bench:
    made = FakeEngine(**{"boundaries": 16, "page_size": 4, **engine})  # type: ignore[arg-type]
    return Bench(
        engine=made, config=config or SchedulerConfig(prefill_chunk=16), in_flight=in_flight
    )


def usage(stream: Stream) -> Usage:
    assert stream.finished is not None
    return stream.finished.usage


def prefilled(plans: list[StepPlan]) -> list[tuple[int, int, int]]:
    """(row, start, length) of every chunk."""
    return [(c.row, c.start, len(c.tokens)) for plan in plans for c in plan.prefill]


# --- reuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_next_turn_prefills_only_what_is_new(in_flight: int) -> None:
    b = bench(in_flight)
    first = b.submit(make_request("a", prompt=21, max_tokens=10))
    b.run()
    history = [*range(1, 22), *first.tokens]
    second = b.submit(make_request("b", prompt=[*history, *range(50, 74)], max_tokens=10))
    b.run()
    assert usage(first).cached_tokens == 0
    assert usage(second).cached_tokens == 30, "all but the last token, which is in no cache"
    chunks = prefilled(b.engine.plans)[-3:]
    assert chunks == [(2, 30, 2), (2, 32, 16), (2, 48, 7)], "cut where it always is"
    statistics = b.core.statistics(b.now)
    assert (statistics.prefix_lookups, statistics.prefix_hits) == (2, 1)
    assert statistics.cached_tokens == 30
    assert statistics.prompt_tokens == 21 + 25
    assert statistics.pages_cached == statistics.pages_used > 0
    b.finish()


def test_the_same_prompt_again_starts_at_its_last_cut() -> None:
    b = bench()
    for name in "abc":
        b.submit(make_request(name, prompt=40, max_tokens=3, seed=ord(name)))
        b.run()
    assert [usage(s).cached_tokens for s in b.streams.values()] == [0, 32, 32]
    b.finish()


def test_the_last_prompt_token_is_always_prefilled() -> None:
    """A prompt of 32 tokens is cut at 16 and 32; the boundary at 32 would leave nothing to do."""
    b = bench()
    for name in "ab":
        b.submit(make_request(name, prompt=32, max_tokens=1))
        b.run()
    assert usage(b.streams["b"]).cached_tokens == 16
    b.finish()


def test_the_branch_point_is_kept_the_second_time() -> None:
    """Three prompts share 37 tokens of their 60; the second leaves a boundary at 32, where the
    third starts."""
    b = bench()
    for number in range(3):
        tail = [100 * (number + 1) + n for n in range(23)]
        b.submit(make_request(f"r{number}", prompt=[*range(1, 38), *tail], max_tokens=2))
        b.run()
    assert [usage(s).cached_tokens for s in b.streams.values()] == [0, 0, 32]
    saves = [(c.start + len(c.tokens)) for p in b.engine.plans for c in p.prefill if c.save]
    assert saves == [48, 32, 48, 48]
    b.finish()


def test_whole_pages_are_shared_and_a_partly_filled_one_is_copied() -> None:
    b = bench(in_flight=1)
    first = b.submit(make_request("a", prompt=9, max_tokens=2))
    b.run()
    used = b.core.statistics(b.now).pages_used
    assert used == 3, "ten tokens are kept"
    prompt = [*range(1, 10), *first.tokens, 50]
    b.submit(make_request("b", prompt=prompt, max_tokens=20))
    plan = b.plan()
    ((source, target),) = plan.copies
    (chunk,) = plan.prefill
    assert chunk.start == 10
    assert chunk.restore is not None
    kept = b.engine.cache.boundaries[chunk.restore].pages
    assert tuple(chunk.pages.tolist()[:2]) == kept[:2]
    assert source == kept[2]
    assert chunk.pages.tolist()[2] == target
    statistics = b.core.statistics(b.now)
    assert statistics.pages_used == used + 1, "what is shared is not taken again"
    b.finish()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_of_a_cancelled_request_are_kept_as_the_device_has_them(in_flight: int) -> None:
    b = bench(in_flight)
    stream = b.submit(make_request("a", max_tokens=100))
    while len(stream.tokens) < 12:
        b.step()
    b.plan()
    b.cancel("a")
    b.run()
    (entry,) = b.core.keeping.cache
    seen = [*range(1, 6), *stream.tokens]
    assert entry.position > len(seen) - 1, "what was in flight counts"
    assert entry.tokens[: len(seen)].tolist() == seen
    again = b.submit(make_request("b", prompt=[*entry.tokens.tolist(), 1], max_tokens=5))
    b.run()
    assert usage(again).cached_tokens == entry.position
    b.finish()


def test_a_request_may_stay_out_of_it() -> None:
    b = bench()
    b.submit(make_request("a", prompt=40, reuse_prefix=False))
    b.run()
    assert len(b.core.keeping.cache) == 0
    b.submit(make_request("b", prompt=40))
    b.run()
    b.submit(make_request("c", prompt=40, reuse_prefix=False))
    b.submit(make_request("d", prompt=40, prompt_logprobs=2, logprobs=1))
    b.submit(make_request("e", prompt=40))
    b.run()
    cached = [usage(s).cached_tokens for s in b.streams.values()]
    assert cached == [0, 0, 0, 0, 32]
    b.finish()


def test_off_is_off() -> None:
    for engine, config in (({"boundaries": 0}, {}), ({}, {"prefix_cache": False})):
        b = bench(config=SchedulerConfig(prefill_chunk=16, **config), **engine)  # type: ignore[arg-type]
        for name in "ab":
            b.submit(make_request(name, prompt=40, group="g", session_id="s"))
        b.finish()
        assert all(not (p.keep or p.drop or p.copies) for p in b.engine.plans)
        assert not any(c.save or c.restore for p in b.engine.plans for c in p.prefill)


def test_rows_that_draft_need_mtp_history() -> None:
    b = bench()
    for name, cap in (("plain", 0), ("drafts", 3), ("plain again", 0), ("drafts again", 3)):
        b.submit(make_request(name, prompt=40, max_tokens=3, depth_cap=cap))
        b.run()
    cached = {name: usage(s).cached_tokens for name, s in b.streams.items()}
    assert cached == {"plain": 0, "drafts": 0, "plain again": 32, "drafts again": 32}
    b.finish()


def test_equal_hashes_do_not_give_a_strangers_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that always collides, tokens still decide."""

    class Collision:
        def __init__(self, data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(prefix, "sha256", Collision)
    b = bench()
    b.submit(make_request("a", prompt=40))
    b.run()
    stranger = b.submit(make_request("b", prompt=[n + 500 for n in range(40)]))
    b.run()
    assert usage(stranger).cached_tokens == 0
    b.finish()


def test_a_fault_leaves_nothing() -> None:
    """Neither what the row left nor what it started from is used again."""
    prompt = (*range(1, 41), 77)
    b = Bench(
        engine=FakeEngine(boundaries=8, page_size=4, faults={prompt: 0}),
        config=SchedulerConfig(prefill_chunk=16),
    )
    b.submit(make_request("good", prompt=40, max_tokens=2))
    b.run()
    bad = b.submit(make_request("bad", prompt=prompt))
    b.run()
    assert usage(bad).cached_tokens > 0
    assert bad.finished is not None
    assert bad.finished.reason is FinishReason.FAULT
    assert b.core.statistics(b.now).evictions.get("fault") == 1
    assert not any(e.position == usage(bad).cached_tokens for e in b.core.keeping.cache)
    b.finish()


def test_a_boundary_that_failed_is_used_by_nobody() -> None:
    """The chunk that was to save it comes back with a fault."""
    info = FakeEngine(boundaries=4, page_size=4).info
    core = SchedulerCore(info=info, config=SchedulerConfig(prefill_chunk=16), max_in_flight=2)
    core.submit(make_request("a", prompt=40, group="g"), 0.0)
    core.submit(make_request("b", prompt=40, group="g"), 0.0)
    core.plan(0.0), core.plan(0.0)
    core.commit(StepResult(step=0), 0.0)
    core.commit(StepResult(step=1), 0.0)
    plan = core.plan(0.0)
    assert plan.prefill[0].save is not None
    core.commit(StepResult(step=2, rows=(RowResult(row=1, fault="no memory"),)), 0.0)
    plan = core.plan(0.0)
    assert plan.drop == (1,)
    assert [(c.row, c.start, c.restore) for c in plan.prefill] == [(2, 0, None)]
    core.integrity()


# --- memory ---------------------------------------------------------------------------------------


def test_prefixes_give_way_to_rows() -> None:
    b = bench(pages=20, context_length=80)
    for number in range(6):
        prompt = [number * 40 + n for n in range(40)]
        b.submit(make_request(f"r{number}", prompt=prompt, max_tokens=20))
    b.run()
    statistics = b.core.statistics(b.now)
    assert statistics.evictions["pages"] > 0
    assert statistics.pages_peak <= 20
    whole = b.submit(make_request("whole pool", prompt=40, max_tokens=40))
    b.run()
    assert whole.finished is not None
    b.finish()


def test_the_whole_pool_can_be_had_although_a_match_needs_one_page_more() -> None:
    """Sharing 74 of 76 tokens needs a copy of the 19th page beside the 19th page."""
    b = bench(pages=20, context_length=80)
    first = b.submit(make_request("a", prompt=66, max_tokens=9))
    b.run()
    prompt = [*range(1, 67), *first.tokens, 1]
    second = b.submit(make_request("b", prompt=prompt, max_tokens=4))
    b.run()
    assert second.finished is not None
    assert second.finished.reason is FinishReason.LENGTH
    assert usage(second).cached_tokens == 0, "the match itself had to go"
    b.finish()


def test_boundaries_are_evicted_by_last_use() -> None:
    b = bench(boundaries=2)
    prompts = {name: [ord(name)] * 12 for name in "abc"}

    def turn(name: str) -> int:
        stream = b.submit(make_request(f"{name}{b.now}", prompt=prompts[name], max_tokens=4))
        b.run()
        prompts[name] += [*stream.tokens, 1]
        return usage(stream).cached_tokens

    assert [turn(name) for name in "ab"] == [0, 0]
    assert turn("a") > 0
    assert turn("c") == 0
    assert turn("b") == 0, "it was the least recently used one"
    assert b.core.statistics(b.now).evictions["boundaries"] >= 2
    assert b.core.statistics(b.now).boundaries_used == 2
    b.finish()


def test_eviction_frees_only_what_nobody_else_holds() -> None:
    pool = PagePool(pages=10)
    cache = PrefixCache(boundaries=4, page_size=4, pool=pool)
    tokens = np.arange(16, dtype=np.int32)
    pool.open(1)
    pages = np.array(pool.allocate(1, 4), dtype=np.int32)
    hashes = page_hashes(tokens, 4)
    entries = [
        cache.add(tokens=tokens[:n], hashes=hashes, pages=pages, mtp=True, row=1, ready=True)
        for n in (8, 14)
    ]
    assert (pool.used, pool.cached) == (4, 0)
    pool.free(1)
    assert (pool.used, pool.cached) == (4, 4)
    cache.planned()
    assert cache.make_room(7, spare=entries[0], most=Yield.LOOSE)
    assert (pool.used, entries[1].held) == (2, False)
    assert not cache.make_room(9, spare=entries[0], most=Yield.LOOSE), "and evicts nothing for it"
    assert entries[0].held
    assert cache.make_room(9, spare=None, most=Yield.LOOSE)
    assert pool.used == 0
    pool.integrity([], [])


def test_common_prefix_is_exact() -> None:
    pool = PagePool(pages=30)
    cache = PrefixCache(boundaries=8, page_size=4, pool=pool)
    rng = np.random.default_rng(3)
    kept = []
    for row in range(6):
        tokens = rng.integers(0, 2, rng.integers(1, 18)).astype(np.int32)
        pages = pool.take(-(-len(tokens) // 4))
        kept.append(tokens)
        hashes = page_hashes(tokens, 4)
        cache.add(tokens=tokens, hashes=hashes, pages=pages, mtp=False, row=row, ready=True)
    for _ in range(300):
        prompt = rng.integers(0, 2, rng.integers(1, 20)).astype(np.int32)
        common = max(
            sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(k, prompt)))  # noqa: B905
            for k in kept
        )
        assert cache.common(prompt, page_hashes(prompt, 4)) == common
        fitting = [len(k) for k in kept if len(k) < len(prompt) and (k == prompt[: len(k)]).all()]
        entry = cache.match(prompt, page_hashes(prompt, 4), mtp=False)
        assert (entry.position if entry else 0) == max(fitting, default=0)
        assert cache.match(prompt, page_hashes(prompt, 4), mtp=True) is None


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_parallel_samples_prefill_once(in_flight: int) -> None:
    b = bench(in_flight, max_rows=4)
    for number in range(6):
        b.submit(make_request(f"r{number}", prompt=40, seed=number, group="g", max_tokens=8))
    other = b.submit(make_request("other", prompt=[9] * 5, max_tokens=3))
    b.run()
    cached = [usage(s).cached_tokens for s in b.streams.values()]
    assert cached == [0, 39, 39, 39, 39, 39, 0]
    assert usage(other).started_at is not None
    follower = usage(b.streams["r1"]).started_at
    assert (usage(other).started_at or 0) < (follower or 0), "it passed those who waited"
    assert b.core.statistics(b.now).prompt_tokens == 40 + 5 + 5
    b.finish()


def test_a_leader_that_leaves_is_followed_by_another() -> None:
    b = bench()
    for number in range(3):
        b.submit(make_request(f"r{number}", prompt=60, seed=number, group="g", max_tokens=8))
    b.plan()
    b.cancel("r0")
    b.run()
    assert [usage(b.streams[f"r{n}"]).cached_tokens for n in (1, 2)] == [0, 59]
    b.finish()


def test_a_group_has_one_prompt() -> None:
    b = bench()
    b.submit(make_request("a", prompt=5, group="g"))
    with pytest.raises(InvalidRequestError, match=r"group: .*same prompt"):
        b.submit(make_request("b", prompt=6, group="g"))
    b.finish()
    b.submit(make_request("c", prompt=6, group="g"))  # the name is free again
    b.finish()


def test_what_a_group_waits_for_is_not_evicted_while_rows_run() -> None:
    b = bench(pages=32, max_rows=2, context_length=100)
    b.submit(make_request("lead", prompt=40, group="g", max_tokens=4))
    b.submit(make_request("busy", prompt=[3] * 4, max_tokens=60))
    b.submit(make_request("big", prompt=[4] * 40, max_tokens=40))
    b.submit(make_request("follow", prompt=40, group="g", seed=1, max_tokens=4))
    b.finish()
    assert usage(b.streams["big"]).completion_tokens == 40
    assert usage(b.streams["follow"]).completion_tokens == 4


# --- guided rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_guided_rows_are_a_cohort_of_their_own(in_flight: int) -> None:
    """The free row is in every step; guided ones only when no step names them (`FakeEngine`
    checks)."""
    b = bench(in_flight)
    free = b.submit(make_request("free", max_tokens=60))
    guided = b.submit(make_request("even", max_tokens=20, constraint=Multiples(2, 1000)))
    other = b.submit(make_request("third", max_tokens=20, constraint=Multiples(3, 1000)))
    b.finish()
    assert not any(token % 2 for token in guided.tokens)
    assert not any(token % 3 for token in other.tokens)
    assert len(free.tokens) == 60
    statistics = b.core.statistics(b.now)
    assert statistics.guided_cycles > 0
    assert statistics.guided_row_cycles > statistics.guided_cycles
    assert statistics.cycles > statistics.guided_cycles


def test_guided_rows_alone_do_not_spin() -> None:
    b = bench()
    b.submit(make_request("a", max_tokens=30, constraint=Multiples(2, 1000)))
    turns = b.run()
    steps = b.core.statistics(b.now).steps
    assert turns <= 2 * steps + 1, "one to submit it, one to collect it"
    b.finish()


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_much_is_shared_and_nothing_is_lost(in_flight: int) -> None:
    """Every stream is what its request gets alone (`Bench.finish`), however tight memory is."""
    tight: list[dict[str, Any]] = [{"boundaries": 3}, {"pages": 24}, {"page_size": 16, "pages": 15}]
    for engine in ({}, *tight):
        statistics = fuzz(seed=6, requests=90, in_flight=in_flight, **engine).core.statistics(1e9)
        assert statistics.prefix_hits > 5
        assert statistics.guided_cycles > 5


def test_with_and_without_the_same_tokens() -> None:
    """Requests of which no token depends on timing: the streams are equal."""
    outcomes = []
    for on in (True, False):
        config = SchedulerConfig(prefill_chunk=16, prefix_cache=on)
        b = bench(config=config, max_rows=3, pages=60)
        for number in range(40):
            prompt = [number % 3] * 20 + [1, 2, 3] * (number % 5 + 1)
            b.submit(make_request(f"r{number}", prompt=prompt, seed=number, max_tokens=9))
        b.run()
        outcomes.append({name: stream.tokens for name, stream in b.streams.items()})
        assert (b.core.statistics(0).prefix_hits > 5) is on
    assert outcomes[0] == outcomes[1]
    assert SMALL.prefix_cache
