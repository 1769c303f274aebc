"""Planted faults, and how it is shown that something sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.plan import EngineFailedError
from scheduler.pages import IntegrityError
from tests.scheduler.bench import TINY, fuzz
from tests.scheduler.fake_engine import PlanError

Patch = Callable[[pytest.MonkeyPatch], None]
"""Replaces one function."""

Planted = Sequence[tuple[Patch, Callable[[], object]]]
"""Faults, each with the test that sees it."""


class Mutations(dict[str, Patch]):
    """Faults by name, for random requests to meet."""

    def plant(self, patch: Patch) -> Patch:
        """A decorator."""
        self[patch.__name__] = patch
        return patch


def cases(planted: Planted) -> list[Any]:
    """Parameters of a test, one per fault."""
    return [pytest.param(patch, check, id=patch.__name__) for patch, check in planted]


def check_seen_at_random(
    patch: Patch, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some check of `Bench`, `FakeEngine` or the books sees it."""
    patch(monkeypatch)
    with pytest.raises((IntegrityError, PlanError, EngineFailedError, AssertionError)):
        run()


def check_seen_by(
    check: Callable[[], object], patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test sees it."""
    patch(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, IntegrityError)):
        check()


def fuzz_wide() -> None:
    """Random requests with room for them."""
    fuzz(seed=11, requests=300, in_flight=2)


def fuzz_tiny_pools() -> None:
    """Random requests that displace each other."""
    for seed in (11, 12):
        fuzz(
            seed=seed,
            requests=200,
            in_flight=2,
            config=TINY,
            priorities=True,
            pages=24,
            boundaries=6,
        )
