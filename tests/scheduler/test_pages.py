from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.pages import IntegrityError, PagePool, PageTables


def test_pages_come_out_of_the_reservation() -> None:
    pool = PagePool(pages=10)
    pool.reserve(1, 6)
    assert (pool.used, pool.reserved) == (0, 6)
    assert pool.allocate(1, 2) == [1, 2]
    assert (pool.used, pool.reserved, pool.peak) == (2, 6, 2)
    assert not pool.can_reserve(5)
    pool.reserve(2, 4)
    assert pool.allocate(2, 1) == [3]
    pool.free(1)
    assert (pool.used, pool.reserved, pool.peak) == (1, 4, 3)
    pool.integrity([2])
    pool.free(2)
    pool.integrity([])


def test_no_page_is_the_null_page() -> None:
    pool = PagePool(pages=5)
    pool.reserve(1, 5)
    assert sorted(pool.allocate(1, 5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "act",
    [
        lambda pool: pool.reserve(1, 1),
        lambda pool: pool.reserve(2, 9),
        lambda pool: pool.allocate(1, 3),
        lambda pool: pool.allocate(7, 1),
        lambda pool: pool.integrity([1, 2]),
        lambda pool: pool.integrity([]),
    ],
    ids=["owner twice", "beyond the pool", "beyond the promise", "stranger", "ghost", "leak"],
)
def test_what_must_not_happen_raises(act: Callable[[PagePool], object]) -> None:
    pool = PagePool(pages=10)
    pool.reserve(1, 2)
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
