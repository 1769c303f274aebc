"""Parts of a text, put together as a grammar that llguidance reads as it is meant.

llguidance cuts a text into lexemes, each as long as it can be, and a grammar sees those. A part
that could go on with what is to follow it swallows the follower, and texts of the language would be
refused. So neighbours that are regular become one lexeme, for which nothing is cut, and of every
other border it is checked that no text can cross it: by the strings with which parts begin, and
those with which a whole text of a part could go on. What cannot be told apart is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]  # the library has no public one
from typing import Any, Final

from service.text.effort import Effort
from service.text.schema import with_bounded_space

Atoms = tuple[str, ...]
"""A string: characters, and names of special tokens, which are longer, as one atom each."""

ANY_SPECIAL: Final = ("",)
"""Stands for any special token."""
ANYTHING: Final[frozenset[Atoms]] = frozenset({()})
"""Any text, as what a part begins with."""
NOTHING: Final[frozenset[Atoms]] = frozenset()

_VALUE: Final = ("value",)
"""No text begins so: between two values llguidance lets white space through, so they never meet."""

_MAX_START: Final = 200
"""Atoms of a start that are looked at."""
_MAX_RANGE: Final = 300
_NESTED: Final = re.compile(r"\[\[|\[[^\]]*(--|&&|~~|\|\|)")
"""Sets within sets, of which Python warns that it does not know them."""


class BorderError(Exception):
    """Two parts that cannot be told apart; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A set of texts."""

    rule: str
    """In a rule of Lark; for a regular part the same as `terminal`."""
    terminal: str | None
    """In a terminal of Lark, where it is regular and names no special token."""
    starts: frozenset[Atoms]
    """Each of its texts that is not empty begins with one of these."""
    goes_on: frozenset[Atoms]
    """Where a text of it is the beginning of a longer one, that goes on with one of these."""
    may_be_empty: bool = False
    literal: Atoms | None = None
    """Its only text, where it has one."""
    bars: tuple[str, ...] = ()
    """For free text: what must not occur in it."""
    items: tuple[Part, ...] = ()
    """Of a sequence."""
    schema: Any = None
    """Of a JSON value."""


def meet(left: frozenset[Atoms], right: frozenset[Atoms]) -> bool:
    """Whether some string of one side begins with one of the other."""
    return _begun(left, right) or _begun(right, left)


def _begun(strings: frozenset[Atoms], by: frozenset[Atoms]) -> bool:
    """Whether some of `strings` begins with one of `by`."""
    lengths = {len(string) for string in by if string and string != ANY_SPECIAL}
    return any(
        (() in by and not _is_special(s))
        or (ANY_SPECIAL in by and _is_special(s))
        or any(s[:n] in by for n in lengths if n <= len(s))
        for s in strings
    )


def _is_special(string: Atoms) -> bool:
    """Whether a special token is its first atom."""
    return bool(string) and len(string[0]) != 1


def literal(atoms: Sequence[str]) -> Part:
    """One text."""
    atoms = tuple(atoms)
    special = any(len(atom) > 1 for atom in atoms)
    text = "".join(atoms)
    return Part(
        rule="" if special else quoted(text),
        terminal=None if special else quoted(text),
        starts=frozenset({atoms[:_MAX_START]}) if atoms else NOTHING,
        goes_on=NOTHING,
        may_be_empty=not atoms,
        literal=atoms,
    )


def quoted(text: str) -> str:
    """As a string of Lark, which is escaped as JSON's are."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str, lark: str) -> Part:
    """`pattern` in the syntax of Rust's regex crate; `lark` is the same as a terminal."""
    alphabet = alphabet_of(pattern)
    more = ANYTHING if alphabet is None else frozenset((char,) for char in alphabet)
    return Part(rule=lark, terminal=lark, starts=more, goes_on=more, may_be_empty=True)


def value(schema: Any, starts: Iterable[str], goes_on: Iterable[str]) -> Part:
    """A JSON value; `starts` and `goes_on` are characters."""
    return _value(
        schema,
        frozenset({_VALUE, *((char,) for char in starts)}),
        frozenset({_VALUE, *((char,) for char in goes_on)}),
    )


def _value(schema: Any, starts: frozenset[Atoms], goes_on: frozenset[Atoms]) -> Part:
    rule = f"%json {with_bounded_space(json.dumps(schema))}"
    return Part(rule=rule, terminal=None, starts=starts, goes_on=goes_on, schema=schema)


def _values_as_one(alternatives: Sequence[Part]) -> list[Part]:
    """Values as one value: llguidance lets white space through before one of several. Those that
    refer to parts of their own schemas stay as they are."""
    values = [p for p in alternatives if p.schema is not None and "$ref" not in p.rule]
    if len(values) < 2:
        return list(alternatives)
    others = [part for part in alternatives if part not in values]
    starts = frozenset(s for part in values for s in part.starts)
    goes_on = frozenset(s for part in values for s in part.goes_on)
    return [*others, _value({"anyOf": [part.schema for part in values]}, starts, goes_on)]


def unknown(rule: str) -> Part:
    """A grammar of which nothing is known."""
    every = frozenset({(), ANY_SPECIAL})
    return Part(rule=rule, terminal=None, starts=every, goes_on=every, may_be_empty=True)


def free(bars: Iterable[str]) -> Part:
    """Any text in which none of `bars` occurs."""
    bars = _shortest(bars)
    lark = f"(ANY & ~(ANY {_choice(bars)} ANY))" if bars else "ANY"
    return Part(
        rule=lark, terminal=lark, starts=ANYTHING, goes_on=ANYTHING, may_be_empty=True, bars=bars
    )


def until(ends: Iterable[str], bars: Iterable[str] = ()) -> Part:
    """Any text up to and with the first of `ends`, before which none of `bars` occurs.

    Raises BorderError where one of `bars` occurs in an end."""
    ends = _shortest(ends)
    bars = tuple(bar for bar in _shortest(bars) if not any(end in bar for end in ends))
    for bar in bars:
        if held := next((end for end in ends if bar in end), None):
            raise BorderError(f"{quoted(bar)} occurs in {quoted(held)}, which could never come")
    end = _choice(ends)
    lark = f"((ANY {end}) & ~(ANY {end} SOME)"
    lark += f" & ~(ANY {_choice(bars)} ANY))" if bars else ")"
    return Part(rule=lark, terminal=lark, starts=ANYTHING, goes_on=NOTHING)


def _choice(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(quoted, texts))})"


def _shortest(texts: Iterable[str]) -> tuple[str, ...]:
    """Without those that hold another one: where they occur, that does."""
    kept: list[str] = []
    for text in sorted(set(texts), key=lambda text: (len(text), text)):
        if not any(other in text for other in kept):
            kept.append(text)
    return tuple(kept)


class Writer:
    """Puts parts together, and collects the terminals they need. Raises GrammarError, from wherever
    that is noticed, when it takes too much."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` are those of the special tokens."""
        self._ids = ids
        self._terminals: dict[str, str] = {}
        self._effort = Effort()

    def spent(self, part: Part) -> Part:
        """The same; what it cost counts. Raises GrammarError when all do too much."""
        self._effort.spend(len(part.rule))
        return part

    def lark(self, part: Part) -> str:
        """The whole grammar."""
        start = self.rule(part)
        lines = [f"start: {start}", "ANY: /(?s:.*)/", "SOME: /(?s:.+)/"]
        return "\n".join([*lines, *(f"{name}: {t}" for t, name in self._terminals.items())])

    def rule(self, part: Part) -> str:
        """`part` in a rule."""
        if part.literal is not None:
            return " ".join(
                f"<[{self._ids[run[0]]}]>" if len(run[0]) > 1 else quoted("".join(run))
                for run in _runs(part.literal)
            ) or quoted("")
        if part.terminal is None or part.terminal == "ANY":
            return part.rule
        return self._terminals.setdefault(part.terminal, f"T{len(self._terminals)}")

    def sequence(self, parts: Iterable[Part]) -> Part:
        """One after the other. Raises BorderError."""
        merged: list[Part] = []
        for part in _flat(parts):
            self._effort.spend()
            before = merged[-1] if merged else None
            if before and before.terminal is not None and part.terminal is not None:
                merged[-1] = _joined(before, part)
            else:
                merged.append(part)
        if not merged:
            return literal(())
        whole = merged[0]
        for part in merged[1:]:
            self._effort.spend()
            if meet(whole.goes_on, part.starts):
                raise BorderError("where it ends cannot be told from what follows it")
            whole = _followed(whole, part, rule="")
        if len(merged) == 1:
            return whole
        rule = f"({' '.join(map(self.rule, merged))})"
        return _followed(whole, literal(()), rule=rule, items=tuple(merged))

    def either(self, parts: Sequence[Part]) -> Part:
        """One of them. Raises BorderError."""
        if len(parts) == 1:
            return parts[0]
        regular = all(part.terminal is not None for part in parts)
        distinct = list(parts) if regular else _values_as_one(self._by_head(parts))
        if len(distinct) == 1:
            return distinct[0]
        alike = _alike(distinct)
        if alike and not regular:
            raise BorderError("two of its alternatives begin alike and cannot be told apart")
        starts = frozenset(s for part in distinct for s in part.starts)
        goes_on = frozenset(s for part in distinct for s in part.goes_on)
        empty = any(part.may_be_empty for part in distinct)
        if alike:
            goes_on = _longer(distinct)
        elif empty:
            goes_on |= starts
        if regular:
            rule = f"({' | '.join(str(part.terminal) for part in distinct)})"
        else:
            rule = f"({' | '.join(map(self.rule, distinct))})"
        return Part(
            rule=rule,
            terminal=rule if regular else None,
            starts=starts,
            goes_on=goes_on,
            may_be_empty=empty,
        )

    def _by_head(self, parts: Sequence[Part]) -> list[Part]:
        """Alternatives that begin with the same text, or one with another's, as one."""
        split = sorted(((*_head(part), n) for n, part in enumerate(parts)), key=lambda x: x[0])
        groups: list[tuple[Atoms, list[list[Part]]]] = []
        for head, rest, _ in split:
            self._effort.spend()
            if head and groups and (first := groups[-1][0]) and head[: len(first)] == first:
                groups[-1][1].append([literal(head[len(first) :]), *rest])
            else:
                groups.append((head, [list(rest)]))
        distinct = []
        for head, rests in groups:
            after = self.either([self.sequence(rest) for rest in rests])
            distinct.append(self.sequence([literal(head), after]))
        return distinct

    def repeat(self, part: Part, least: int, most: int | None) -> Part:
        """`least` to `most` times; None is no bound. Raises BorderError."""
        if most == 0 or part.literal == ():
            return literal(())
        clash = most != 1 and meet(part.goes_on, part.starts)
        if clash and part.terminal is None:
            raise BorderError("where it ends cannot be told from its next repetition")
        body = f"({part.terminal if part.terminal is not None else self.rule(part)})"
        rule = f"{body}{{{least},{'' if most is None else most}}}"
        more = part.goes_on | part.starts
        return Part(
            rule=rule,
            terminal=rule if part.terminal is not None else None,
            starts=part.starts,
            goes_on=ANYTHING if clash else more,
            may_be_empty=least == 0 or part.may_be_empty,
        )


def _runs(atoms: Atoms) -> list[list[str]]:
    """Characters together, special tokens one by one."""
    runs: list[list[str]] = []
    for atom in atoms:
        if runs and len(atom) == 1 and len(runs[-1][0]) == 1:
            runs[-1].append(atom)
        else:
            runs.append([atom])
    return runs


def _flat(parts: Iterable[Part]) -> Iterable[Part]:
    for part in parts:
        if part.items:
            yield from _flat(part.items)
        elif part.literal is not None:
            yield from (literal(run) for run in _runs(part.literal))
        else:
            yield part


def _head(part: Part) -> tuple[Atoms, list[Part]]:
    """The text it begins with, and what follows that."""
    items = list(_flat([part]))
    head: list[str] = []
    while items and items[0].literal is not None:
        head += items.pop(0).literal or ()
    return tuple(head), items


def _joined(left: Part, right: Part) -> Part:
    """Two regular parts as one."""
    if left.literal is not None and right.literal is not None:
        return literal(left.literal + right.literal)
    rule = f"({left.terminal} {right.terminal})"
    whole = _followed(left, right, rule=rule, terminal=rule)
    if meet(left.goes_on, right.starts) and not _barred(left, right):
        return _followed(
            whole,
            Part(rule="", terminal="", starts=NOTHING, goes_on=ANYTHING),
            rule=rule,
            terminal=rule,
        )
    return whole


def _barred(left: Part, right: Part) -> bool:
    """Free text in which what follows it cannot occur, not even in part across the border."""
    if right.may_be_empty or not left.bars:
        return False
    used = {bar for s in right.starts for bar in left.bars if s[: len(bar)] == tuple(bar)}
    if any(not any(s[: len(bar)] == tuple(bar) for bar in used) for s in right.starts):
        return False
    return not any(
        one[-n:] == other[:n] for one in used for other in used for n in range(1, len(one))
    )


def _followed(
    left: Part, right: Part, *, rule: str, terminal: str | None = None, items: tuple[Part, ...] = ()
) -> Part:
    """What is known of one after the other, provided that their border is clear."""
    return Part(
        rule=rule,
        terminal=terminal,
        starts=left.starts | right.starts if left.may_be_empty else left.starts,
        goes_on=right.goes_on | left.goes_on if right.may_be_empty else right.goes_on,
        may_be_empty=left.may_be_empty and right.may_be_empty,
        items=items,
    )


def _alike(parts: Sequence[Part]) -> bool:
    """Whether one may begin as another does, or with it."""
    if sum(part.may_be_empty for part in parts) > 1:
        return True
    wild = frozenset({(), ANY_SPECIAL})
    if any(part.starts & wild for part in parts):
        return any(
            meet(one.starts, other.starts) for n, one in enumerate(parts) for other in parts[:n]
        )
    entries = sorted((start, n) for n, part in enumerate(parts) for start in part.starts)
    begun: list[tuple[Atoms, int]] = []  # each begins with the one before
    for start, n in entries:
        while begun and start[: len(begun[-1][0])] != begun[-1][0]:
            begun.pop()
        if any(other != n for _, other in begun):
            return True
        begun.append((start, n))
    return False


def _longer(parts: Sequence[Part]) -> frozenset[Atoms]:
    """How a text of one of several regular parts can go on, where they begin alike."""
    texts = [part.literal for part in parts]
    if any(text is None for text in texts):
        return ANYTHING
    known = {text for text in texts if text is not None}
    lengths = sorted({len(text) for text in known})
    return frozenset(
        text[n:][:_MAX_START]
        for text in known
        for n in lengths
        if n < len(text) and text[:n] in known
    )


def alphabet_of(pattern: str) -> frozenset[str] | None:
    """Characters that texts of `pattern` can have, or a few more; None: any. Only for patterns
    that mean the same to Python and to Rust."""
    if "{," in pattern or "(?" in pattern.replace("(?:", "") or _NESTED.search(pattern):
        return None
    try:
        parsed = _parser.parse(pattern)
        return frozenset(_characters(parsed))
    except (re.error, RecursionError, OverflowError, LookupError):
        return None


def _characters(parsed: Iterable[tuple[Any, Any]]) -> set[str]:
    """Raises LookupError for what may be any character."""
    found: set[str] = set()
    for code, what in parsed:
        match str(code):
            case "LITERAL":
                found.add(chr(what))
            case "IN":
                found |= _class(what)
            case "BRANCH":
                found |= {char for part in what[1] for char in _characters(part)}
            case "SUBPATTERN":
                found |= _characters(what[-1])
            case "MAX_REPEAT" | "MIN_REPEAT":
                found |= _characters(what[-1])
            case other:
                raise LookupError(other)
    return found


def _class(members: Iterable[tuple[Any, Any]]) -> set[str]:
    found: set[str] = set()
    for code, what in members:
        match str(code):
            case "LITERAL" if chr(what) != "[":  # Rust would read a class in it
                found.add(chr(what))
            case "RANGE" if what[1] - what[0] < _MAX_RANGE and not what[0] <= ord("[") <= what[1]:
                found |= {chr(code) for code in range(what[0], what[1] + 1)}
            case other:
                raise LookupError(other)
    return found
