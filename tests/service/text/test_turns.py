"""Compiling grammars is shared fairly between tenants: turns, and what is kept."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from service.config import GrammarLimits
from service.text.constraint import CompiledGrammar, Vocabulary
from service.text.grammar import Form, Grammars
from service.text.turns import Turns
from tests.service.text.walks import TOKENIZERS

pytestmark = pytest.mark.anyio


class Log:
    """Who has begun, in order, and who may end."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.begun: list[str] = []
        self.running: Counter[str] = Counter()
        self.gates: dict[str, anyio.Event] = {}

    async def take(self, name: str) -> None:
        """A turn of the tenant that the name begins with, until its gate opens."""
        self.gates[name] = anyio.Event()
        async with self.turns.turn(name[0]):
            self.begun.append(name)
            self.running[name[0]] += 1
            await self.gates[name].wait()
            self.running[name[0]] -= 1


async def test_idle_turns_are_anybodys() -> None:
    log = Log(Turns(2, reserve=False))
    async with anyio.create_task_group() as tasks:
        for name in ("b1", "b2", "b3"):
            tasks.start_soon(log.take, name)
        await anyio.wait_all_tasks_blocked()
        assert log.begun == ["b1", "b2"]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("at_once", [2, 3])
async def test_a_flood_leaves_a_turn_for_others(at_once: int) -> None:
    log = Log(Turns(at_once, reserve=True))
    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(log.take, f"b{number}")
        await anyio.wait_all_tasks_blocked()
        assert log.running == {"b": at_once - 1}
        tasks.start_soon(log.take, "a1")
        await anyio.wait_all_tasks_blocked()
        assert log.running == {"b": at_once - 1, "a": 1}
        tasks.cancel_scope.cancel()


async def test_tenants_that_wait_take_turns() -> None:
    log = Log(Turns(1, reserve=True))
    names = ["b1", "b2", "b3", "b4", "a1", "a2", "c1"]
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(log.take, name)
            await anyio.wait_all_tasks_blocked()
        for count in range(len(names)):
            log.gates[log.begun[count]].set()
            await anyio.wait_all_tasks_blocked()
    assert log.begun == ["b1", "b2", "a1", "c1", "b3", "a2", "b4"]


async def test_who_has_turns_under_way_lets_others_pass() -> None:
    log = Log(Turns(2, reserve=False))
    async with anyio.create_task_group() as tasks:
        for name in ("b1", "b2", "b3", "a1"):
            tasks.start_soon(log.take, name)
            await anyio.wait_all_tasks_blocked()
        log.gates["b1"].set()
        await anyio.wait_all_tasks_blocked()
        assert log.begun == ["b1", "b2", "a1"]
        tasks.cancel_scope.cancel()


async def test_nothing_is_lost_when_calls_are_cancelled() -> None:
    """At any time, also just when a turn was given."""
    rng = random.Random(1)
    turns = Turns(3, reserve=True)
    running: Counter[str] = Counter()

    async def one(tenant: str) -> None:
        with anyio.move_on_after(rng.random() * 0.004):
            async with turns.turn(tenant):
                running[tenant] += 1
                assert running.total() <= 3
                assert running[tenant] <= 2
                try:
                    await anyio.sleep(rng.random() * 0.004)
                finally:
                    running[tenant] -= 1

    for _ in range(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(one, rng.choice("abc"))
    assert (turns._free, +turns._running, turns._waiting) == (3, {}, {})
    async with AsyncExitStack() as stack:
        with anyio.fail_after(1):
            for tenant in "aab":
                await stack.enter_async_context(turns.turn(tenant))


# --- what is kept ---------------------------------------------------------------------------------


def made_up(patch: pytest.MonkeyPatch, **limits: Any) -> Grammars:
    """Whose grammars cost nothing to compile."""

    async def compile_(self: Grammars, form: Form, text: str, words: Vocabulary) -> CompiledGrammar:
        return object.__new__(CompiledGrammar)

    patch.setattr(Grammars, "_compile", compile_)
    return Grammars(
        TOKENIZERS["tiny"], vocab_size=4096, limits=GrammarLimits(**limits), tenants=("a", "b")
    )


async def flooded(grammars: Grammars) -> dict[str, int]:
    """What tenants keep after b has sent many new grammars beside a's."""
    mine = [await grammars.compile("regex", f"a{number}", "a") for number in range(3)]
    for number in range(40):
        await grammars.compile("regex", f"b{number}", "b")
        await grammars.compile("regex", f"c{number}", f"client{number}")
    again = [await grammars.compile("regex", f"a{number}", "a") for number in range(3)]
    assert again == mine, "nothing of a's went"
    return {tenant: len(kept) for tenant, kept in grammars._cache.items()}


async def test_a_flood_evicts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten, a keeps its three: less than a third. Names without a policy are one tenant."""
    grammars = made_up(monkeypatch, cached=10)
    kept = await flooded(grammars)
    assert sum(kept.values()) == 10
    assert kept["a"] == 3
    assert sorted(kept) == ["", "a", "b"]
    assert max(kept.values()) <= 4


async def test_no_tenant_finds_what_another_left(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = made_up(monkeypatch)
    first = await grammars.compile("regex", "x", "a")
    assert await grammars.compile("regex", "x", "b") is not first
    assert await grammars.compile("regex", "x", "a") is first


def the_oldest_of_all_goes(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Grammars, tenant: str, key: bytes, grammar: CompiledGrammar) -> None:
        self._cache.setdefault(tenant, OrderedDict())[key] = grammar
        while sum(map(len, self._cache.values())) > self.limits.cached:
            giver = next(iter(self._cache))
            self._cache[giver].popitem(last=False)
            if not self._cache[giver]:
                del self._cache[giver]

    patch.setattr(Grammars, "_keep", keep)


def no_turn_is_reserved(patch: pytest.MonkeyPatch) -> None:
    make = Turns.__init__

    def init(self: Turns, at_once: int, *, reserve: bool) -> None:
        make(self, at_once, reserve=False)

    patch.setattr(Turns, "__init__", init)


def first_come_first_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.text.turns.min", lambda names, key: names[0], raising=False)


async def two_turns() -> None:
    await test_a_flood_leaves_a_turn_for_others(2)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (no_turn_is_reserved, two_turns),
        (first_come_first_served, test_who_has_turns_under_way_lets_others_pass),
    ],
)
async def test_planted_faults_in_turns_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        await check()
    assert caught.group_contains(AssertionError) or isinstance(caught.value, AssertionError)


async def test_a_planted_fault_in_what_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    the_oldest_of_all_goes(monkeypatch)
    with pytest.raises(AssertionError):
        await flooded(made_up(monkeypatch, cached=10))
