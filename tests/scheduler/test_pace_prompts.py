"""Prompts under a pace: who passes whom, and where they are cut."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.pace import LEAST, Budget, ladder
from scheduler.prefill import OPEN
from scheduler.prefill_costs import PrefillCosts, Work
from scheduler.request import Priority
from tests.scheduler.bench import SMALL, fuzz, make_request
from tests.scheduler.paced import Costs, Paced

# --- who passes whom ------------------------------------------------------------------------------


def check_short_prompts(gap: float | None = 0.15) -> None:
    """Short prompts that come one by one, while fewer than `OPEN` books are unfinished, see less
    than two chunks of others before their own."""
    world = Paced(max_token_gap_s=gap)
    world.load(books=OPEN - 1, pages=1500)
    world.until(lambda: world.core.statistics(world.now).prefilling == OPEN - 1)
    for number in range(6):
        name, before = f"short{number}", len(world.engine.plans)
        world.book(name, 10 + 2 * number, number)
        row = -1
        while not world.done(name):
            assert world.step()
            row = max(row, world.core._live[name].row if name in world.core._live else row)
        others = 0
        for piece in (piece for plan in world.engine.plans[before:] for piece in plan.prefill):
            if piece.row == row and piece.last:
                break
            others += len(piece.tokens) if piece.row != row else 0
        assert others < 2 * 64
    assert not any(world.done(f"book{number}") for number in range(OPEN - 1))


@pytest.mark.parametrize("gap", [None, 0.15])
def test_short_prompts_pass_books(gap: float | None) -> None:
    check_short_prompts(gap)


def check_book(gap: float | None = None) -> None:
    """With short prompts always waiting, a book gets as many tokens as they get, but for a step's
    (and what was passing it before)."""
    world = Paced(max_token_gap_s=gap)
    world.load(streams=2, books=1, pages=640)
    world.until(lambda: world.core._live["book0"].cursor > 0)
    row, start, shorts = world.core._live["book0"].row, len(world.ran), 0
    for _ in range(400):
        if world.done("book0"):
            break
        while world.core.statistics(world.now).queued_requests < 4:
            world.book(f"short{shorts}", 20 + shorts % 40, shorts)
            shorts += 1
        assert world.step()
    assert world.done("book0"), "the book starves"
    own = others = 0
    for ran in world.ran[start:]:
        for piece in ran.chunks:
            own += len(piece.tokens) * (piece.row == row)
            others += len(piece.tokens) * (piece.row != row)
        if own < 500:
            assert others - own <= 2 * 64
    assert shorts > 8, "nobody passed"


@pytest.mark.parametrize("gap", [None, 0.15])
def test_a_book_has_a_part_however_many_pass(gap: float | None) -> None:
    check_book(gap)


def test_books_of_one_length_go_one_after_the_other() -> None:
    """Sharing a step among them would make the first late and the last no earlier."""
    world = Paced()
    world.load(streams=1, books=3, pages=640)
    world.until(world.done)
    waits = [world.first_token_after(f"book{number}") for number in range(3)]
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.2)
    assert waits[2] == pytest.approx(3 * waits[0], rel=0.2)


def test_the_shorter_book_goes_first() -> None:
    """Behind the oldest, which goes on all the same."""
    world = Paced()
    world.load(streams=1)
    for name, length in (("oldest", 1200), ("longer", 700), ("shorter", 300)):
        world.book(name, length, length)
    world.until(world.done)
    first = {name: world.first_token_after(name) for name in ("oldest", "longer", "shorter")}
    assert first["shorter"] < first["longer"] < first["oldest"]


def test_a_higher_class_goes_first() -> None:
    world = Paced()
    world.load(streams=1)
    for name, length in (("oldest", 1200), ("shorter", 300)):
        world.book(name, length, length)
    for _ in range(2):
        world.step()
    world.book("urgent", 400, 400, priority=Priority.INTERACTIVE)
    world.until(world.done)
    first = {name: world.first_token_after(name) for name in ("oldest", "shorter", "urgent")}
    assert first["urgent"] < first["shorter"] < first["oldest"]


def test_short_prompts_share_a_step() -> None:
    world = Paced(max_token_gap_s=0.25)
    world.load(streams=1)
    for number in range(4):
        world.book(f"short{number}", 12 + number, number)
    world.until(world.done)
    assert max(len(ran.chunks) for ran in world.ran) >= 3


def test_no_more_than_a_few_books_are_open() -> None:
    world = Paced(max_token_gap_s=0.2)
    world.load(streams=1, books=8, pages=200)
    while not world.done():
        assert world.step()
        assert world.core.statistics(world.now).prefilling <= OPEN + 1  # one in its last step


# --- what stays of a prompt -----------------------------------------------------------------------


def test_the_ladder() -> None:
    assert ladder(256) == (16, 32, 64, 128, 256)
    assert ladder(100) == (16, 32, 64, 100)
    assert ladder(16) == (16,)
    assert ladder(5) == (5,)


@given(
    chunk=st.sampled_from([8, 16, 40, 64, 100, 256]),
    start=st.integers(0, 600),
    left=st.integers(1, 300),
    whole=st.booleans(),
    tokens=st.integers(1, 256),
    room=st.floats(0, 0.5),
)
def test_pieces(chunk: int, start: int, left: int, whole: bool, tokens: int, room: float) -> None:
    """Never too long, never too dear, never of another length than the ladder's or the whole."""
    costs = PrefillCosts()
    costs.observe(Work.chunk(32, 0), mixed=True, step_s=0.12, cycle_s=0.05)
    budget = Budget(tokens=tokens, sizes=ladder(chunk), costs=costs, mixed=True, room=room)
    size = budget.piece(start, start + left, whole=whole)
    assert 0 <= size <= min(left, tokens)
    assert size in (0, left, *ladder(chunk))
    if size:
        assert sum(costs.seconds(Work.chunk(size, start), mixed=True)) <= room
    elif min(left, LEAST, chunk) <= tokens:
        assert budget.need is not None


def check_cuts(
    lengths: list[int], size: int, gap: float | None, share: float, groups: int, seed: int
) -> None:
    """`FakeEngine` checks that every token comes once and in order, and that boundaries are of
    the tokens before them; here are the places of the cuts."""
    world = Paced(
        Costs(noise=0.2, rng=random.Random(seed)),
        max_token_gap_s=gap,
        prefill_share=share,
        prefill_chunk=size,
        boundaries=6,
    )
    world.load(streams=2, reuse_prefix=False)
    rng = random.Random(seed)
    base = [rng.randrange(1000) for _ in range(400)]
    for number, length in enumerate(lengths):
        prompt = base[:length] if number % 2 else [rng.randrange(1000) for _ in range(length)]
        request = make_request(f"r{number}", prompt=prompt, max_tokens=3)
        if number < groups:
            request = replace(request, prompt_ids=tuple(base[: lengths[0]]), group="g")
        world.submit(request)
    sequences = dict(world.core._live)
    world.until(world.done)
    wanted = {s.row: (s.cached, len(s.prompt), set(s.saves)) for s in sequences.values()}
    cuts: dict[int, list[int]] = {}
    for plan in world.engine.plans:
        for piece in plan.prefill:
            ends = cuts.setdefault(piece.row, [piece.start])
            assert ends[-1] == piece.start
            ends.append(piece.start + len(piece.tokens))
    for row, (cached, end, saves) in wanted.items():
        found = cuts[row]
        assert (found[0], found[-1]) == (cached, end)
        must = {p for p in range(0, end, size) if p > cached} | saves
        assert must <= set(found)
        whole = {cached, end} | must
        for a, b in itertools.pairwise(found):
            assert b - a in ladder(size) or b in whole, "a length that nobody asked for"
            assert b - a <= size


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    size=st.sampled_from([16, 40, 64]),
    gap=st.sampled_from([None, 0.03, 0.12, 0.2]),
    share=st.sampled_from([0.2, 0.5]),
    groups=st.sampled_from([0, 3]),
    seed=st.integers(0, 5),
)
def test_cuts(
    lengths: list[int], size: int, gap: float | None, share: float, groups: int, seed: int
) -> None:
    check_cuts(lengths, size, gap, share, groups, seed)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("gap", [0.02, 0.06])
def test_random_use(in_flight: int, gap: float) -> None:
    """All that `Bench` checks, with chunks in pieces."""
    config = replace(SMALL, prefill_chunk=32, max_token_gap_s=gap, prefill_share=0.3)
    fuzz(seed=5, requests=250, in_flight=in_flight, config=config)


def test_the_same_input_gives_the_same_plans() -> None:
    def plans() -> list[object]:
        world = Paced(Costs(noise=0.1), max_token_gap_s=0.12, boundaries=4)
        world.load(books=3, pages=300)
        world.until(world.done)
        return [
            (
                p.step,
                p.decode and p.decode.rows,
                [(c.row, c.start, len(c.tokens)) for c in p.prefill],
            )
            for p in world.engine.plans
        ]

    assert plans() == plans()
