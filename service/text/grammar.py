"""Compiles JSON schemas, regular expressions and Lark grammars, with llguidance, off the event loop
and first in a process that may die of them."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from service.aside import LARGE, aside
from service.config import GrammarLimits
from service.text.constraint import CompiledGrammar, GrammarError, Vocabulary, one_line
from service.text.probe import special_ids
from service.text.schema import check_schema, with_bounded_space
from service.text.structural_tag import structural_lark
from service.text.tokenizer import Tokenizer
from service.text.turns import Turns

Form = Literal["json_schema", "regex", "grammar", "structural_tag"]
"""The fields of the API that constrain a text."""

_LIMITS: Final[dict[str, Any]] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Of llguidance. They keep a mask, which the engine waits for, within tens of milliseconds in the
worst case, and a grammar within some hundred megabytes."""


class Grammars:
    """Compiles the grammars of one server's requests, off its event loop, and keeps some.

    Tenants with a policy, and all others together, share both fairly: each may use what others
    leave. When a kept grammar must go, it is one of the tenant that has most of them; no tenant
    finds what another left, nor can tell whether it did. Turns at compiling are `Turns`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        limits: GrammarLimits | None = None,
        tenants: Collection[str] = (),
    ) -> None:
        """`tenants`: those with a policy."""
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._tenants = frozenset(tenants)
        self._cache: dict[str, OrderedDict[bytes, CompiledGrammar]] = {}
        """By tenant; of those that have any."""
        self._turns = Turns(self.limits.at_once, reserve=bool(self._tenants))

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

    async def compile(self, form: Form, text: str, tenant: str = "") -> CompiledGrammar:
        """Raises GrammarError: too large, broken, beyond the limits, or no text satisfies it."""
        await aside(partial(self._check_size, form, text), len(text) > LARGE)
        tenant = tenant if tenant in self._tenants else ""
        key = hashlib.sha256(f"{form}\0{text}".encode()).digest()
        if (known := self._cached(tenant, key)) is not None:
            return known
        await anyio.to_thread.run_sync(self.prepare, abandon_on_cancel=True)
        assert self._vocabulary is not None
        vocabulary = self._vocabulary
        with anyio.move_on_after(self.limits.timeout_s):
            async with self._turns.turn(tenant):
                if (known := self._cached(tenant, key)) is None:
                    known = await self._compile(form, text, vocabulary)
                    self._keep(tenant, key, known)
            return known
        raise GrammarError(f"takes longer than {self.limits.timeout_s:g} s to compile")

    def _cached(self, tenant: str, key: bytes) -> CompiledGrammar | None:
        mine = self._cache.get(tenant, OrderedDict())
        if key in mine:
            mine.move_to_end(key)
        return mine.get(key)

    def _keep(self, tenant: str, key: bytes, grammar: CompiledGrammar) -> None:
        """Of those that have most, whoever keeps one more gives one, if it is among them."""
        self._cache.setdefault(tenant, OrderedDict())[key] = grammar
        while sum(map(len, self._cache.values())) > self.limits.cached:
            giver = max(self._cache, key=lambda name: (len(self._cache[name]), name == tenant))
            self._cache[giver].popitem(last=False)
            if not self._cache[giver]:
                del self._cache[giver]

    def _check_size(self, form: Form, text: str) -> None:
        if len(text) > self.limits.max_chars:
            raise GrammarError(f"at most {self.limits.max_chars} characters, is {len(text)}")
        if not self._can_end:
            raise GrammarError("this model has no end token, so no text could be complete")
        if form == "json_schema":
            check_schema(text, self.limits.max_depth)
        elif form == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
            raise GrammarError("ends in a lone backslash")  # llguidance would leave it out

    async def _compile(self, form: Form, text: str, vocabulary: Vocabulary) -> CompiledGrammar:
        if form == "structural_tag":
            read = partial(self._structural, text, vocabulary)
            long = len(text) > LARGE
            source = await aside(partial(read, vocabulary.special_token_ids), long)
            # The process that tries it has a vocabulary of its own.
            tried = await aside(partial(read, special_ids(vocabulary.special_tokens)), long)
        else:
            source = tried = _source(form, text)
        await self._probe(tried, vocabulary)

        def build() -> CompiledGrammar:
            limits = LLParserLimits(**_LIMITS)
            matcher = LLMatcher(vocabulary.raw, source, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(one_line(matcher.get_error()))
            return CompiledGrammar(matcher, vocabulary)

        return await anyio.to_thread.run_sync(build, abandon_on_cancel=True)

    def _structural(self, text: str, vocabulary: Vocabulary, ids: Mapping[str, int]) -> str:
        return structural_lark(
            text,
            ids={name: ids[name] for name in vocabulary.special_token_ids},
            end_names=vocabulary.end_names,
            max_depth=self.limits.max_depth,
            tail=_ALL_SPELLINGS,
        )

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
            raise GrammarError(one_line(error))


# Without it llguidance allows, where the text is forced, only the token that the tokenizer would
# write there, and calls others valid all the same: the law of what is drawn is not the model's
# then, and what a draft may be not what the target may.
_ALL_SPELLINGS: Final = '\n%llguidance {"no_forcing": true}\n'


def _source(form: Literal["json_schema", "regex", "grammar"], text: str) -> str:
    """The grammar as Lark."""
    match form:
        case "json_schema":
            return f"start: %json {with_bounded_space(text)}{_ALL_SPELLINGS}"
        case "regex":
            return f"start: /{regex_to_lark(text, '')}/{_ALL_SPELLINGS}"
        case "grammar":
            return f"{text}{_ALL_SPELLINGS}"
