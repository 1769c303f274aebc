"""Faults planted in the running scheduler, each with the test that sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from scheduler import RequestHandle, Scheduler
from scheduler.thread import OwnerThread
from tests.scheduler import test_loop, test_loop_ends
from tests.scheduler.mutations import Patch, Planted, cases, check_seen_by


def the_loop_polls(patch: pytest.MonkeyPatch) -> None:
    async def sleep(self: Scheduler) -> None:
        await anyio.sleep(0.01)

    patch.setattr(Scheduler, "_sleep", sleep)


def a_reader_that_leaves_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestHandle, "cancel", lambda self: False)


def the_engine_moves_between_threads(patch: pytest.MonkeyPatch) -> None:
    async def call(self: Any, function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args)

    patch.setattr(OwnerThread, "call", call)


def a_dead_engine_is_only_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_fail", lambda self, error: self.failed.set())


def drain_cuts_off(patch: pytest.MonkeyPatch) -> None:
    async def drain(self: Scheduler, timeout: float) -> None:
        self._core.close("the server is draining")
        self._shut_down()

    patch.setattr(Scheduler, "drain", drain)


def run_async(test: Callable[..., Any], *args: Any) -> Callable[[], object]:
    return partial(anyio.run, test, *args)


PLANTED: Planted = [
    (the_loop_polls, run_async(test_loop.check_idle, "plain")),
    (
        a_reader_that_leaves_is_not_noticed,
        run_async(test_loop.test_a_reader_that_is_cancelled_cancels_its_request),
    ),
    (the_engine_moves_between_threads, run_async(test_loop.test_the_engine_lives_on_one_thread)),
    (
        a_dead_engine_is_only_noted,
        run_async(test_loop_ends.test_a_dead_engine_ends_every_stream, "plain"),
    ),
    (drain_cuts_off, run_async(test_loop_ends.test_drain_finishes_what_runs, "plain")),
]


@pytest.mark.parametrize(("patch", "check"), cases(PLANTED))
def test_its_own_test_sees(
    patch: Patch, check: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seen_by(check, patch, monkeypatch)
