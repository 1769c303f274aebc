"""Sessions as clients see them; keeping them is the scheduler's, which a fake stands in for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from selfdraft import SelfdraftError

from scheduler.request import GenerationRequest
from tests.service.harness import Running, running

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Kept:
    """What `Scheduler.sessions()` gives."""

    session_id: str
    tokens: int
    pages: int
    expires_at: float


class Keeper:
    """The scheduler's two calls about sessions."""

    def __init__(self, up: Running, *kept: Kept) -> None:
        self.kept = {session.session_id: session for session in kept}
        scheduler: Any = up.server.door.look().scheduler
        scheduler.sessions = lambda: tuple(self.kept.values())
        scheduler.release_session = lambda name: self.kept.pop(name, None) is not None


async def test_sessions_are_listed_and_released() -> None:
    async with running() as up:
        assert up.server.servicer is not None
        now = up.server.servicer._clock()
        keeper = Keeper(up, Kept("a", 120, 8, now + 60), Kept("b", 16, 1, now - 5))
        found = {session.session_id: session for session in await up.client.sessions()}
        assert set(found) == {"a", "b"}
        assert (found["a"].tokens, found["a"].pages) == (120, 8)
        assert 50 < found["a"].expires_in_seconds <= 60
        assert found["b"].expires_in_seconds == 0
        assert await up.client.release_session("a")
        assert not await up.client.release_session("a")
        assert set(keeper.kept) == {"b"}
        assert [session.session_id for session in await up.client.sessions()] == ["b"]


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 129])
async def test_a_session_id_is_checked(name: str) -> None:
    async with running() as up:
        with pytest.raises(SelfdraftError) as caught:
            await up.client.release_session(name)
        assert [v.field for v in caught.value.violations] == ["session_id"]
        with pytest.raises(SelfdraftError) as caught:
            await up.client.generate(text="x", session_id=name).text()
        assert [v.field for v in caught.value.violations] == ["session_id"]


async def test_what_a_request_says_of_reuse_reaches_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as up:
        scheduler = up.server.door.look().scheduler
        asked: list[GenerationRequest] = []
        submit = scheduler.submit_together

        def ask(requests: Sequence[GenerationRequest]) -> Any:
            asked.extend(requests)
            return submit(requests)

        monkeypatch.setattr(scheduler, "submit_together", ask)
        for options in ({}, {"session_id": "s" * 128}, {"reuse_prefix": False}):
            await up.client.generate(text="x", max_tokens=2, **options).text()
        assert [(r.session_id, r.reuse_prefix) for r in asked] == [
            (None, True),
            ("s" * 128, True),
            (None, False),
        ]
        await up.idle()
        lines = up.log_lines()
        assert [line.get("session_id") for line in lines] == [None, "s" * 128, None]
        assert [line.get("reuse_prefix") for line in lines] == [None, None, False]
