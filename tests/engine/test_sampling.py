"""Exactness of shaping and acceptance: by enumeration, against a float64 twin, and by χ²."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import sampling
from engine.noise import Purpose, row_key, uniforms
from engine.plan import SamplingParams
from tests.engine import twin

VOCAB = 5

PARAMS = {
    "plain": SamplingParams(temperature=0.9),
    "top_k": SamplingParams(temperature=1.3, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "both": SamplingParams(temperature=0.8, top_k=4, top_p=0.8, min_p=0.1),
    "min_p": SamplingParams(temperature=1.5, min_p=0.3),
    "greedy": SamplingParams(temperature=0.0),
    "hot_draft": SamplingParams(temperature=0.6, draft_temperature=2.0),
    "point_draft": SamplingParams(temperature=1.0, top_p=0.9, draft_temperature=0.0),
    "greedy_target_hot_draft": SamplingParams(temperature=0.0, draft_temperature=1.0),
}


def _tables(name: str, seed: int) -> tuple[twin.Table, twin.Table]:
    """Target and draft laws after every prefix; the draft's logits are noisy copies."""
    params = PARAMS[name]
    draft = params.temperature if params.draft_temperature is None else params.draft_temperature

    def logits(prefix: tuple[int, ...], kind: int) -> twin.Law:
        key = [seed, 99, *prefix]
        base = np.random.default_rng(key).normal(0, 1.5, VOCAB)
        return base + kind * np.random.default_rng([*key, 7]).normal(0, 0.8, VOCAB)

    return (
        functools.cache(lambda prefix: twin.shape(logits(prefix, 0), params, params.temperature)),
        functools.cache(lambda prefix: twin.shape(logits(prefix, 1), params, draft)),
    )


def _product_law(p: twin.Table, length: int) -> dict[tuple[int, ...], float]:
    return {
        tokens: math.prod(float(p(tokens[:i])[t]) for i, t in enumerate(tokens))
        for tokens in itertools.product(range(VOCAB), repeat=length)
    }


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_the_emitted_law_is_the_targets_by_enumeration(name: str, depth: int) -> None:
    p, q = _tables(name, depth)
    expected = _product_law(p, depth + 1)
    for limit in {depth, depth // 2}:
        law = twin.emitted_law(p, q, VOCAB, depth, limit)
        assert max(abs(law[t] - expected[t]) for t in expected) < 1e-12


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB, unique=True),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
@example(logits=[0.0, 1.0, 2.0, 1.5, 2**-24], temperature=1.0, top_k=4, top_p=1.0, min_p=0.05)
@settings(max_examples=150, deadline=None)
def test_the_device_shapes_as_the_twin(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = twin.shape(logits, params, temperature)
    if _near_a_boundary(logits, params):
        return
    others = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.3)]
    for rows in ([params], [others[0], params, others[1]]):
        shaper = sampling.make_shaper(rows, VOCAB)
        batch = mx.broadcast_to(mx.array(logits)[None, None], (len(rows), 2, VOCAB))
        found = np.array(sampling.shape(batch, shaper))[rows.index(params), 1]
        np.testing.assert_allclose(found, expected, atol=3e-6)


def _near_a_boundary(logits: list[float], params: SamplingParams) -> bool:
    """Whether a cut falls so close to a mass that float32 may put it on the other side."""
    if params.temperature == 0:
        return False
    open_params = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    p = np.sort(twin.shape(logits, open_params, params.temperature))[::-1]
    sums = np.concatenate([[0.0], np.cumsum(p)])
    floor = params.min_p * p[0]
    gaps = np.abs(np.diff(p[p > 0])) if (p > 0).sum() > 1 else np.ones(1)
    # Two tokens that float32 cannot tell apart may lie on both sides of top-k's cut.
    every = SamplingParams(temperature=params.temperature)
    full = np.sort(twin.shape(logits, every, params.temperature))[::-1]
    cut = params.top_k if 0 < params.top_k < len(full) else 0
    return bool(
        np.abs(sums - params.top_p)[sums < 1 - 1e-9].min() < 1e-5
        or np.abs(p - floor).min() < 1e-6
        or gaps.min() < 1e-6
        or (cut and full[cut - 1] - full[cut] < 1e-6 * full[cut - 1])
    )


@pytest.mark.parametrize("name", PARAMS)
def test_the_device_accepts_as_the_twin(name: str) -> None:
    """Same laws, same drafts, same noise: the same decision, except within rounding of a tie."""
    depth, rows = 3, 400
    rng = np.random.default_rng(5)
    p_table, q_table = _tables(name, 1)
    drafts = np.empty((rows, depth), np.int32)
    p = np.empty((rows, depth + 1, VOCAB))
    q = np.empty((rows, depth, VOCAB))
    for row in range(rows):
        prefix: tuple[int, ...] = ()
        for j in range(depth):
            q[row, j], p[row, j] = q_table(prefix), p_table(prefix)
            drafts[row, j] = rng.choice(VOCAB, p=q[row, j])
            prefix = (*prefix, int(drafts[row, j]))
        p[row, depth] = p_table(prefix)
    u = rng.random((rows, depth + 1, 4)).astype(np.float32)
    limits = rng.integers(0, depth + 1, rows).astype(np.int32)
    found = sampling.accept(
        mx.array(drafts),
        mx.array(q.astype(np.float32)),
        mx.array(p.astype(np.float32)),
        mx.array(u),
        mx.array(limits),
    )
    accepted, tokens = np.array(found.accepted), np.array(found.tokens)
    different = 0
    for row in range(rows):
        a, own = twin.accept_once(
            drafts[row],
            q[row],
            p[row],
            u[row, :, Purpose.ACCEPT].astype(np.float64),
            u[row, :, Purpose.TARGET].astype(np.float64),
            int(limits[row]),
        )
        same = accepted[row] == a and tokens[row, a] == own
        assert list(tokens[row, : min(a, accepted[row])]) == list(
            drafts[row, : min(a, accepted[row])]
        )
        different += not same
    assert different <= 1


def chi_square(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float]) -> float:
    """Standard deviations by which a χ² statistic exceeds its mean; rare outcomes pooled."""
    total = sum(counts.values())
    assert all(law[key] > 0 for key, count in counts.items() if count)
    bins: list[tuple[float, int]] = []
    rare, rare_count = 0.0, 0
    for key, mass in law.items():
        if mass * total >= 8:
            bins.append((mass * total, counts.get(key, 0)))
        else:
            rare, rare_count = rare + mass * total, rare_count + counts.get(key, 0)
    if rare >= 8:
        bins.append((rare, rare_count))
    freedom = max(1, len(bins) - 1)
    statistic = sum((count - mean) ** 2 / mean for mean, count in bins)
    return (statistic - freedom) / math.sqrt(2 * freedom)


Accept = Callable[..., sampling.Acceptance]


def _device_law(name: str, accept: Accept, rows: int = 20000) -> float:
    """χ² excess of the first two tokens of one device burst (depth 2), against the target."""
    p_table, q_table = _tables(name, 3)
    keys = mx.array([row_key(seed) for seed in range(rows)], mx.uint32)
    u = uniforms(keys, mx.broadcast_to(mx.arange(3)[None], (rows, 3)))

    def table(law: twin.Table, prefixes: list[tuple[int, ...]]) -> mx.array:
        return mx.array(np.stack([law(prefix) for prefix in prefixes]).astype(np.float32))

    ones: list[tuple[int, ...]] = [(i,) for i in range(VOCAB)]
    twos: list[tuple[int, ...]] = list(itertools.product(range(VOCAB), repeat=2))
    q0 = mx.broadcast_to(table(q_table, [()]), (rows, VOCAB))
    d0 = sampling.draw(q0, u[:, 0, Purpose.DRAFT])
    q1 = table(q_table, ones)[d0]
    d1 = sampling.draw(q1, u[:, 1, Purpose.DRAFT])
    p0 = mx.broadcast_to(table(p_table, [()]), (rows, VOCAB))
    p1, p2 = table(p_table, ones)[d0], table(p_table, twos)[d0 * VOCAB + d1]
    drafts = mx.stack([d0, d1], axis=1)
    q, p = mx.stack([q0, q1], axis=1), mx.stack([p0, p1, p2], axis=1)
    burst = accept(drafts, q, p, u, mx.full((rows,), 2, mx.int32))
    tokens, accepted = np.array(burst.tokens), np.array(burst.accepted)
    # One-token bursts say nothing of the second token; condition on nothing by looking at token
    # one always, and at the pair through its conditional law where the burst has one.
    first: dict[tuple[int, ...], int] = {}
    for token in tokens[:, 0]:
        first[(int(token),)] = first.get((int(token),), 0) + 1
    worst = chi_square(first, _product_law(p_table, 1))
    for start in range(VOCAB):
        chosen = (tokens[:, 0] == start) & (accepted >= 1)
        second: dict[tuple[int, ...], int] = {}
        for token in tokens[chosen, 1]:
            second[(int(token),)] = second.get((int(token),), 0) + 1
        if chosen.sum() >= 200:
            law: dict[tuple[int, ...], float] = {
                (t,): float(m) for t, m in enumerate(p_table((start,)))
            }
            worst = max(worst, chi_square(second, law))
    return worst


@pytest.mark.parametrize("name", PARAMS)
def test_the_devices_law_is_the_targets(name: str) -> None:
    assert _device_law(name, sampling.accept) < 4.5


def _draft_law_assumed_uniform(
    drafts: mx.array, q: mx.array, p: mx.array, u: mx.array, limits: mx.array
) -> sampling.Acceptance:
    """Judge the drafts by a law they were not drawn from."""
    return sampling.accept(drafts, mx.full(q.shape, 1 / VOCAB), p, u, limits)


def _residual_from_p(
    drafts: mx.array, q: mx.array, p: mx.array, u: mx.array, limits: mx.array
) -> sampling.Acceptance:
    """Resample from p instead of the residual after a rejection."""
    good = sampling.accept(drafts, q, p, u, limits)
    index = good.accepted[:, None, None]
    law = mx.take_along_axis(p, index, axis=1)[:, 0]
    noise = mx.take_along_axis(u[..., 2], good.accepted[:, None], axis=1)[:, 0]
    return sampling._assemble(drafts, sampling.draw(law, noise), good.accepted)


def _shared_noise(
    drafts: mx.array, q: mx.array, p: mx.array, u: mx.array, limits: mx.array
) -> sampling.Acceptance:
    """Accept with the very noise the draft was drawn with."""
    return sampling.accept(drafts, q, p, mx.broadcast_to(u[..., :1], u.shape), limits)


@pytest.mark.parametrize("fault", [_draft_law_assumed_uniform, _residual_from_p, _shared_noise])
def test_planted_law_faults_are_seen(fault: Accept) -> None:
    assert _device_law("plain", fault) > 10


def test_greedy_acceptance_is_the_point_mass_case() -> None:
    rng = np.random.default_rng(0)
    best = mx.array(rng.integers(0, 3, (64, 5)).astype(np.int32))
    drafts = mx.array(rng.integers(0, 3, (64, 4)).astype(np.int32))
    limits = mx.array(rng.integers(0, 5, 64).astype(np.int32))
    u = mx.array(rng.random((64, 5, 4)).astype(np.float32))
    q, p = sampling.one_hot(drafts, VOCAB), sampling.one_hot(best, VOCAB)
    fast = sampling.accept_equal(drafts, best, limits)
    slow = sampling.accept(drafts, q, p, u, limits)
    assert mx.array_equal(fast.accepted, slow.accepted)
    assert mx.array_equal(fast.tokens, slow.tokens)


@pytest.mark.parametrize("u", [0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_draw_never_returns_a_token_without_mass(u: float) -> None:
    laws = mx.array([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0], [1, 0, 0, 0, 1e-9]])
    tokens = sampling.draw(laws, mx.full((3,), u))
    assert (mx.take_along_axis(laws, tokens[:, None], axis=1) > 0).all()


def test_equal_laws_always_accept_and_leave_the_bonus_to_p() -> None:
    p = mx.softmax(mx.random.normal((64, 3, VOCAB), key=mx.random.key(0)), axis=-1)
    u = mx.random.uniform(shape=(64, 3, 4), key=mx.random.key(1))
    drafts = mx.argmax(p[:, :2], axis=-1).astype(mx.int32)
    burst = sampling.accept(drafts, p[:, :2], p, u, mx.full((64,), 2, mx.int32))
    assert (burst.accepted == 2).all()
    assert mx.array_equal(burst.tokens[:, 2], sampling.draw(p[:, 2], u[:, 2, Purpose.TARGET]))


def test_tiny_temperatures_are_nearly_greedy_and_finite() -> None:
    logits = mx.array([[[1e4, 9.9e3, -1e4, 0.0, 3.0]]])
    for temperature in (1e-4, 1e-30):
        shaper = sampling.make_shaper([SamplingParams(temperature=temperature)], VOCAB)
        assert sampling.shape(logits, shaper).tolist() == [[[1.0, 0.0, 0.0, 0.0, 0.0]]]
