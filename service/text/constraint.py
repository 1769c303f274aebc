"""A compiled grammar as `engine.plan.Constraint`: which tokens may come after which.

A grammar sees a token as the very bytes that the detokenizer streams for it, so that what is
constrained is the text the client reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from service.text.tokenizer import Tokenizer

MAX_ERROR_CHARS: Final = 200

_SLOW_MASK_S: Final = 0.05
_SLOW_MASKS: Final = 4
"""So many masks in a row, each slower than that, end a text."""


class GrammarError(Exception):
    """This grammar cannot be used; the text, one short line, says why."""

    def __init__(self, message: str, path: str = "") -> None:
        """`path` leads to what is wrong in a grammar that has parts, e.g. `format.tags[1].end`. Of
        both, which may quote the client, what is long or half a character is left out."""
        super().__init__(_printable(message))
        self.path = _printable(path)


def _printable(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    half = MAX_ERROR_CHARS
    return text if len(text) <= 2 * half else f"{text[: half - 1]}… {text[1 - half :]}"


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
        self.special_token_ids = {
            pieces[token].decode(): token for token in special if _is_text(pieces[token])
        }
        """Those with a name, by it."""
        self.end_names = frozenset(
            name for name, token in self.special_token_ids.items() if token in self.eos_ids
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


def _is_text(piece: bytes) -> bool:
    try:
        return len(piece.decode()) > 1
    except UnicodeDecodeError:
        return False


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
            return self._vocabulary.end_mask.copy(), one_line(str(error))
        self.mask_s = time.thread_time() - began
        words = self._vocabulary.complete(mask, may_end=matcher.is_accepting())
        if words.any():
            return words, None
        why = one_line(matcher.get_error()) if matcher.is_error() else ""
        dead_end = not why or "NoExtension" in why
        return self._vocabulary.end_mask.copy(), "a dead end" if dead_end else why


def one_line(text: str) -> str:
    """An error of llguidance's without its excerpts of the source, which are indented."""
    lines = [line.strip() for line in text.splitlines() if not line[:1].isspace()]
    line = re.sub(r"\s*<non-verbose/>", "", " ".join(filter(None, lines)))
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    if len(line) <= MAX_ERROR_CHARS:
        return line
    half = MAX_ERROR_CHARS // 2 - 1
    return f"{line[:half]}… {line[-half:]}"
