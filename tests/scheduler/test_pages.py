from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.pages import IntegrityError, PagePool, PageTables


def test_pages_are_taken_and_given_back() -> None:
    pool = PagePool(pages=5)
    pool.open(1)
    assert (pool.used, pool.unused) == (0, 5)
    assert pool.allocate(1, 2) == [1, 2]
    assert (pool.used, pool.unused, pool.peak) == (2, 3, 2)
    assert not pool.can_allocate(4)
    pool.open(2)
    assert pool.allocate(2, 1) == [3]
    pool.free(1)
    assert (pool.used, pool.unused, pool.peak) == (1, 4, 3)
    pool.integrity([2])
    pool.free(2)
    pool.integrity([])


def test_no_page_is_the_null_page() -> None:
    pool = PagePool(pages=5)
    pool.open(1)
    assert sorted(pool.allocate(1, 5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "act",
    [
        lambda pool: pool.open(1),
        lambda pool: pool.take(9),
        lambda pool: pool.allocate(1, 9),
        lambda pool: pool.allocate(7, 1),
        lambda pool: pool.integrity([1, 2]),
        lambda pool: pool.integrity([]),
    ],
    ids=["owner twice", "beyond the pool", "beyond it too", "stranger", "ghost", "leak"],
)
def test_what_must_not_happen_raises(act: Callable[[PagePool], object]) -> None:
    pool = PagePool(pages=10)
    pool.open(1)
    pool.allocate(1, 2)
    with pytest.raises(IntegrityError):
        act(pool)


def test_tables_are_padded_and_cleared() -> None:
    tables = PageTables(slots=3, width=4)
    a, b = tables.take_slot(), tables.take_slot()
    tables.extend(a, [5])
    tables.extend(b, [7, 8])
    tables.extend(b, [9])
    assert tables.gather([b, a]).tolist() == [[7, 8, 9], [5, 0, 0]]
    assert tables.gather([a]).dtype == np.int32
    tables.integrity([a, b])
    gathered = tables.gather([b])
    tables.give_back(b)
    assert gathered.tolist() == [[7, 8, 9]], "a plan keeps its own copy"
    assert (tables.free_slots, tables.take_slot()) == (2, b)
    assert tables.length(b) == 0
    with pytest.raises(IntegrityError):
        tables.integrity([a])


def test_a_page_is_free_when_nobody_holds_it() -> None:
    pool = PagePool(pages=10)
    pool.open(1)
    owned = np.array(pool.allocate(1, 3), dtype=np.int32)
    pool.hold(owned[:2])
    pool.hold(owned[:1])
    assert (pool.used, pool.cached) == (3, 0)
    pool.open(2, owned[:2].tolist())
    assert (pool.used, pool.unused) == (3, 7), "what is shared is held once"
    assert (pool.only_of([1]), pool.only_of([2]), pool.only_of([1, 2])) == (1, 0, 3)
    pool.free(1)
    assert (pool.used, pool.cached) == (2, 0)
    pool.drop(owned[:2])
    assert (pool.used, pool.cached) == (2, 0), "row 2 has them"
    pool.integrity([2], [owned[:1]])
    pool.free(2)
    assert (pool.used, pool.cached) == (1, 1)
    assert (pool.sole(owned[:1]), pool.idle(owned[:1]).tolist()) == (1, [owned[0]])
    pool.drop(owned[:1])
    assert pool.used == 0
    pool.integrity([])
    with pytest.raises(IntegrityError, match="no entry holds"):
        pool.drop(owned[:1])


@pytest.mark.parametrize("entries", [[], [[1], [1]], [[2]]], ids=["none", "twice", "another"])
def test_holders_that_do_not_add_up_are_seen(entries: list[list[int]]) -> None:
    pool = PagePool(pages=3)
    pool.open(1)
    pool.hold(np.array(pool.allocate(1, 1), dtype=np.int32))
    with pytest.raises(IntegrityError, match="entries"):
        pool.integrity([1], [np.array(pages, dtype=np.int32) for pages in entries])
