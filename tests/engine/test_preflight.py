"""No room, or an error while a row is built: that row ends, the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.budget import Costs
from engine.cache import PagePool
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import (
    DecodeBatch,
    EngineFailedError,
    PrefillChunk,
    RowSpec,
    SamplingParams,
    StepPlan,
    page_array,
)
from engine.prefill import Prefill
from engine.preflight import Estimator, Preflight, Room
from engine.rows import RowTable
from engine.runner import MLXEngine
from tests.engine import slow
from tests.engine.host import Bits, Host, bits, sampled
from tests.engine.small import engine_over, greedy, small_model

MIB = 1 << 20
COSTS = Costs(
    weight_bytes=0,
    page_bytes=0,
    gather_bytes=10,
    row_bytes=0,
    verify_row_bytes=1000,
    prefill_token_bytes=100,
    attention_token_bytes=100,
    score_bytes=1,
)
ESTIMATOR = Estimator(costs=COSTS, page_size=8)
DEPTH = 2


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


class Memory:
    """An allocator as the test wants it."""

    def __init__(self, used: int = 0, cached: int = 0) -> None:
        self.used, self.cached, self.cleared = used, cached, 0

    def in_use(self) -> int:
        return self.used + self.cached

    def clear(self) -> None:
        self.cached, self.cleared = 0, self.cleared + 1

    def preflight(self, limit: int = MIB) -> Preflight:
        return Preflight(estimator=ESTIMATOR, limit=limit, in_use=self.in_use, clear=self.clear)


def test_estimates() -> None:
    assert ESTIMATOR.chunk(5, 3) == 5 * (100 + 24) + 30
    held = Estimator(costs=replace(COSTS, prefill_row_bytes=7, logit_bytes=4), page_size=8)
    assert held.chunk(40, 3, rows=2) == 40 * (100 + 24) + 2 * (30 + 7)
    assert held.chunk(40, 3, logits=2, ruled=True) == 40 * (100 + 24) + 30 + 7 + 2 * 14 * 4
    assert ESTIMATOR.cohort(4, 12) == 4 * 1000 + 120


def test_estimates_of_rows_that_ask_for_more() -> None:
    """A vocabulary of 96: 384 bytes of logits per position, 480 of counts per row."""
    costly = Estimator(costs=replace(ESTIMATOR.costs, logit_bytes=4 * 96), page_size=8)
    room = Room(replace(Memory().preflight(), estimator=costly), lambda: None)
    plain = greedy(5)
    penalty = SamplingParams(presence_penalty=1.0)
    counted = replace(plain, sampling=penalty)
    biased = replace(plain, sampling=SamplingParams(logit_bias=((3, 1.0),)))
    late = replace(plain, min_tokens=2)

    def cohort(*specs: RowSpec) -> int:
        return room.cohort_bytes(specs, 3, depth=2, shape=None) - 60

    assert cohort(plain, plain) == 2 * 1000
    for ruled in (biased, late):
        assert cohort(plain, ruled) == 2 * (1000 + 3 * 6 * 384)
    assert cohort(plain, counted) == 2 * (1000 + 3 * 6 * 384 + 480)

    def chunk(last: bool, spec: RowSpec) -> int:
        whole = replace(_chunk(), tokens=np.zeros(200, np.int32), pages=page_array([1]), last=last)
        return room.chunk_bytes([whole], [spec], (1, 200, 1)) - 200 * (100 + 8) - 10

    assert chunk(False, plain) == 0
    assert chunk(True, plain) == 8 * 384
    assert chunk(False, replace(plain, prompt_logprobs=0)) == 128 * 8 * 384
    assert Room(None, lambda: None).chunk_bytes([_chunk()], [plain], (1, 8, 1)) == 0


def test_a_row_with_a_penalty_asks_for_its_counts(model: Qwen35Model) -> None:
    """Where two plain rows fit, a penalised one beside a plain one does not."""
    costs = replace(ESTIMATOR.costs, logit_bytes=4 * 96)
    for penalty, fits in ((0.0, True), (1.0, False)):
        memory = Memory()
        watch = replace(
            memory.preflight(), estimator=Estimator(costs=costs, page_size=ESTIMATOR.page_size)
        )
        host = Host(engine_over(model, boundaries=4, preflight=watch))
        host.start(1, PROMPT, sampled(16, 1))
        params = SamplingParams(temperature=3.0, seed=2, presence_penalty=penalty)
        host.start(2, [7, 8], RowSpec(sampling=params, max_tokens=16))
        host.decode(1, depth=DEPTH)
        memory.used = MIB - 4000
        host.decode(2, 1, depth=DEPTH)
        assert (host.results[2].fault is None) == fits
        assert host.results[1].fault is None


def test_room_is_looked_for_before_it_is_refused() -> None:
    memory = Memory(used=600, cached=300)
    ask = memory.preflight(1000).refusal
    waits: list[int] = []

    def wait() -> None:
        waits.append(1)
        memory.used = 200

    assert ask(100, wait) is None
    assert (memory.cleared, waits) == (0, [])
    assert ask(400, wait) is None
    assert (memory.cleared, waits) == (1, []), "clearing the cache was enough"
    assert ask(500, wait) is None
    assert len(waits) == 1, "the running step's transients had to go"
    said = ask(801, wait)
    assert said is not None
    assert "801 B beside 200 B in use, the limit is 1000 B" in said


def neighbour(host: Host) -> Bits:
    host.finish(1, depth=DEPTH)
    return bits(host, 1)


@pytest.fixture(scope="module")
def true(model: Qwen35Model) -> dict[int, Bits]:
    """Rows 1 and 4 when nothing ever goes wrong."""
    found = {}
    for row in (1, 4):
        host = Host(engine_over(model, boundaries=4))
        host.start(row, PROMPT, sampled(16, row))
        host.finish(row, depth=DEPTH)
        found[row] = bits(host, row)
    return found


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_a_chunk_without_room_faults_its_row_alone(
    model: Qwen35Model, true: dict[int, Bits]
) -> None:
    memory = Memory()
    host = Host(engine_over(model, boundaries=4, preflight=memory.preflight()))
    host.start(1, PROMPT, sampled(16, 1))
    host.decode(1, depth=DEPTH)
    memory.used = MIB - 500
    host.start(2, list(range(30)), sampled(5, 2))
    fault = host.results[2].fault
    assert fault is not None
    assert "the step needs 4.15 KiB beside 1023.51 KiB in use, the limit is 1.00 MiB" in fault
    assert host.results[2].tokens == []
    host.decode(1, 2, depth=DEPTH, even_finished=True)  # as a scheduler that did not know yet
    assert host.engine._books.free.rows() == {1}
    host.release(2)
    assert neighbour(host).same(true[1])
    memory.used = 0
    host.start(4, PROMPT, sampled(16, 4))
    host.finish(4, depth=DEPTH)
    assert bits(host, 4).same(true[4])


def test_a_row_without_room_in_the_cohort_is_faulted_when_it_joins(
    model: Qwen35Model, true: dict[int, Bits]
) -> None:
    memory = Memory()
    host = Host(engine_over(model, boundaries=4, preflight=memory.preflight()))
    host.start(1, PROMPT, sampled(16, 1))
    host.start(2, [7, 8], sampled(16, 2))
    host.decode(1, depth=DEPTH)
    memory.used = MIB - 1500  # one row's cycle fits, two rows' does not
    host.decode(2, 1, depth=DEPTH)
    assert host.results[2].fault is not None
    assert len(host.results[2].tokens) == 1
    assert neighbour(host).same(true[1])


@pytest.mark.parametrize("room", [True, False])
def test_a_guided_row_without_room_is_faulted_alone(
    model: Qwen35Model, true: dict[int, Bits], room: bool
) -> None:
    """Its cohort runs in the step of the free one, and is asked for on top of that."""
    memory = Memory()
    host = Host(engine_over(model, boundaries=4, preflight=memory.preflight()))
    form = slow.Pattern(96, 3, None, 7)
    host.start(1, PROMPT, sampled(16, 1))
    host.start(2, [7, 8], sampled(16, 2, constraint=form))
    host.decode(1, depth=DEPTH)
    memory.used = MIB - (3000 if room else 1500)
    host.decode(2, 1, depth=DEPTH)
    assert (host.results[2].fault is None) == room
    assert form.tokens == host.results[2].tokens
    host.decode(2, 1, depth=DEPTH, even_finished=True)
    if not room:
        assert len(form.tokens) == 1
        assert host.engine._books.decoding() == {1}
        assert not host.engine._books.forms
    assert neighbour(host).same(true[1])


def test_a_running_cohort_goes_on_without_room(model: Qwen35Model, true: dict[int, Bits]) -> None:
    memory = Memory()
    host = Host(engine_over(model, boundaries=4, preflight=memory.preflight()))
    host.start(1, PROMPT, sampled(16, 1))
    host.decode(1, depth=DEPTH)
    memory.used = 2 * MIB
    assert neighbour(host).same(true[1])


# --- errors while building -----------------------------------------------------------------------


def _fail_first(patch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("injected")

    patch.setattr(Prefill, "start", broken)


def _fail_half_way(patch: pytest.MonkeyPatch) -> None:
    """After the trunk has written keys into every pool."""

    def broken(*_: object) -> None:
        raise ValueError("injected")

    patch.setattr(Prefill, "_write_slots", broken)


def _fail_last(patch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("injected")

    patch.setattr(Prefill, "finish", broken)


FAULTS = [_fail_first, _fail_half_way, _fail_last]


def check_build_error(
    model: Qwen35Model, true: dict[int, Bits], fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Row 2's chunk breaks in the very step in which row 1 decodes; row 2 has row 1's pages as its
    own, so that any write it leaves behind shows."""
    host = Host(engine_over(model, boundaries=4))
    host.start(1, PROMPT, sampled(16, 1))
    host.decode(1, depth=DEPTH)
    chunk = PrefillChunk(
        row=2,
        tokens=np.arange(8, dtype=np.int32),
        start=0,
        pages=page_array(host.pages[1]),
        last=True,
        spec=sampled(5, 2),
        save=1,
    )
    table = page_array(host.pages[1])[None]
    batch = DecodeBatch(rows=(1,), pages=table, depth=DEPTH, limits=(DEPTH,))
    host.results[2], host.tokens[2] = type(host.results[1])(row=2), []
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        result = host.run(prefill=(chunk,), decode=batch)
    assert [row.row for row in result.rows] == [2, 1]
    assert host.results[2].fault == "building its step failed: ValueError: injected"
    assert host.engine._books.free.rows() == {1}
    host.run(release=(2,))
    assert neighbour(host).same(true[1])


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_building_a_chunk_faults_its_row_alone(
    model: Qwen35Model, true: dict[int, Bits], fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    check_build_error(model, true, fault)


def test_writes_that_are_not_taken_back_are_seen(
    model: Qwen35Model, true: dict[int, Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagePool, "restore", lambda self, handles: None)
    with pytest.raises(AssertionError):
        check_build_error(model, true, _fail_half_way)


def test_rows_that_wait_for_a_lost_prefix_fail_alone(
    model: Qwen35Model, true: dict[int, Bits]
) -> None:
    """Row 2 was to save boundary 1; row 3 restores it before anybody has read row 2's fault, and
    row 2's next chunk is planned too."""
    host = Host(engine_over(model, boundaries=4))
    host.start(1, PROMPT, sampled(16, 1))
    engine, pages = host.engine, [20, 21, 22]

    def chunk(row: int, **options: Any) -> PrefillChunk:
        values: dict[str, Any] = {"tokens": np.arange(8, dtype=np.int32), "start": 0, "last": True}
        return PrefillChunk(row=row, pages=page_array(pages), **(values | options))

    first = chunk(2, last=False, spec=sampled(5, 2), save=1)
    with pytest.MonkeyPatch.context() as patch:
        _fail_half_way(patch)
        engine.submit(StepPlan(step=90, prefill=(first,)))
    prefix = np.arange(8, dtype=np.int32)
    waiting = chunk(3, start=8, spec=sampled(5, 3), restore=1, prefix=prefix)
    engine.submit(StepPlan(step=91, prefill=(chunk(2, start=8), waiting)))
    (lost,) = engine.collect().rows
    gone, unlucky = engine.collect().rows
    assert (lost.row, gone.row, unlucky.row) == (2, 2, 3)
    assert "injected" in str(lost.fault)
    assert (gone.fault, gone.tokens) == (None, ())
    assert unlucky.fault == "the row that was to compute this row's prefix failed"
    engine.submit(StepPlan(step=92, release=(2, 3), drop=(1,)))
    engine.collect()
    assert not engine._boundaries.facts()
    assert neighbour(host).same(true[1])


def test_an_error_in_evaluation_ends_the_engine(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it comes up while room is made for somebody else."""
    memory = Memory()
    host = Host(engine_over(model, preflight=memory.preflight()))
    host.start(1, PROMPT, sampled(16, 1))
    table = page_array(host.pages[1])[None]
    batch = DecodeBatch(rows=(1,), pages=table, depth=DEPTH, limits=(DEPTH,))
    host.engine.submit(StepPlan(step=9, decode=batch))
    memory.used = 2 * MIB

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(mx, "eval", broken)
    chunk = PrefillChunk(
        row=2,
        tokens=np.arange(8, dtype=np.int32),
        start=0,
        pages=page_array([30]),
        last=True,
        spec=sampled(5, 2),
    )
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="device lost"):
            host.engine.submit(StepPlan(step=10, prefill=(chunk,)))


def test_decode_errors_end_the_engine(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(engine_over(model))
    host.start(1, PROMPT, sampled(16, 1))

    def broken(self: RowTable, arrays: object) -> None:
        raise RuntimeError("half-built")

    monkeypatch.setattr(RowTable, "update", broken)
    with pytest.raises(EngineFailedError, match="half-built"):
        host.decode(1, depth=0)
    assert isinstance(host.engine, MLXEngine)


# --- the gap -------------------------------------------------------------------------------------


def test_the_gap_is_the_devices_idle_time(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that ticks once per look at it."""
    from engine import runner

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            self.now += 1.0
            return self.now

    clock = Clock()
    monkeypatch.setattr(runner, "time", clock)
    engine = engine_over(model)
    host = Host(engine)
    host.start(1, PROMPT, sampled(4, 1))
    table = page_array(host.pages[1])[None]

    def submit(step: int, **parts: Any) -> None:
        engine.submit(StepPlan(step=step, **parts))

    batch = DecodeBatch(rows=(1,), pages=table, depth=0, limits=(0,))
    submit(10, decode=batch)
    submit(11, decode=batch)
    clock.now += 100
    first = engine.collect()
    assert first.gap_s is not None
    assert 1 <= first.gap_s < 10, "row 1 was there to go on with since its prefill"
    second = engine.collect()
    assert second.gap_s == 1, "handed over as soon as the first was done"
    clock.now += 1000
    submit(12, decode=batch)
    third = engine.collect()
    assert third.gap_s is not None
    assert 1000 < third.gap_s < 1010, "the host was slow"
    assert sum(len(r.tokens) for s in (first, second, third) for r in s.rows) == 3
    clock.now += 1000
    submit(13, release=(1,))
    assert engine.collect().gap_s is None
    host.engine.submit(StepPlan(step=14, prefill=(_chunk(),)))
    assert engine.collect().gap_s is None, "there was nothing to do"


def _chunk() -> PrefillChunk:
    return PrefillChunk(
        row=5,
        tokens=np.arange(8, dtype=np.int32),
        start=0,
        pages=page_array([30, 31]),
        last=True,
        spec=sampled(5, 2),
    )
