"""What a `FakeEngine` says: pseudo-random tokens, the same whatever is beside them."""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan import Constraint, Logprobs
from tests.scheduler.fake_cache import digest


def pseudo_token(read: int, state: int, seed: int, vocab_size: int) -> int:
    """What comes after tokens that read as `read` and left the recurrent state `state`."""
    return mix(read, state, seed) % vocab_size


def shaped(
    token: int,
    barred: tuple[int, ...],
    constraint: Constraint | None,
    burst: list[int],
    vocab_size: int,
) -> int:
    """The next token from `token` on, cyclically, that is not barred and that the constraint
    allows after `burst`."""
    mask = None if constraint is None else constraint.mask(burst)
    for step in range(vocab_size):
        candidate = (token + step) % vocab_size
        allowed = mask is None or int(mask[candidate // 32]) >> (candidate % 32) & 1
        if allowed and candidate not in barred:
            return candidate
    raise AssertionError("a constraint allows nothing")


def fake_logprobs(tokens: Iterable[int], count: int) -> Logprobs:
    """Log probabilities `FakeEngine` reports for `tokens` with `count` alternatives."""
    ids = list(tokens)
    return Logprobs(
        chosen=tuple(-(token % 13) / 7 for token in ids),
        top_ids=tuple(tuple(token + j for j in range(count)) for token in ids),
        top=tuple(tuple(-j / 3 for j in range(count)) for _ in ids),
    )


def expected_tokens(
    prompt: tuple[int, ...],
    *,
    seed: int,
    max_tokens: int,
    stop_ids: tuple[int, ...] = (),
    vocab_size: int = 1000,
    min_tokens: int = 0,
    constraint: Constraint | None = None,
) -> list[int]:
    """All tokens a request gets from a default `FakeEngine` when nothing interferes. `constraint`
    is advanced: give a fresh one."""
    tokens: list[int] = []
    state = digest(prompt)
    while len(tokens) < max_tokens:
        token = pseudo_token(state, state, seed, vocab_size)
        barred = stop_ids if len(tokens) < min_tokens else ()
        tokens.append(shaped(token, barred, constraint, [], vocab_size))
        if constraint is not None:
            constraint.advance(tokens[-1:])
        state = digest(tokens[-1:], state)
        if tokens[-1] in stop_ids:
            break
    return tokens


def mix(*parts: int) -> int:
    """32 well-mixed bits."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ part) * 0xBF58476D1CE4E5B9 % 2**64
        state ^= state >> 31
    return state >> 32
