"""What tenants keep: shares of boundaries, sessions and pages. The promises of `scheduler.prefix`
and `scheduler.sessions` are watched (`kept_watch`) over random traces."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.keeping import Keeping
from scheduler.pages import PagePool
from scheduler.prefix import Entry, Yield, page_hashes, root
from scheduler.request import GenerationRequest
from scheduler.shares import Accounts
from tests.scheduler.bench import SMALL, TICK_S, fuzz, small_engine
from tests.scheduler.kept_watch import watch

PAGE = 4
FEW = settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
POLICIES = {"a": TenantPolicy(weight=1.0), "b": TenantPolicy(weight=3.0)}


# --- a cache alone --------------------------------------------------------------------------------


class Shelf:
    """A cache and its sessions, and entries of made-up tokens."""

    def __init__(
        self,
        policies: dict[str, TenantPolicy],
        *,
        boundaries: int = 8,
        pages: int = 200,
        **config: Any,
    ) -> None:
        self.pool = PagePool(pages=pages)
        options = SchedulerConfig(tenants=policies, **config)
        info = small_engine(boundaries=boundaries, pages=pages).info
        self.keeping = Keeping(info=info, config=options, pool=self.pool)
        self.cache, self.sessions = self.keeping.cache, self.keeping.sessions
        self.now = 0.0
        self.made = 0
        self.rows: dict[int, str] = {}

    def leave(
        self, tenant: str, session: str | None = None, *, tokens: int = 6, like: Entry | None = None
    ) -> Entry | None:
        """A row of the tenant's ends; None when its end is not kept."""
        self.made += 1
        ids = np.full(tokens, self.made, np.int32) if like is None else like.tokens
        pages = -(-len(ids) // PAGE)
        entry = like
        if like is None:
            if not self.cache.make_room(pages, most=Yield.SESSIONS):
                return None
            if not self.cache.make_boundary(Yield.SESSIONS if session else Yield.LOOSE, tenant):
                return None
            entry = self.cache.add(
                tokens=ids,
                hashes=page_hashes(ids, PAGE, root("")),
                pages=self.pool.take(pages),
                mtp=True,
                row=self.made,
                ready=True,
                tenant=tenant,
            )
        self.cache.planned()
        if session is not None and entry is not None:
            turn = self.made
            self.sessions.pin(session, entry, turn=turn, now=self.now, tenant=tenant)
        self.check()
        return entry

    def row(self, tenant: str, pages: int) -> bool:
        """A row of the tenant's starts on so many pages."""
        if not self.cache.make_room(pages, most=Yield.SESSIONS):
            return False
        self.made += 1
        self.pool.open(self.made)
        taken = np.array(self.pool.allocate(self.made, pages), np.int32)
        self.cache.shelves.hold(self.cache.shelves.accounts.keeper(tenant), taken)
        self.rows[self.made] = tenant
        self.cache.planned()
        self.check()
        return True

    def end_row(self, row: int) -> None:
        account = self.cache.shelves.accounts.keeper(self.rows.pop(row))
        self.cache.shelves.drop(account, np.array(self.pool.owned(row), np.int32))
        self.pool.free(row)

    def check(self) -> None:
        self.keeping.integrity(idle=False)
        held = [(tenant, self.pool.owned(row)) for row, tenant in self.rows.items()]
        self.cache.shelves.check_pages(self.cache, held)

    def kept(self) -> dict[str, int]:
        """Boundaries by tenant, of those that keep some."""
        found = self.keeping.snapshot()["boundaries_by_tenant"]
        return {name: count for name, count in found.items() if count}


def policies_of(weights: list[float]) -> dict[str, TenantPolicy]:
    return {f"t{n}": TenantPolicy(weight=weight) for n, weight in enumerate(weights)}


WEIGHTS = st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.0, 7.0]), min_size=2, max_size=5)


@settings(FEW, max_examples=40)
@given(
    seed=st.integers(0, 2**32), weights=WEIGHTS, boundaries=st.integers(1, 14), busy=st.booleans()
)
def test_promises_hold_whatever_happens(
    seed: int, weights: list[float], boundaries: int, busy: bool
) -> None:
    rng = random.Random(seed)
    names = [*policies_of(weights), "unnamed", ""]
    favourite = rng.choice(names)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        shelf = Shelf(
            policies_of(weights), boundaries=boundaries, pages=40, max_sessions=5, session_ttl_s=90
        )
        for _ in range(80):
            shelf.now += rng.random()
            shelf.sessions.expire(shelf.now)
            if rng.random() < 0.3:  # a plan that is being made uses most of them
                for entry in rng.sample(list(shelf.cache), len(shelf.cache) * 3 // 4):
                    shelf.cache.use(entry)
            tenant = favourite if busy and rng.random() < 0.7 else rng.choice(names)
            what, entries = rng.random(), list(shelf.cache)
            session = f"{tenant}/{rng.randrange(4)}" if rng.random() < 0.5 else None
            if what < 0.6:
                shelf.leave(tenant, session, tokens=rng.choice([2, 6, 9, 20]))
            elif what < 0.7 and entries:
                shelf.leave(tenant, f"{tenant}/{rng.randrange(4)}", like=rng.choice(entries))
            elif what < 0.8 and entries:
                shelf.cache.touch(rng.choice(entries))
            elif what < 0.85 and len(shelf.sessions):
                shelf.sessions.release(rng.choice(shelf.sessions.list()).session_id)
            elif what < 0.93:
                shelf.row(tenant, rng.randint(1, 12))
            elif shelf.rows:
                shelf.end_row(rng.choice(list(shelf.rows)))
            shelf.cache.planned()
            shelf.check()


@pytest.mark.parametrize("policies", [{}, POLICIES])
def test_idle_capacity_is_anybodys(policies: dict[str, TenantPolicy]) -> None:
    shelf = Shelf(policies)
    for number in range(8):
        assert shelf.leave("a", f"a/{number}")
    assert len(shelf.sessions) == 8


def test_a_flood_leaves_others_their_share() -> None:
    """Of eight boundaries a has a right to two, and b to six."""
    shelf = Shelf(POLICIES)
    for number in range(8):
        shelf.leave("a", f"a/{number}")
    for number in range(40):
        shelf.leave("b", f"b/{number}")
    assert shelf.kept() == {"a": 2, "b": 6}
    assert [s.session_id for s in shelf.sessions.list()][:2] == ["a/6", "a/7"], "LRU within it"
    for _ in range(40):
        shelf.leave("b")
    assert shelf.kept() == {"a": 2, "b": 6}, "no pin went for them"
    assert [s.session_id for s in shelf.sessions.list()][:2] == ["a/6", "a/7"]


def test_what_is_loose_goes_before_pins_of_the_same_tenant() -> None:
    shelf = Shelf(POLICIES, boundaries=3)
    shelf.leave("a", "a/pinned")
    shelf.leave("a")
    shelf.leave("a")
    shelf.leave("b")
    shelf.leave("b")
    assert [s.session_id for s in shelf.sessions.list()] == ["a/pinned"]
    assert shelf.kept() == {"a": 1, "b": 2}


def test_who_comes_late_gets_a_share_from_pins() -> None:
    """Even for what no session pins: a tenant is not shut out by another's sessions."""
    shelf = Shelf(POLICIES, boundaries=4)
    for number in range(4):
        shelf.leave("a", f"a/{number}")
    assert shelf.leave("b")
    assert shelf.kept() == {"a": 3, "b": 1}


def test_tenants_without_a_policy_are_one() -> None:
    shelf = Shelf(POLICIES)
    for number in range(4):
        shelf.leave("a", f"a/{number}")
    for number in range(100):
        shelf.leave(f"name{number}", f"name{number}/s")
    assert shelf.kept() == {"a": 4, "other": 4}
    assert len(shelf.cache.shelves._counts) == 2
    assert shelf.keeping.snapshot()["sessions_by_tenant"] == {"a": 4, "b": 0, "other": 4}


@pytest.mark.parametrize("policies", [{}, POLICIES])
def test_without_shares_the_least_recently_used_goes(policies: dict[str, TenantPolicy]) -> None:
    """With none to have any, or when all is to be shared."""
    shelf = Shelf(policies, share_kept=bool(policies), max_sessions=6)
    for number in range(4):
        shelf.leave("b", f"b/{number}")
    for number in range(8):
        shelf.leave("a", f"a/{number}")
    assert [s.session_id for s in shelf.sessions.list()] == [f"a/{n}" for n in range(2, 8)]
    assert sum(shelf.kept().values()) == 8
    assert not shelf.cache.shelves._counts, "and nothing is counted for it"


def test_an_entry_that_two_tenants_pin_goes_from_each_separately() -> None:
    shelf = Shelf({"a": TenantPolicy(), "b": TenantPolicy()}, boundaries=4)
    entry = shelf.leave("a", "a/s")
    shelf.leave("b", "b/s", like=entry)
    for number in range(3):
        shelf.leave("a", f"a/{number}")
    assert shelf.kept() == {"a": 4}
    shelf.leave("b", "b/more")
    assert entry is not None
    assert entry.held
    assert set(entry.sessions) == {"b/s"}, "a has more than its share, and gives its own pin"
    assert [s.session_id for s in shelf.sessions.list()] == ["b/s", "a/1", "a/2", "b/more"]


def test_what_nobody_has_used_for_long_is_nobodys() -> None:
    shelf = Shelf({"a": TenantPolicy(), "b": TenantPolicy()}, boundaries=4, session_ttl_s=60)
    shelf.sessions.expire(0.0)
    for number in range(2):
        shelf.leave("a", f"a/{number}")
    for _ in range(4):
        shelf.leave("b")
    assert shelf.kept() == {"a": 2, "b": 2}
    for now in range(1, 70):
        shelf.now = float(now)
        shelf.sessions.expire(shelf.now)
        if now == 65:
            shelf.leave("b")
    assert shelf.keeping.sessions.ended == {"ttl": 2}
    for _ in range(2):
        shelf.leave("b")
    assert shelf.kept() == {"b": 4}


def test_where_there_is_less_than_one_for_each_they_take_turns() -> None:
    names = [f"t{n}" for n in range(6)]
    shelf = Shelf({name: TenantPolicy() for name in names}, boundaries=2)
    for name in names:
        assert shelf.leave(name, f"{name}/s"), "who comes first does not stay for ever"
    assert shelf.kept() == {"t4": 1, "t5": 1}


def test_sessions_of_a_tenant_are_bounded_by_its_own_limit() -> None:
    policies = {"a": TenantPolicy(max_sessions=2), "b": TenantPolicy()}
    for shared in (False, True):
        shelf = Shelf(policies, share_kept=shared)
        shelf.leave("b", "b/s")
        for number in range(4):
            shelf.leave("a", f"a/{number}")
        assert [s.session_id for s in shelf.sessions.list()] == ["b/s", "a/2", "a/3"]
        assert shelf.sessions.ended == {"tenant_max_sessions": 2}
    with pytest.raises(ValueError, match="max_sessions must be >= 1"):
        TenantPolicy(max_sessions=0)


def test_a_session_that_finds_no_room_ends_none() -> None:
    policies = {"a": TenantPolicy(weight=10.0), "b": TenantPolicy(weight=0.1)}
    shelf = Shelf(policies, max_sessions=2)
    shelf.leave("a", "a/0")
    shelf.leave("a", "a/1")
    shelf.leave("b", "b/0")
    assert [s.session_id for s in shelf.sessions.list()] == ["a/0", "a/1"]
    assert not shelf.sessions.ended


def test_pages_come_from_who_holds_most_for_its_weight() -> None:
    """Rows count: b's fill the pool, so what b keeps goes first, although a keeps more."""
    shelf = Shelf({"a": TenantPolicy(), "b": TenantPolicy()}, boundaries=50, pages=40)
    for number in range(5):
        shelf.leave("a", f"a/{number}", tokens=12)
    for _ in range(3):
        shelf.leave("b", "b/s", tokens=12)
    assert shelf.row("b", 16)
    assert shelf.row("b", 8)
    assert shelf.kept() == {"a": 5}, "of forty pages a holds fifteen"
    assert shelf.row("b", 5), "and no kept entry stands in a row's way"
    assert shelf.kept() == {"a": 3}


@pytest.mark.parametrize("policies", [{}, POLICIES])
def test_an_eviction_looks_at_few(
    policies: dict[str, TenantPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands, most of them pinned, or sharing all of their pages."""
    shelf = Shelf(policies, boundaries=3000, pages=9000, max_sessions=4000)
    monkeypatch.setattr(shelf, "check", lambda: None)
    for number in range(1500):
        shelf.leave("a", f"a/{number}")
    for _ in range(1500):
        shelf.leave("b")
    looks = Counter[str]()
    standing, sole = Entry.standing, PagePool.sole

    def look(self: Entry) -> Yield:
        looks["standing"] += 1
        found: Yield = standing.__get__(self)
        return found

    def weigh(self: PagePool, pages: Any) -> int:
        looks["sole"] += 1
        return sole(self, pages)

    monkeypatch.setattr(Entry, "standing", property(look))
    monkeypatch.setattr(PagePool, "sole", weigh)
    for number in range(20):
        assert shelf.leave("b")
        assert shelf.leave("a", f"a/new{number}")
    assert shelf.row("b", 3100)
    evicted = sum(shelf.cache.evictions.values())
    assert evicted > 60
    assert looks["standing"] < 4 * evicted
    assert looks["sole"] <= evicted


def test_an_eviction_looks_past_few_that_share_their_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf({}, boundaries=3000, pages=700)
    pages = shelf.pool.take(600)
    tokens = np.arange(2_400, dtype=np.int32)
    hashes = page_hashes(tokens, PAGE)
    for count in range(1, 601):  # each is the beginning of the next
        shelf.cache.add(
            tokens=tokens[: PAGE * count],
            hashes=hashes,
            pages=pages,
            mtp=True,
            row=1,
            ready=True,
        )
    shelf.cache.planned()
    looks = 0
    sole = PagePool.sole

    def weigh(self: PagePool, pages: Any) -> int:
        nonlocal looks
        looks += 1
        return sole(self, pages)

    monkeypatch.setattr(PagePool, "sole", weigh)
    assert shelf.cache.make_room(110, most=Yield.SESSIONS)
    assert looks <= 65 * sum(shelf.cache.evictions.values())


# --- the whole ------------------------------------------------------------------------------------


@settings(FEW, max_examples=3)
@given(seed=st.integers(0, 2**32), weights=WEIGHTS, salted=st.booleans())
def test_promises_hold_in_the_core(seed: int, weights: list[float], salted: bool) -> None:
    """With rows, groups, preemptions; books balance after every move."""
    policies = policies_of(weights)

    def dress(request: GenerationRequest) -> GenerationRequest:
        rng = random.Random(request.group or request.request_id)
        tenant = rng.choice([*policies, "x", ""])
        session = request.session_id and f"{tenant}/{request.session_id}"
        salt = tenant if salted else ""
        return replace(request, tenant=tenant, session_id=session, cache_salt=salt)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        config = replace(SMALL, tenants=policies, session_ttl_s=200 * TICK_S)
        for pages in (60, 30):
            fuzz(seed=seed, requests=40, in_flight=2, config=config, dress=dress, pages=pages)


def test_the_watch_has_something_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    policies = policies_of([1.0, 2.0, 0.5])

    def dress(request: GenerationRequest) -> GenerationRequest:
        tenant = random.Random(request.group or request.request_id).choice([*policies, "x"])
        session = request.session_id and f"{tenant}/{request.session_id}"
        return replace(request, tenant=tenant, session_id=session)

    fuzz(
        seed=1,
        requests=150,
        in_flight=2,
        config=replace(SMALL, tenants=policies, session_ttl_s=1000.0, max_sessions=2),
        dress=dress,
        pages=50,
    )
    assert min(seen[name] for name in ("lost", "pages", "rightful pages", "sessions")) > 0


def test_accounts_are_as_many_as_policies_and_one() -> None:
    accounts = Accounts(POLICIES, TenantPolicy(weight=0.5))
    assert [a.name for a in accounts.all()] == ["a", "b", "other"]
    assert accounts.of("x") is accounts.of("") is accounts.of("y")
    assert accounts.of("x").policy.weight == 0.5
