"""Grammars that cannot be compiled, or only at a price: an error in time, and nothing worse."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import anyio
import pytest
from llguidance import LLMatcher

from service.config import GrammarLimits, SettingError
from service.text import constraint as constraints
from service.text import grammar as module
from service.text.constraint import MAX_ERROR_CHARS, GrammarError
from service.text.grammar import Form, Grammars
from tests.service.text.walks import (
    GRAMMARS,
    TOKENIZERS,
    ids_of,
    load,
)

pytestmark = pytest.mark.anyio

DEEP = json.dumps(
    {
        "$defs": {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(2500)}
        | {"2500": {"type": "string"}},
        "$ref": "#/$defs/0",
    }
)
BROKEN: dict[str, tuple[Form, str, str]] = {
    "no JSON": ("json_schema", '{"type":', "is not JSON: Expecting value"),
    "no object": ("json_schema", "[1]", "must be a JSON object"),
    "no type": ("json_schema", '{"type": "thing"}', "Invalid type: thing"),
    "unenforceable": ("json_schema", '{"not": {"type": "null"}}', 'Unimplemented keys: ["not"]'),
    "nowhere": ("json_schema", '{"$ref": "#/$defs/x"}', "does not exist"),
    "foreign": ("json_schema", '{"$ref": "https://example.test/x"}', "not present in a registry"),
    "unsatisfiable": ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
    "never": ("json_schema", "false", "Unsatisfiable schema"),
    "circle": ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
    "1 MB": ("json_schema", json.dumps({"enum": ["x" * 1_000_000]}), "at most 131072 characters"),
    "deep": ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "nested at most 64 deep"),
    "abyss": ("json_schema", "[" * 130_000, "nested at most 64 deep"),
    # Kills the process that compiles it.
    "deep by reference": ("json_schema", DEEP, "too deeply nested, or takes too much memory"),
    "deep rules": (
        "grammar",
        "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(5000)), 'r5000: "x"']),
        "too deeply nested",
    ),
    # Would take ten seconds and 400 MB.
    "multiples": ("json_schema", '{"type": "integer", "multipleOf": 999983}', "takes longer than"),
    "group": ("regex", "(a", "unclosed group"),
    "half an escape": ("regex", "a\\\\\\", "ends in a lone backslash"),
    "look-around": ("regex", "(?=a)b", "look-around"),
    "nothing": ("regex", r"[^\s\S]", "no text satisfies it"),
    "nested groups": ("regex", "(" * 30_000 + ")" * 30_000, "exceed the maximum number of nested"),
    "no rule": ("grammar", "nope", "Expected token ':'"),
    "empty": ("grammar", "", "no start rule found"),
    "unknown rule": ("grammar", "start: x", 'unknown name: "x"'),
    "end token": ("grammar", 'start: <|im_end|> "x"', "no text satisfies it"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_compiled_is_an_error_in_time(name: str) -> None:
    form, source, said = BROKEN[name]
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096, limits=GrammarLimits(timeout_s=1.5))
    started = time.monotonic()
    with pytest.raises(GrammarError) as caught:
        await grammars.compile(form, source)
    assert time.monotonic() - started < 4
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert len(text) <= MAX_ERROR_CHARS + 40


async def test_a_grammar_that_kills_its_compiler_must_be_tried_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: where the first try is left out, the grammar gets to this process."""
    reached: list[str] = []

    async def no_probe(self: Grammars, source: str, vocabulary: object) -> None:
        return None

    class Matcher:
        grammar_from_lark = LLMatcher.grammar_from_lark

        def __init__(self, tokenizer: object, source: str, **options: object) -> None:
            reached.append(source)
            raise GrammarError("would have died here")

    monkeypatch.setattr(Grammars, "_probe", no_probe)
    monkeypatch.setattr(module, "LLMatcher", Matcher)
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096)
    with pytest.raises(GrammarError, match="would have died"):
        await grammars.compile("grammar", BROKEN["deep rules"][1])
    assert reached


@pytest.mark.parametrize(
    "regex",
    ["(a|a)*b", "(.*)*x", "((a{1,1000}){1,1000}){1,1000}", "(a?){5000}a{5000}", "a{100000}"],
)
async def test_a_catastrophic_regex_costs_bounded_time(regex: str) -> None:
    """Each mask is quick, whatever the expression; where llguidance gives up the text ends."""
    compiled = await GRAMMARS["tiny"].compile("regex", regex)
    constraint, rng = compiled.constraint(), random.Random(1)
    worst = 0.0
    for _ in range(60):
        started = time.perf_counter()
        mask = constraint.mask([])
        worst = max(worst, time.perf_counter() - started)
        assert mask is not None
        assert (mask != 0).any()
        constraint.advance([rng.choice(ids_of(mask))])
    assert worst < 0.5


async def test_slow_masks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = await GRAMMARS["tiny"].compile("regex", "[ab]*")
    constraint = compiled.constraint()
    monkeypatch.setattr(constraints, "_SLOW_MASK_S", -1.0)  # every mask is slow now
    for _ in range(constraints._SLOW_MASKS):
        constraint.mask([])
        assert constraint.failure is None
    mask = constraint.mask([])
    assert mask is not None
    assert set(ids_of(mask)) == set(TOKENIZERS["tiny"].eos_ids)
    assert constraint.failure == "too complex here"
    with pytest.raises(GrammarError, match="ms per token"):
        await GRAMMARS["tiny"].compile("regex", "[abc]*")


async def test_compiled_grammars_are_kept_and_few() -> None:
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096, limits=GrammarLimits(cached=2))
    first = await grammars.compile("regex", "a")
    assert await grammars.compile("regex", "a") is first
    await grammars.compile("regex", "b")
    assert await grammars.compile("regex", "a") is first
    await grammars.compile("regex", "c")  # b was used longest ago
    assert await grammars.compile("regex", "a") is first
    assert sum(map(len, grammars._cache.values())) == 2
    # The same text in another form is another grammar.
    lark = await grammars.compile("grammar", 'start: "a"')
    assert lark is not await grammars.compile("regex", 'start: "a"')


async def test_a_model_without_end_tokens_takes_no_grammar() -> None:
    tokenizer = load("byte_level")
    tokenizer.eos_ids = (9999,)
    grammars = Grammars(tokenizer, vocab_size=437)
    grammars.prepare()  # a server of such a model starts all the same
    with pytest.raises(GrammarError, match="no end token"):
        await grammars.compile("regex", "a")


async def test_a_cancelled_compilation_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    make = asyncio.subprocess.Process.__init__

    def noted(self: asyncio.subprocess.Process, *parts: Any) -> None:
        make(self, *parts)
        started.append(self)

    monkeypatch.setattr(asyncio.subprocess.Process, "__init__", noted)
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096)
    with anyio.move_on_after(0.5) as limit:
        await grammars.compile("json_schema", '{"type": "integer", "multipleOf": 999983}')
    assert limit.cancelled_caught
    (process,) = started
    assert process.returncode is not None
    assert await grammars.compile("regex", "a")  # and the next one is not in its way
    assert [p.returncode for p in started[1:]] == [0]


async def test_memory_is_limited_where_the_system_can() -> None:
    """A process that takes more than it may dies; macOS has no such limit, and the deadline."""
    mac = sys.platform == "darwin"
    limits = GrammarLimits(memory_bytes=1 << 26, timeout_s=2.0 if mac else 30.0)
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096, limits=limits)
    said = "longer than 2 s" if mac else "too much memory"
    with pytest.raises(GrammarError, match=said):
        await grammars.compile("json_schema", '{"type": "integer", "multipleOf": 999983}')
    assert await grammars.compile("json_schema", '{"type": "integer", "multipleOf": 7}')


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_chars", 0), ("timeout_s", 0.0), ("memory_bytes", 10), ("cached", 0), ("at_once", 0)],
)
def test_limits_name_themselves(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=field):
        GrammarLimits(**{field: value})
