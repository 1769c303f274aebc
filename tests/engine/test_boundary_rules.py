"""Rows with a constraint and rows with penalties are kept and restored like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.cache import PagePool
from engine.cycle import DecodeCycle
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import PrefillChunk, RowSpec, SamplingParams
from engine.prefill import Prefill, PrefillRow
from tests.engine import slow
from tests.engine.host import Bits, Host, bits, sampled
from tests.engine.small import engine_over, small_model
from tests.engine.test_boundaries import alone, ends_not_remembered, new_host, text

END = 7
MOST = 7
"""Fewer than `PENDING_LIMIT`: cycles without drafts leave all their slots pending."""
HOT = SamplingParams(temperature=3.0, seed=11)
PENALTIES = replace(HOT, repetition_penalty=1.8, frequency_penalty=1.5, presence_penalty=0.5)


def guided(sampling: SamplingParams, modulus: int, length: int | None) -> RowSpec:
    """With a constraint of its own."""
    form = slow.Pattern(96, modulus, length, END)
    return RowSpec(sampling=sampling, max_tokens=MOST, stop_ids=(END,), constraint=form)


MAKERS: dict[str, Callable[[], RowSpec]] = {
    "penalties": lambda: RowSpec(sampling=PENALTIES, max_tokens=MOST),
    "coupled penalties": lambda: RowSpec(
        sampling=replace(PENALTIES, coupled=True), max_tokens=MOST
    ),
    "guided": lambda: guided(HOT, 3, None),
    "guided to its end": lambda: guided(replace(HOT, coupled=True), 2, 5),
    "guided with penalties": lambda: guided(PENALTIES, 5, None),
}


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def check(model: Qwen35Model, make: Callable[[], RowSpec], depth: int, wasted: int = 0) -> None:
    """A row saved in its prompt, kept half-way and kept at its end, and a row from each of the
    three, beside a free and a guided neighbour."""
    host = new_host(model)
    host.start(100, text(6, 55), sampled(90, 1234))
    host.start(101, text(5, 56), replace(guided(HOT, 4, None), max_tokens=90, stop_ids=()))
    starts = {1: text(13, 1)}
    host.start(1, starts[1], make(), saves={9: 1}, chunk=4)
    host.decode(1, 100, 101, depth=depth)
    host.keep(1, 2, release=False)
    while not host.results[1].ended:
        host.decode(1, 100, 101, depth=depth)
    for _ in range(wasted):
        host.decode(101, 1, 100, depth=depth, even_finished=True)
    found = {1: bits(host, 1)}
    host.keep(1, 3)
    for boundary in (1, 2, 3):
        row = boundary + 1
        starts[row] = host.points[boundary].tokens + text(3, 60 + row)
        host.start(row, starts[row], make(), restore=boundary, chunk=2)
    while any(not host.results[row].ended for row in (2, 3, 4)):
        host.decode(3, 100, 2, 101, 4, depth=depth)
    found |= {row: bits(host, row) for row in (2, 3, 4)}
    for row, prompt in starts.items():
        assert found[row].same(alone(model, prompt, make(), depth)), f"row {row}"


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_reuse_changes_no_bit(model: Qwen35Model, name: str, depth: int) -> None:
    check(model, MAKERS[name], depth, wasted=depth % 2)


def _prefix_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = Prefill._counted

    def without(self: Prefill, row: PrefillRow, chunk: PrefillChunk) -> Any:
        return count(self, row, replace(chunk, prefix=None))

    patch.setattr(Prefill, "_counted", without)


def _draft_history_left_out(patch: pytest.MonkeyPatch) -> None:
    """A wasted cycle might write it."""
    patch.setattr(DecodeCycle, "settled", lambda self, rows, table: rows)


@pytest.mark.parametrize(
    ("fault", "name", "depth", "wasted"),
    [
        (_prefix_not_counted, "penalties", 3, 0),
        (_prefix_not_counted, "guided with penalties", 3, 1),
        (ends_not_remembered, "guided", 3, 1),
        (_draft_history_left_out, "guided", 0, 0),
    ],
)
def test_planted_faults_are_seen(
    model: Qwen35Model,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    name: str,
    depth: int,
    wasted: int,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(model, MAKERS[name], depth, wasted=wasted)


def test_a_kept_row_is_forgotten_with_its_form(model: Qwen35Model) -> None:
    host: Host = new_host(model)
    host.start(1, text(5, 1), guided(HOT, 3, None))
    host.decode(1, depth=2)
    host.keep(1, 1)
    books = host.engine._books
    assert (books.forms, books.reached, books.ends, books.decoding()) == ({}, {}, {}, set())


class Mixed(Host):
    """Every step with a chunk also has a cycle of guided row 101."""

    def submit(self, **parts: Any) -> None:
        if "prefill" in parts and 101 in self.engine._books.guided:
            parts["guided"] = self._cohort([101], 3)
        super().submit(**parts)


@pytest.mark.parametrize("broken", [False, True])
def test_pages_are_copied_before_a_guided_cohort_of_the_same_step(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(PagePool, "copy", lambda self, source, target: [])
    host = Mixed(engine_over(model, boundaries=4, pages=60))
    form, prompt = replace(guided(HOT, 4, None), max_tokens=40, stop_ids=()), text(12, 1)
    host.start(1, prompt, sampled(9, 1), saves={11: 1})
    host.start(101, text(5, 56), form)
    host.start(2, [*prompt[:11], *text(9, 2)], sampled(9, 2), restore=1, chunk=2)
    assert len(host.results[101].tokens) > 5
    host.finish(1, 2, 101, depth=3)
    same = [bits(host, row).same(true) for row, true in _alone(model, host).items()]
    assert same == ([True, False, True] if broken else [True, True, True])


def _alone(model: Qwen35Model, host: Host) -> dict[int, Bits]:
    form = replace(guided(HOT, 4, None), max_tokens=40, stop_ids=())
    specs = {1: sampled(9, 1), 2: sampled(9, 2), 101: form}
    return {
        row: alone(model, host.tokens[row][: -len(host.results[row].tokens)], spec, 3)
        for row, spec in specs.items()
    }
