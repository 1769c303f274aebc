"""Sessions: what is pinned, for how long, and what makes it yield."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from engine.plan import ForeignFileError
from scheduler import (
    FinishReason,
    InvalidRequestError,
    NoRoomError,
    NotRunningError,
    Scheduler,
    SchedulerConfig,
    Tokens,
    UnknownSessionError,
)
from scheduler.config import LoopKind
from scheduler.request import GenerationRequest, Usage
from tests.scheduler.bench import Bench, make_request, tokens_alone
from tests.scheduler.fake_engine import FakeEngine

LOOPS: list[LoopKind] = ["plain", "pipelined"]


def bench(*, boundaries: int = 4, pages: int = 200, **config: float) -> Bench:
    return Bench(
        engine=FakeEngine(boundaries=boundaries, page_size=4, pages=pages, context_length=120),
        config=SchedulerConfig(prefill_chunk=16, **config),  # type: ignore[arg-type]
    )


def turn(b: Bench, session: str | None, prompt: list[int]) -> tuple[list[int], Usage]:
    """Run one request; the history after it, one token more, and its usage."""
    request = make_request(f"r{len(b.streams)}", prompt=prompt, max_tokens=5, session_id=session)
    stream = b.submit(request)
    b.run()
    assert stream.finished is not None
    return [*prompt, *stream.tokens, 1], stream.finished.usage


def test_a_turn_replaces_what_the_one_before_left() -> None:
    b = bench()
    history, _ = turn(b, "s", [5] * 10)
    assert [(s.session_id, s.tokens) for s in b.core.sessions(b.now)] == [("s", 14)]
    history, usage = turn(b, "s", history)
    assert usage.cached_tokens == 14
    (info,) = b.core.sessions(b.now)
    assert (info.tokens, info.pages) == (20, 5)
    assert info.expires_at == pytest.approx(b.now + 600, abs=1)
    b.finish()


def test_a_pin_outlives_ordinary_eviction() -> None:
    b = bench(boundaries=2)
    history, _ = turn(b, "s", [5] * 10)
    for number in range(5):
        turn(b, None, [20 + number] * 10)
    assert turn(b, "s", history)[1].cached_tokens == 14
    b.finish()


def test_a_release_is_no_eviction() -> None:
    b = bench(boundaries=2)
    history, _ = turn(b, "s", [5] * 10)
    assert b.core.release_session("s")
    assert not b.core.release_session("s")
    assert b.core.sessions(b.now) == []
    history, usage = turn(b, None, history)
    assert usage.cached_tokens == 14
    for number in range(5):
        turn(b, None, [20 + number] * 10)
    assert turn(b, None, history)[1].cached_tokens == 0
    b.finish()


def test_a_session_ends_a_while_after_its_last_use() -> None:
    b = bench(session_ttl_s=5.0)
    history, _ = turn(b, "s", [5] * 10)
    b.now += 4.0
    history, _ = turn(b, "s", history)
    b.now += 4.9
    assert len(b.core.sessions(b.now)) == 1
    b.now += 0.2
    assert b.core.sessions(b.now) == []
    assert b.core.statistics(b.now).sessions_ended == {"ttl": 1}
    assert turn(b, None, history)[1].cached_tokens > 0, "its prefix is still there"
    b.finish()


def test_sessions_are_bounded() -> None:
    b = bench(boundaries=8, max_sessions=2)
    for name in "abc":
        turn(b, name, [ord(name)] * 10)
    assert [s.session_id for s in b.core.sessions(b.now)] == ["b", "c"]
    assert b.core.statistics(b.now).sessions_ended == {"max_sessions": 1}
    b.finish()


def test_pins_yield_to_a_request_that_could_not_start_otherwise() -> None:
    b = bench(boundaries=8, pages=30)
    for name in "abc":
        turn(b, name, [ord(name)] * 30)  # 9 pages each
    big = b.submit(make_request("big", prompt=60, max_tokens=20))
    b.run()
    assert big.finished is not None
    ended = b.core.statistics(b.now)
    assert ended.sessions_ended == {"pages": 2}
    assert [s.session_id for s in b.core.sessions(b.now)] == ["c"], "the oldest went first"
    b.finish()


def test_another_sessions_end_takes_the_place_of_the_oldest() -> None:
    b = bench(boundaries=2)
    for name in "abc":
        turn(b, name, [ord(name)] * 10)
    assert [s.session_id for s in b.core.sessions(b.now)] == ["b", "c"]
    turn(b, None, [1] * 10)
    assert [s.session_id for s in b.core.sessions(b.now)] == ["b", "c"], "for a pin only"
    b.finish()


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_live_turns_the_last_to_end_wins(first: str) -> None:
    b = bench(boundaries=8)
    a = b.submit(make_request("a", prompt=[7] * 8, max_tokens=90, session_id="s"))
    c = b.submit(make_request("b", prompt=[8] * 8, max_tokens=90, session_id="s"))
    while min(len(a.tokens), len(c.tokens)) < 5:
        b.step()
    last = "b" if first == "a" else "a"
    b.cancel(first)
    b.cancel(last)
    b.run()
    assert b.core.keeping.sessions.entry("s").tokens[0] == (7 if last == "a" else 8)
    b.finish()


def test_what_is_not_worth_keeping() -> None:
    b = bench()
    b.submit(make_request("early", prompt=40, session_id="s"))
    b.plan()
    b.cancel("early")
    b.run()
    assert b.core.sessions(b.now) == [], "its prompt was not complete"
    stream = b.submit(make_request("late", prompt=20, max_tokens=50, session_id="s"))
    while not stream.tokens:
        b.step()
    b.cancel("late", FinishReason.SHUTDOWN)
    b.run()
    assert b.core.sessions(b.now) == []
    with pytest.raises(InvalidRequestError, match="session_id"):
        b.submit(make_request("x", session_id="s", reuse_prefix=False))
    b.finish()


# --- files ----------------------------------------------------------------------------------------


async def drink(s: Scheduler, request: GenerationRequest) -> tuple[list[int], Usage]:
    tokens: list[int] = []
    async with s.submit(request) as handle:
        async for event in handle:
            if isinstance(event, Tokens):
                tokens += event.ids
    assert handle.finished is not None
    return tokens, handle.finished.usage


def scheduler(loop: LoopKind, **engine: int) -> Scheduler:
    made = {"boundaries": 4, "page_size": 4, **engine}
    return Scheduler(
        engine_factory=lambda: FakeEngine(**made),  # type: ignore[arg-type]
        config=SchedulerConfig(loop=loop, prefill_chunk=16),
    )


@pytest.mark.anyio
@pytest.mark.parametrize("loop", LOOPS)
async def test_a_session_goes_to_a_file_and_comes_back(loop: LoopKind, tmp_path: Path) -> None:
    """While others stream; nobody's tokens change."""
    path = tmp_path / "session"
    async with scheduler(loop) as s, anyio.create_task_group() as tasks:
        busy = make_request("busy", max_tokens=400, prompt=[3] * 9)
        seen: list[list[int]] = []

        async def stream() -> None:
            seen.append((await drink(s, busy))[0])

        tasks.start_soon(stream)
        first, _ = await drink(s, make_request("a", prompt=30, max_tokens=9, session_id="s"))
        with anyio.fail_after(5):
            while not s.sessions():
                await anyio.sleep(0.001)
        info = await s.export_session("s", path)
        assert (info.session_id, info.tokens) == ("s", 38)
    assert seen == [tokens_alone(busy, 1000)]
    async with scheduler(loop) as s:
        with pytest.raises(UnknownSessionError, match="'s'"):
            await s.export_session("s", path)
        info = await s.import_session(path)
        assert (info.session_id, info.tokens, info.pages) == ("s", 38, 10)
        assert (await s.import_session(path, "other")).session_id == "other"
        assert [i.session_id for i in s.sessions()] == ["s", "other"]
        assert s.statistics().entries == 1, "the same tokens are kept once"
        request = make_request("b", prompt=[*range(1, 31), *first, 4], max_tokens=20)
        tokens, usage = await drink(s, request)
        assert usage.cached_tokens == 38
        assert tokens == tokens_alone(request, 1000)
        assert s.release_session("s")


@pytest.mark.anyio
async def test_what_cannot_be_imported(tmp_path: Path) -> None:
    path, foreign = tmp_path / "session", tmp_path / "foreign"
    foreign.write_text("{}", encoding="utf-8")
    async with scheduler("pipelined") as s:
        await drink(s, make_request("a", prompt=30, max_tokens=9, session_id="s"))
        await s.export_session("s", path)
        with pytest.raises(ForeignFileError):
            await s.import_session(foreign)
        with pytest.raises(FileNotFoundError):
            await s.import_session(tmp_path / "absent")
        assert s.failure is None
    with pytest.raises(NotRunningError):
        await s.import_session(path)
    async with scheduler("pipelined", boundaries=0) as s:
        with pytest.raises(NoRoomError, match="0 boundaries"):
            await s.import_session(path)
    async with scheduler("pipelined", pages=9) as s:
        with pytest.raises(NoRoomError, match=r"10 pages are needed; .* 9 of 9"):
            await s.import_session(path)
        assert s.statistics().pages_used == 0
        assert (await drink(s, make_request("b", prompt=5)))[0]


@pytest.mark.anyio
@pytest.mark.parametrize("loop", LOOPS)
async def test_an_import_makes_room(loop: LoopKind, tmp_path: Path) -> None:
    """One boundary, taken: it is dropped in a step before the import."""
    path = tmp_path / "session"
    async with scheduler(loop, boundaries=1, pages=20) as s:
        await drink(s, make_request("a", prompt=30, max_tokens=9, session_id="s"))
        await s.export_session("s", path)
        await drink(s, make_request("b", prompt=[2] * 30, max_tokens=9, session_id="t"))
        info = await s.import_session(path)
        assert [i.session_id for i in s.sessions()] == [info.session_id] == ["s"]
        assert s.statistics().evictions
        assert s.failure is None
