"""Routing: who goes where, and what stays where it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from scheduler.simulation.routing import LeastLoaded, PrefixAware, RoundRobin, SessionHash
from scheduler.simulation.work import Work


@dataclass
class At:
    load: int = 0


def work(session: str | None = None, prompt: tuple[int, ...] = (1,)) -> Work:
    return Work(
        serial=1, arrived_at=0.0, prompt=prompt, output_tokens=1, max_tokens=1, session=session
    )


def machines(count: int) -> dict[int, At]:
    return {index: At() for index in range(count)}


def test_round_robin_takes_turns_and_skips_who_is_down() -> None:
    router, fleet = RoundRobin(), machines(3)
    assert [router.choose(work(), fleet) for _ in range(5)] == [0, 1, 2, 0, 1]
    del fleet[2]
    assert [router.choose(work(), fleet) for _ in range(3)] == [0, 1, 0]


def test_least_loaded() -> None:
    fleet = {0: At(3), 1: At(1), 2: At(1)}
    assert LeastLoaded().choose(work(), fleet) == 1


def test_sessions_stay_and_spread() -> None:
    router, fleet = SessionHash(8), machines(8)
    homes = {n: router.choose(work(f"s{n}"), fleet) for n in range(4000)}
    again = SessionHash(8)
    assert homes == {n: again.choose(work(f"s{n}"), fleet) for n in range(4000)}
    sizes = Counter(homes.values())
    assert len(sizes) == 8
    assert max(sizes.values()) < 1.4 * 500


@pytest.mark.parametrize("gone", [0, 3, 7])
def test_only_sessions_of_a_machine_that_leaves_move(gone: int) -> None:
    router, fleet = SessionHash(8), machines(8)
    before = {n: router.choose(work(f"s{n}"), fleet) for n in range(2000)}
    del fleet[gone]
    after = {n: router.choose(work(f"s{n}"), fleet) for n in range(2000)}
    moved = {n for n in before if before[n] != after[n]}
    assert moved == {n for n, home in before.items() if home == gone}
    assert len(Counter(after[n] for n in moved)) == 7, "all others take a share"


def test_one_machine_more_takes_only_its_share() -> None:
    seven, eight = SessionHash(7), SessionHash(8)
    before = {n: seven.choose(work(f"s{n}"), machines(7)) for n in range(500)}
    after = {n: eight.choose(work(f"s{n}"), machines(8)) for n in range(500)}
    moved = [n for n in before if before[n] != after[n]]
    assert all(after[n] == 7 for n in moved)
    assert 0 < len(moved) < 150


def test_without_a_session_the_least_loaded_is_taken() -> None:
    assert SessionHash(2).choose(work(), {0: At(2), 1: At(0)}) == 1


def test_a_known_prefix_is_followed() -> None:
    router, fleet = PrefixAware(4, block=16), machines(4)
    text = tuple(range(200))
    first = router.choose(work(prompt=text), fleet)
    fleet[first].load = 5  # not enough to leave what is kept there
    assert router.choose(work(prompt=text + (7,) * 100), fleet) == first
    assert router.choose(work(prompt=tuple(range(500, 700))), fleet) != first


def test_a_short_match_is_not_followed() -> None:
    router, fleet = PrefixAware(2, block=16, share=0.3), machines(2)
    first = router.choose(work(prompt=tuple(range(64))), fleet)
    fleet[first].load = 1
    assert router.choose(work(prompt=tuple(range(64)) + (9,) * 400), fleet) != first


def test_an_overloaded_machine_is_left() -> None:
    router, fleet = PrefixAware(2, block=16, absolute=10, relative=1.5), machines(2)
    text = tuple(range(100))
    first = router.choose(work(prompt=text), fleet)
    fleet[first].load, fleet[1 - first].load = 40, 20
    assert router.choose(work(prompt=text), fleet) == 1 - first


def test_what_was_sent_long_ago_is_forgotten() -> None:
    router, fleet = PrefixAware(2, block=16, blocks=20), machines(2)
    text = tuple(range(160))
    first = router.choose(work(prompt=text), fleet)
    fleet[1 - first].load = 1
    for n in range(1, 5):
        router.choose(work(prompt=tuple(range(1000 * n, 1000 * n + 160))), fleet)
    fleet[first].load, fleet[1 - first].load = 1, 0
    assert router.choose(work(prompt=text), fleet) == 1 - first
