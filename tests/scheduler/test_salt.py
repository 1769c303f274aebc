"""Salts: requests of different ones share no prefix, in any of the ways that they otherwise do."""

from __future__ import annotations

import numpy as np

from engine.plan import SavedPrefix
from scheduler.prefix import ROOT, page_hashes, root
from scheduler.request import GenerationRequest
from tests.scheduler.bench import Bench, Stream, make_request
from tests.scheduler.test_sessions import bench


def cached(stream: Stream) -> int:
    assert stream.finished is not None
    return stream.finished.usage.cached_tokens


def run(b: Bench, request: GenerationRequest) -> int:
    stream = b.submit(request)
    b.run()
    return cached(stream)


def test_a_salt_is_in_every_hash_of_a_chain() -> None:
    tokens = np.arange(1, 13, dtype=np.int32)
    chains = [page_hashes(tokens, 4, root(salt)) for salt in ("", "a", "b")]
    assert chains[0][0] == ROOT
    assert chains[0] == page_hashes(tokens, 4)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not set(chains[one]) & set(chains[other])


def test_prompts_and_ends_are_found_under_their_own_salt_only() -> None:
    b = bench(boundaries=12)
    found = [
        run(b, make_request(f"{turn}{salt}", prompt=40, max_tokens=3, cache_salt=salt))
        for turn in range(2)
        for salt in ("a", "b", "")
    ]
    assert found == [0, 0, 0, 32, 32, 32]
    first = b.submit(make_request("x", prompt=21, max_tokens=10, cache_salt="a"))
    b.run()
    longer = [*range(1, 22), *first.tokens, 77]
    assert run(b, make_request("y", prompt=longer, cache_salt="b")) < 30
    assert run(b, make_request("z", prompt=longer, cache_salt="a")) == 30
    b.finish()


def test_where_a_prompt_is_cut_does_not_tell_either() -> None:
    """A prompt is also saved where another one branches off: not where another salt's does."""
    plans = []
    for salt in ("a", "b"):
        b = bench(boundaries=12)
        b.submit(make_request("x", prompt=[*range(1, 41), 5, 5], max_tokens=2, cache_salt="a"))
        b.run()
        before = len(b.engine.plans)
        b.submit(
            make_request("y", prompt=[*range(1, 25), *[9] * 40], max_tokens=2, cache_salt=salt)
        )
        b.run()
        saves = [c for p in b.engine.plans[before:] for c in p.prefill if c.save is not None]
        plans.append([c.start + len(c.tokens) for c in saves])
    assert 16 in plans[0]
    assert 16 not in plans[1]


def test_a_short_prefix_of_less_than_a_page_is_salted_too() -> None:
    b = bench(boundaries=12)
    first = b.submit(make_request("a", prompt=[3], max_tokens=2, cache_salt="a"))
    b.run()
    turn = [3, *first.tokens, 8]
    assert run(b, make_request("b", prompt=turn, max_tokens=2, cache_salt="b")) == 0
    assert run(b, make_request("c", prompt=turn, max_tokens=2, cache_salt="a")) > 0


def test_an_imported_prefix_has_the_salt_it_is_given() -> None:
    for salt, expected in (("a", 20), ("b", 0)):
        b = bench(boundaries=12)
        saved = SavedPrefix(tokens=tuple(range(1, 21)), mtp=True, metadata={})
        entry = b.core.begin_import(saved, "a")
        entry.ready = True
        prompt = np.arange(1, 31, dtype=np.int32)
        cache = b.core.keeping.cache
        match = cache.match(prompt, cache.hashes(prompt, root(salt)), mtp=True)
        assert (0 if match is None else match.position) == expected
