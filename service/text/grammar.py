"""Forms a text must have, as the set of tokens that may come next: `engine.plan.Constraint`.

Compiled by llguidance, from a JSON schema, a regular expression or a Lark grammar. A grammar sees a
token as the very bytes that the detokenizer streams for it, so that what is constrained is the text
the client reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
import numpy as np
from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    regex_to_lark,
)
from numpy.typing import NDArray

from service.config import GrammarLimits
from service.text.tokenizer import Tokenizer

Form = Literal["json_schema", "regex", "grammar"]
"""The fields of the API that constrain a text."""

MAX_ERROR_CHARS: Final = 200

_LIMITS: Final[dict[str, Any]] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance. They keep a mask, which the engine waits for, within tens of milliseconds in the
worst case, and a grammar within some hundred megabytes."""


_SLOW_MASK_S: Final = 0.05
_SLOW_MASKS: Final = 4
"""So many masks in a row, each slower than that, end a text."""


class GrammarError(Exception):
    """This grammar cannot be used; the text, one short line, says why."""


class Vocabulary:
    """The model's token ids as grammars see them."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's; ids the tokenizer does not know are never allowed."""
        pieces = [tokenizer.token_bytes(token) or b"" for token in range(vocab_size)]
        special = [token for token in tokenizer.special_ids if token < vocab_size]
        self.words = -(-vocab_size // 32)
        self.eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self.usable = np.array([bool(piece) for piece in pieces])
        """[V]: tokens that add something to the text."""
        self.end_mask = self._mask_of(self.eos_ids)
        self.special_tokens = sorted(
            pieces[token].decode(errors="replace") for token in special if pieces[token]
        )
        self._not_end = ~self.end_mask
        wrapped = TokenizerWrapper(_Wrapped(tokenizer, pieces, special, min(self.eos_ids)))
        self.raw = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=sorted(self.eos_ids))

    def complete(self, mask: bytes, *, may_end: bool) -> NDArray[np.uint32]:
        """A mask of llguidance's as the engine's: end tokens where the text may end, and only
        there."""
        words = np.frombuffer(mask, dtype="<u4")[: self.words] & self._not_end
        return words | self.end_mask if may_end else words

    def _mask_of(self, tokens: Iterable[int]) -> NDArray[np.uint32]:
        mask = np.zeros(self.words, dtype=np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask


class _Wrapped:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, pieces: Sequence[bytes], special: Sequence[int], eos_id: int
    ) -> None:
        self.tokens = pieces
        self.special_token_ids = special
        self.eos_token_id = eos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class CompiledGrammar:
    """A grammar at its beginning, shared by all rows that use it."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        """Raises GrammarError when no text satisfies it."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        first = self.constraint()
        first.mask(())
        if first.failure is not None:
            raise GrammarError(f"no text satisfies it ({first.failure})")
        self._check_speed()

    def _check_speed(self) -> None:
        """Raises GrammarError when each of the first masks takes too long: the engine, and with it
        everybody, waits for every one. The very first is not looked at: it builds what later ones
        share."""
        constraint = self.constraint()
        seconds = []
        for _ in range(_SLOW_MASKS):
            mask = constraint.mask(())
            assert mask is not None
            word = int(np.flatnonzero(mask)[0])
            bits = int(mask[word])
            constraint.advance([32 * word + (bits & -bits).bit_length() - 1])
            seconds.append(constraint.mask_s)
        if min(seconds) > _SLOW_MASK_S:
            raise GrammarError(f"takes more than {_SLOW_MASK_S * 1000:.0f} ms per token")

    def constraint(self) -> GrammarConstraint:
        """A constraint for one row."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary)


class GrammarConstraint:
    """Implements `engine.plan.Constraint` for one row. It never raises: a grammar that has come to
    its end, or to the end of its tether, allows the end tokens only."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._ahead: tuple[tuple[int, ...], LLMatcher] | None = None
        """Where the last drafts led: the next call usually drafts one more."""
        self._ended = False
        self._slow = 0
        self.mask_s = 0.0
        """CPU seconds the last mask took."""
        self.failure: str | None = None
        """Why the text, although it ended, does not have the form; None while all is well."""

    def mask(self, drafted: Sequence[int]) -> NDArray[np.uint32] | None:
        """uint32 [ceil(V / 32)], bit t % 32 of word t // 32 for token t; see `Constraint`."""
        eos_ids = self._vocabulary.eos_ids
        body = tuple(drafted)
        end = next((n for n, token in enumerate(body) if token in eos_ids), len(body))
        body, tail = body[:end], body[end:]
        if not eos_ids.issuperset(tail):
            return None
        if self._ended or self.failure is not None:
            return None if body else self._vocabulary.end_mask.copy()
        matcher = self._after(body)
        if matcher is None:
            return None
        words, failure = self._allowed(matcher)
        if tail and (failure is not None or not matcher.is_accepting()):
            return None
        if not body:
            self._slow = self._slow + 1 if self.mask_s > _SLOW_MASK_S else 0
            if self._slow > _SLOW_MASKS:
                failure, words = "too complex here", self._vocabulary.end_mask.copy()
            self.failure = failure
        return self._vocabulary.end_mask.copy() if tail else words

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes emitted tokens; those after an end token are nobody's."""
        self._ahead = None
        for token in tokens:
            if token in self._vocabulary.eos_ids:
                self._ended = True
            if self._ended or self.failure is not None:
                return
            if not self._takes(self._matcher, [token]):
                self.failure = f"token {token} was emitted against the grammar"

    def _after(self, drafted: tuple[int, ...]) -> LLMatcher | None:
        """The matcher after these drafts, which must not be advanced; None when one of them is not
        allowed."""
        if not drafted:
            return self._matcher
        known, matcher = self._ahead or ((), None)
        if matcher is None or drafted[: len(known)] != known:
            known, matcher = (), self._matcher.deep_copy()
        self._ahead = None
        if not self._takes(matcher, drafted[len(known) :]):
            return None
        self._ahead = drafted, matcher
        return matcher

    def _takes(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        usable = self._vocabulary.usable
        if not all(0 <= token < len(usable) and usable[token] for token in tokens):
            return False
        rest = list(tokens)
        return matcher.validate_tokens(rest) == len(rest) and matcher.consume_tokens(rest)

    def _allowed(self, matcher: LLMatcher) -> tuple[NDArray[np.uint32], str | None]:
        """What may follow in this state; the end tokens and a reason when nothing may."""
        began = time.thread_time()
        try:
            mask = matcher.compute_bitmask()
        except Exception as error:  # it was in a state of error before
            return self._vocabulary.end_mask.copy(), _one_line(str(error))
        self.mask_s = time.thread_time() - began
        words = self._vocabulary.complete(mask, may_end=matcher.is_accepting())
        if words.any():
            return words, None
        why = _one_line(matcher.get_error()) if matcher.is_error() else ""
        dead_end = not why or "NoExtension" in why
        return self._vocabulary.end_mask.copy(), "a dead end" if dead_end else why


class Grammars:
    """Compiles the grammars of one server's requests, off its event loop, and keeps some."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        limits: GrammarLimits | None = None,
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._limiter: anyio.CapacityLimiter | None = None

    def prepare(self) -> None:
        """Builds what all grammars share; idempotent. `compile` would do it, but for a vocabulary
        of 150,000 tokens it takes a second or two in which llguidance holds the interpreter's lock:
        better before anything is streamed. Raises what llguidance raises for a vocabulary it cannot
        take."""
        with self._lock:
            if self._vocabulary is None and self._can_end:
                self._vocabulary = Vocabulary(
                    self._tokenizer, vocab_size=self._vocab_size, eos_ids=self._tokenizer.eos_ids
                )

    @property
    def _can_end(self) -> bool:
        """The model has an end token, without which no text is ever complete."""
        return any(token < self._vocab_size for token in self._tokenizer.eos_ids)

    async def compile(self, form: Form, text: str) -> CompiledGrammar:
        """Raises GrammarError: too large, broken, beyond the limits, or no text satisfies it."""
        self._check_size(form, text)
        key = hashlib.sha256(f"{form}\0{text}".encode()).digest()
        if (known := self._cached(key)) is not None:
            return known
        await anyio.to_thread.run_sync(self.prepare, abandon_on_cancel=True)
        assert self._vocabulary is not None
        vocabulary = self._vocabulary
        self._limiter = self._limiter or anyio.CapacityLimiter(self.limits.at_once)
        with anyio.move_on_after(self.limits.timeout_s):
            async with self._limiter:
                if (known := self._cached(key)) is None:
                    known = await self._compile(form, text, vocabulary)
                    self._cache[key] = known
            while len(self._cache) > self.limits.cached:
                self._cache.popitem(last=False)
            return known
        raise GrammarError(f"takes longer than {self.limits.timeout_s:g} s to compile")

    def _cached(self, key: bytes) -> CompiledGrammar | None:
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def _check_size(self, form: Form, text: str) -> None:
        if len(text) > self.limits.max_chars:
            raise GrammarError(f"at most {self.limits.max_chars} characters, is {len(text)}")
        if not self._can_end:
            raise GrammarError("this model has no end token, so no text could be complete")
        if form == "json_schema":
            _check_schema(text, self.limits.max_depth)
        elif form == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
            raise GrammarError("ends in a lone backslash")  # llguidance would leave it out

    async def _compile(self, form: Form, text: str, vocabulary: Vocabulary) -> CompiledGrammar:
        source = _source(form, text)
        await self._probe(source, vocabulary)

        def build() -> CompiledGrammar:
            limits = LLParserLimits(**_LIMITS)
            matcher = LLMatcher(vocabulary.raw, source, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(_one_line(matcher.get_error()))
            return CompiledGrammar(matcher, vocabulary)

        return await anyio.to_thread.run_sync(build, abandon_on_cancel=True)

    async def _probe(self, source: str, vocabulary: Vocabulary) -> None:
        """Compiles it where it may do harm. A cancelled wait, at the time limit, ends the process.

        Raises GrammarError."""
        ask = {
            "grammar": source,
            "special": vocabulary.special_tokens,
            "limits": _LIMITS,
            "memory_bytes": self.limits.memory_bytes,
        }
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
        done = await anyio.run_process(command, input=json.dumps(ask).encode(), check=False)
        if done.returncode != 0:
            raise GrammarError("too deeply nested, or takes too much memory to compile")
        error: str = json.loads(done.stdout)["error"]
        if error:
            raise GrammarError(_one_line(error))


# Without it llguidance allows, where the text is forced, only the token that the tokenizer would
# write there, and calls others valid all the same: the law of what is drawn is not the model's
# then, and what a draft may be not what the target may.
_ALL_SPELLINGS: Final = '\n%llguidance {"no_forcing": true}\n'


def _source(form: Form, text: str) -> str:
    """The grammar as Lark."""
    match form:
        case "json_schema":
            return f"start: %json {text}{_ALL_SPELLINGS}"
        case "regex":
            return f"start: /{regex_to_lark(text, '')}/{_ALL_SPELLINGS}"
        case "grammar":
            return f"{text}{_ALL_SPELLINGS}"


def _check_schema(text: str, max_depth: int) -> None:
    """Raises GrammarError unless `text` is a JSON object or boolean, nested at most so deep."""
    try:
        schema: Any = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"is not JSON: {_one_line(str(error))}") from None
    except RecursionError:
        raise GrammarError(f"nested at most {max_depth} deep") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("must be a JSON object")
    level: list[Any] = [schema]
    for _ in range(max_depth + 1):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [x for p in parts for x in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return
    raise GrammarError(f"nested at most {max_depth} deep")


def _one_line(text: str) -> str:
    """An error of llguidance's without its excerpts of the source, which are indented."""
    lines = [line.strip() for line in text.splitlines() if not line[:1].isspace()]
    line = re.sub(r"\s*<non-verbose/>", "", " ".join(filter(None, lines)))
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    if len(line) <= MAX_ERROR_CHARS:
        return line
    half = MAX_ERROR_CHARS // 2 - 1
    return f"{line[:half]}… {line[-half:]}"
