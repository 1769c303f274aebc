"""One shape for every cycle: a row's bits depend on neither neighbours nor depth, on any BLAS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import runner
from engine.models.qwen3_5 import Qwen35Model
from engine.padding import padded_rows
from engine.plan import RowSpec, SamplingParams
from engine.runner import MLXEngine
from engine.sampling import Shaper
from tests import checkout
from tests.engine import slow
from tests.engine.host import Host, sampled
from tests.engine.small import engine_over, greedy, small_model

MAX_ROWS = 5
MAX_DEPTH = 4
TOKENS = 8
PROMPT = [5, 17, 90, 3, 3, 41]
Logits = NDArray[np.float32]


def new_host(model: Qwen35Model, *, deterministic: bool = True) -> Host:
    engine = engine_over(
        model,
        max_rows=MAX_ROWS,
        max_depth=MAX_DEPTH,
        pages=300,
        boundaries=2,
        deterministic=deterministic,
    )
    return Host(engine)


def logits_of(engine: MLXEngine, row: int) -> Logits:
    return np.concatenate([t.logits for t in engine.traces if t.row == row])


def others() -> list[RowSpec]:
    """Neighbours that turn every filter on and off."""
    shaped = SamplingParams(temperature=0.9, top_k=7, top_p=0.8, min_p=0.02, seed=1)
    return [
        greedy(30),
        RowSpec(sampling=shaped, max_tokens=25),
        sampled(30, 2),
        RowSpec(sampling=SamplingParams(temperature=1.2, top_k=3, seed=3), max_tokens=9),
    ]


def scenes(
    model: Qwen35Model, spec: RowSpec, depths: Sequence[int], *, deterministic: bool = True
) -> list[tuple[list[int], Logits]]:
    """The row alone, beside neighbours that come and go, and joining late; at every depth."""
    found = []
    for depth in depths:
        for scene in ("alone", "beside", "late"):
            host = new_host(model, deterministic=deterministic)
            rows: list[int] = []
            if scene != "alone":
                for row, other in enumerate(others(), start=2):
                    host.start(row, [row, 50 + row, 9], other)
                    rows.append(row)
            if scene == "late":
                for _ in range(4):
                    host.decode(*rows, depth=depth)
            host.start(1, PROMPT, spec)
            order = [*rows[:2], 1, *rows[2:]]
            while not host.results[1].ended:
                host.decode(*order, depth=depth)
                order.reverse()
            found.append((host.results[1].tokens, logits_of(host.engine, 1)))
    return found


def all_same(found: list[tuple[list[int], Logits]]) -> bool:
    tokens, logits = found[0]
    return all(t == tokens and np.array_equal(x, logits) for t, x in found)


def check_all(model: Qwen35Model) -> None:
    """Greedy tokens at any depth; sampled ones at one depth (see `EngineConfig`)."""
    assert all_same(scenes(model, greedy(TOKENS), (0, 3)))
    assert all_same(scenes(model, sampled(TOKENS, 9), (2,)))


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model()


def test_bits_do_not_depend_on_company(model: Qwen35Model) -> None:
    check_all(model)


def test_rules_and_forms_of_some_are_nothing_to_others(model: Qwen35Model) -> None:
    """Rows with every kind of rule, in both cohorts, each alone and all together."""
    counted = SamplingParams(temperature=2.0, seed=4, repetition_penalty=1.5, coupled=True)
    biased = SamplingParams(temperature=2.0, seed=5, logit_bias=((3, 2.0),), presence_penalty=1.0)
    specs: dict[int, Callable[[], RowSpec]] = {
        1: lambda: sampled(TOKENS, 9),
        2: lambda: RowSpec(sampling=counted, max_tokens=TOKENS, logprobs=2),
        3: lambda: RowSpec(sampling=biased, max_tokens=TOKENS, min_tokens=3, stop_ids=(7,)),
        4: lambda: replace(sampled(TOKENS, 6), constraint=slow.Pattern(96, 3, None, 7)),
        5: lambda: RowSpec(
            sampling=biased, max_tokens=TOKENS, constraint=slow.Pattern(96, 2, None, 7)
        ),
    }

    def run(rows: list[int]) -> dict[int, tuple[list[int], Logits]]:
        host = new_host(model)
        for row in rows:
            host.start(row, [row, *PROMPT], specs[row]())
        while any(not host.results[row].ended for row in rows):
            host.decode(*rows, depth=2)
            rows = rows[::-1]
        return {row: (host.results[row].tokens, logits_of(host.engine, row)) for row in rows}

    together = run([1, 2, 3, 4, 5])
    for row in specs:
        assert all_same([together[row], run([row])[row]]), f"row {row}"


def test_every_cycle_has_one_shape(model: Qwen35Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    trunk = Qwen35Model.trunk

    def watching(self: Qwen35Model, tokens: object, where: object, *rest: object, **kw: bool):  # type: ignore[no-untyped-def]
        if kw.get("keep"):
            seen.add((tokens.shape, where.mask.shape))  # type: ignore[attr-defined]
        return trunk(self, tokens, where, *rest, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(Qwen35Model, "trunk", watching)
    scenes(model, greedy(6), (0, 3))
    rows, depth = padded_rows(MAX_ROWS), MAX_DEPTH
    assert seen == {((rows, depth + 1), (rows, 1, depth + 1, 256))}


def test_the_planned_depth_is_still_obeyed(model: Qwen35Model) -> None:
    host = new_host(model)
    host.start(1, PROMPT, greedy(TOKENS))
    host.finish(1, depth=3)
    result = host.results[1]
    assert len(result.drafted) == 3
    assert result.cycles == 0 or result.drafted[0] <= TOKENS


@pytest.mark.parametrize("rows", [1, 14, 15, 256])
def test_rows_are_whole_tiles_with_room_for_stand_ins(rows: int) -> None:
    assert padded_rows(rows) % 16 == 0
    assert rows + 2 <= padded_rows(rows) < rows + 18


def test_filters_run_whoever_is_there(model: Qwen35Model) -> None:
    host = new_host(model)
    host.start(1, PROMPT, greedy(TOKENS))
    host.decode(1, depth=2)
    statics = host.engine._books.free._statics
    assert statics is not None
    for shaper in (statics.target, statics.draft):
        assert isinstance(shaper, Shaper)
        flags = (shaper.greedy, shaper.some_greedy, shaper.filters, shaper.floors)
        assert flags == (False, True, True, True)
        assert shaper.largest_k == 96


def test_rows_of_stand_ins_are_nobodys(model: Qwen35Model) -> None:
    host = new_host(model)
    for row in range(1, MAX_ROWS + 1):
        host.start(row, [row], greedy(3))
    host.finish(*range(1, MAX_ROWS + 1), depth=1)
    for row in range(1, MAX_ROWS + 1):
        host.release(row)
    assert host.engine._books.free.rows() == set()
    assert len(host.engine._books.free) == 0


def test_rows_run_one_by_one_where_places_differ(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits again, whatever the reason."""
    padded = scenes(model, sampled(TOKENS, 9), (2,))
    assert not new_host(model).engine.one_by_one
    monkeypatch.setattr(runner, "places_agree", lambda *_: False)
    assert new_host(model).engine.one_by_one
    assert all_same([*padded, *scenes(model, sampled(TOKENS, 9), (2,))])


@pytest.mark.parametrize("part", ["head", "mtp_exact", "mtp_draft"])
def test_a_place_that_differs_is_seen(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    right = getattr(Qwen35Model, part)

    def placed(self: Qwen35Model, x: mx.array, *rest: object) -> mx.array:
        """The last bits depend on the row."""
        row = mx.arange(x.shape[0])[:, None, None]
        out: mx.array = right(self, x, *rest)
        return out * (1 + 1e-6 * (row % 12 >= 6))

    monkeypatch.setattr(Qwen35Model, part, placed)
    assert new_host(model).engine.one_by_one


OPENBLAS = """
from engine.blas import prepare_blas
name = prepare_blas("auto").name
from engine import runner
from tests.engine.small import greedy, small_model
from tests.engine.test_deterministic import TOKENS, all_same, check_all, new_host, scenes
model = small_model()
check_all(model)
one_by_one = new_host(model).engine.one_by_one
runner.places_agree = lambda *_: True
unchecked = all_same(scenes(model, greedy(TOKENS), (0, 3)))
plain = all_same(scenes(model, greedy(TOKENS), (0, 3), deterministic=False))
print(name, one_by_one, unchecked, plain, sep="|")
"""


def with_openblas(core: str | None) -> tuple[str, bool, bool, bool]:
    """Its name; whether rows run one by one; whether results are the same without the look at
    places, and without the option. `core`: whose kernels OpenBLAS uses; None for its choice."""
    environment = os.environ if core is None else {**os.environ, "OPENBLAS_CORETYPE": core}
    done = subprocess.run(
        [sys.executable, "-c", OPENBLAS],
        capture_output=True,
        text=True,
        cwd=checkout.ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    name, *found = done.stdout.strip().split("|")
    if not name.startswith("openblas"):
        pytest.skip("no OpenBLAS on this machine")
    one_by_one, unchecked, plain = (answer == "True" for answer in found)
    return name, one_by_one, unchecked, plain


def test_it_holds_with_openblas_too() -> None:
    """Whatever this processor's kernels are: rows run one by one where places differ."""
    _, one_by_one, unchecked, _ = with_openblas(None)
    assert one_by_one == (not unchecked)


def test_it_is_needed_with_openblas() -> None:
    """With kernels for AVX2, the same scenes differ without the option, and without the look at
    places. (With those for AVX-512 of OpenBLAS 0.3.21 they do not.)"""
    flags = Path("/proc/cpuinfo")
    if not (flags.exists() and " avx2 " in flags.read_text()):
        pytest.skip("no AVX2 on this machine")
    _, one_by_one, unchecked, plain = with_openblas("Haswell")
    assert (one_by_one, unchecked, plain) == (True, False, False)
