"""A slow, obvious decoder with every feature of the contract: NumPy float64, one row, one token.

The trunk runs one token at a time with its own pages; everything after the logits is written out
here a second time, from `engine.plan`'s words alone. `judge` replays what an engine emitted and
says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cache import PagePool, page_table, window
from engine.models.delta import keep_all
from engine.models.qwen3_5 import Qwen35Model
from engine.noise import threefry2x32
from engine.plan import Constraint, Logprobs, RowSpec
from engine.solo import SoloResult
from tests.engine import twin

Law = NDArray[np.float64]
SCRAMBLE_COUPLED = (0x636F7570, 0x6C696E67)
NEAR = 1e-6
"""Two scores closer than this (relative) may change places in float32."""
CUT = 3e-5
"""A cut-off closer than this to a mass may fall on its other side in float32."""


class Trunk:
    """The model one token at a time, through its own single-row cache."""

    def __init__(self, model: Qwen35Model, length: int) -> None:
        size, config = 8, model.config
        pages = -(-length // size)
        self._model, self._size, self._at = model, size, 0
        self._pools = [
            PagePool(
                pages=pages,
                page_size=size,
                heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                dtype=mx.float32,
            )
            for _ in range(model.attention_layers)
        ]
        self._table = page_table(np.arange(1, pages + 1, dtype=np.int32)[None])
        self._states = model.zero_states(1)

    def feed(self, token: int) -> Law:
        """Logits after one more token."""
        where = window(mx.array([self._at]), 1, self._table, self._size)
        hidden, trails = self._model.trunk(mx.array([[token]]), where, self._pools, self._states)
        self._states = [keep_all(trail) for trail in trails]
        self._at += 1
        logits: Law = np.array(self._model.head(hidden))[0, 0].astype(np.float64)
        return logits


def exponentials(seed: int, position: int, vocab: int) -> Law:
    """E(v) of every token, from Random123's definition of the generator."""
    words = (seed & 0xFFFFFFFF, seed >> 32)
    low, high = threefry2x32(words, SCRAMBLE_COUPLED)
    key = ((low + position) & 0xFFFFFFFF, high)
    half = (vocab + 1) // 2
    pairs = [threefry2x32(key, (i, i + half)) for i in range(half)]
    bits = np.array([p[0] for p in pairs] + [p[1] for p in pairs], np.float64)[:vocab]
    return -np.log1p(-(bits + 0.5) / 2.0**32)


def log_softmax(logits: Law) -> Law:
    shifted = logits - logits.max()
    out: Law = shifted - np.log(np.exp(shifted).sum())
    return out


@dataclass
class Row:
    """One request, as far as it has come."""

    spec: RowSpec
    prompt: Sequence[int]
    constraint: Constraint | None
    output: list[int] = field(default_factory=list)

    def rule(self, logits: Law) -> Law:
        """Logits after mask, minimum length, bias and penalties, in the contract's order."""
        s, z = self.spec.sampling, logits.copy()
        banned = np.zeros(len(z), bool)
        if len(self.output) < self.spec.min_tokens:
            banned[list(self.spec.stop_ids)] = True
        if self.constraint is not None:
            words = self.constraint.mask(())
            assert words is not None
            allowed = np.array([bool(words[t // 32] >> (t % 32) & 1) for t in range(len(z))])
            if not (allowed & ~banned).any():
                banned[:] = False
            banned |= ~allowed
        z[banned] = -np.inf
        for token, bias in s.logit_bias:
            z[token] += bias
        for token in range(len(z)):
            times = self.output.count(token)
            if times or token in self.prompt:
                r = s.repetition_penalty
                z[token] = z[token] / r if z[token] > 0 else z[token] * r
            z[token] -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
        return z

    def push(self, token: int) -> None:
        self.output.append(token)
        if self.constraint is not None:
            self.constraint.advance([token])


def law_of(z: Law, row: Row, nudge: float = 0.0) -> Law:
    """The row's distribution; `nudge` moves every cut-off, relatively."""
    from dataclasses import replace

    s = row.spec.sampling
    if nudge:
        s = replace(s, top_p=min(1.0, s.top_p * (1 + nudge)), min_p=s.min_p * (1 - nudge))
    return twin.shape(z, s, max(s.temperature, 1e-4) if s.temperature else 0.0)


def choose(z: Law, row: Row, position: int) -> tuple[int | None, Law]:
    """The token a greedy or coupled row must emit, None on a near-tie, and the row's law."""
    law = law_of(z, row)
    if row.spec.sampling.temperature == 0:
        return _clear_winner(z - z[np.isfinite(z)].min() + 1.0), law
    noise = exponentials(row.spec.sampling.seed, position, len(z))
    winners = {_clear_winner(law_of(z, row, nudge) / noise) for nudge in (-CUT, 0.0, CUT)}
    k = row.spec.sampling.top_k
    if 0 < k < len(z):
        ranked = np.sort(z)[::-1]
        if np.isfinite(ranked[k]) and ranked[k - 1] - ranked[k] < CUT:
            return None, law
    return (winners.pop() if len(winners) == 1 else None), law


def _clear_winner(scores: Law) -> int | None:
    first, second = np.sort(scores)[::-1][:2]
    if first - second < NEAR * abs(first):
        return None
    return int(scores.argmax())


@dataclass
class Verdict:
    """What a replay found."""

    compared: int = 0
    """Positions at which the token had to be a certain one, and was."""
    ranks: list[tuple[float, float]] = field(default_factory=list)
    """Of rejection rows: (mass of more probable tokens, mass of the token's own rank)."""


def judge(
    model: Qwen35Model,
    prompt: Sequence[int],
    spec: RowSpec,
    result: SoloResult,
    constraint: Constraint | None = None,
) -> Verdict:
    """Replay a result; AssertionError when the engine emitted what it must not.

    `constraint` is a fresh one, equal to the spec's.
    """
    row, verdict = Row(spec, prompt, constraint), Verdict()
    trunk = Trunk(model, len(prompt) + len(result.tokens) + 1)
    before = [trunk.feed(token) for token in prompt]
    if spec.prompt_logprobs is not None:
        assert result.prompt_logprobs is not None
        check_logprobs(result.prompt_logprobs, before[:-1], prompt[1:], spec.prompt_logprobs)
    logits, seen = before[-1], []
    certain = spec.sampling.coupled or spec.sampling.temperature == 0
    for n, token in enumerate(result.tokens):
        z = row.rule(logits)
        expected, law = choose(z, row, len(prompt) + n)
        assert np.isfinite(z[token]), f"token {n} is masked"
        if certain and expected is None:
            break
        if certain:
            assert token == expected, f"token {n} is {token}, not {expected}"
            verdict.compared += 1
        else:
            assert law[token] > 0 or law_of(z, row, CUT)[token] > 0
            verdict.ranks.append((law[law > law[token]].sum(), law[law == law[token]].sum()))
        seen.append(logits)
        row.push(token)
        assert (token in spec.stop_ids) <= (n == len(result.tokens) - 1)
        logits = trunk.feed(token)
    else:
        assert result.fault is None
        assert len(result.tokens) <= spec.max_tokens
        stopped = result.tokens[-1] in spec.stop_ids
        assert stopped or len(result.tokens) == spec.max_tokens
        assert result.finish == ("stop" if stopped else "length")
    if spec.logprobs is None:
        assert result.logprobs is None
    else:
        assert result.logprobs is not None
        assert len(result.logprobs.chosen) == len(result.tokens)
        check_logprobs(result.logprobs, seen, result.tokens[: len(seen)], spec.logprobs)
    return verdict


def check_logprobs(found: Logprobs, logits: Iterable[Law], tokens: Sequence[int], top: int) -> None:
    """Each position's numbers within 1e-4, the alternatives in order."""
    for i, (z, token) in enumerate(zip(logits, tokens, strict=True)):
        right = log_softmax(z)
        assert abs(found.chosen[i] - right[token]) < 1e-4
        order = np.lexsort((np.arange(len(z)), -z))[:top]
        assert np.allclose(found.top[i], right[order], atol=1e-4)
        assert np.allclose(right[list(found.top_ids[i])], right[order], atol=1e-6)
        assert len(found.top_ids[i]) == min(top, len(z)) == len(set(found.top_ids[i]))


def pit_excess(ranks: Sequence[tuple[float, float]], seed: int = 0, bins: int = 10) -> float:
    """Standard deviations by which χ² of the probability integral transform exceeds its mean.

    Ordered by probability, a law's distribution function at a token drawn from it, randomised
    within the token's step, is uniform.
    """
    rng = np.random.default_rng(seed)
    values = [above + rng.random() * own for above, own in ranks]
    counts = np.histogram(values, bins=bins, range=(0, 1))[0]
    mean = len(values) / bins
    statistic = ((counts - mean) ** 2 / mean).sum()
    return float((statistic - (bins - 1)) / np.sqrt(2 * (bins - 1)))


class Pattern:
    """A toy form: the n-th token is n modulo `modulus`, until `length` tokens; then `end` only.

    Fails the test when it is asked past an end token or out of turn.
    """

    def __init__(self, vocab: int, modulus: int, length: int | None, end: int) -> None:
        self._vocab, self._modulus, self._length, self._end = vocab, modulus, length, end
        self.tokens: list[int] = []
        self.asked = 0
        """Questions so far."""
        self.refused = 0
        """Of them, about drafts that are not allowed."""

    def _allowed(self, count: int) -> set[int]:
        if self._length is not None and count >= self._length:
            return {self._end}
        return {t for t in range(self._vocab) if t % self._modulus == count % self._modulus}

    def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32] | None:
        self.asked += 1
        assert self._length is None or self._end not in [*self.tokens, *drafted]
        count = len(self.tokens)
        for place, token in enumerate(drafted):
            if token not in self._allowed(count + place):
                self.refused += 1
                return None
        words = np.zeros(-(-self._vocab // 32), np.uint32)
        for token in self._allowed(count + len(drafted)):
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self._allowed(len(self.tokens))
            self.tokens.append(token)


MakeConstraint = Callable[[], Constraint]
