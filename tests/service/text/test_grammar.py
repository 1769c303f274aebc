"""Constraints: every text they let through has the form, and they say the same ahead as step by
step. Random walks take the place of a model that wants anything at all."""

from __future__ import annotations

import asyncio
import codecs
import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.plan import Constraint
from engine.tiny import MODEL_DIR
from service.config import GrammarLimits, SettingError
from service.text import grammar as module
from service.text.grammar import (
    MAX_ERROR_CHARS,
    Form,
    GrammarConstraint,
    GrammarError,
    Grammars,
)
from service.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

FIXTURES = Path(__file__).parents[1] / "fixtures"
SIZES = {"byte_level": 437, "sentencepiece": 437, "tiny": 4096}
"""The model's vocabulary: not that of the tokenizer, nor a multiple of 32."""


def load(name: str) -> Tokenizer:
    """With a second end token, as many models have one."""
    tokenizer = Tokenizer.load(MODEL_DIR if name == "tiny" else FIXTURES / name)
    if name != "tiny":
        tokenizer.eos_ids = (*tokenizer.eos_ids, 3)
    return tokenizer


TOKENIZERS = {name: load(name) for name in SIZES}
GRAMMARS = {name: Grammars(TOKENIZERS[name], vocab_size=SIZES[name]) for name in SIZES}

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "médium", "großer 🦊"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 20}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["name", "size", "where"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def ids_of(mask: NDArray[np.uint32]) -> list[int]:
    """Tokens a mask allows, by the contract's own words."""
    return [t for t in range(32 * len(mask)) if int(mask[t // 32]) >> (t % 32) & 1]


def walk(
    constraint: Constraint, eos_ids: Sequence[int], rng: random.Random, *, most: int = 400
) -> list[int]:
    """Random allowed tokens up to an end token, which is not in the result. An early end is
    unlikely, a late one is not: after a while every chance to end is taken."""
    ids: list[int] = []
    while len(ids) < most:
        mask = constraint.mask(ids[len(ids) :])
        assert mask is not None
        allowed = ids_of(mask)
        assert allowed, "at least one token always is"
        ends = [token for token in allowed if token in eos_ids]
        others = [token for token in allowed if token not in eos_ids]
        if ends and (not others or len(ids) > 40 or rng.random() < 0.1):
            constraint.advance([rng.choice(ends)])
            return ids
        ids.append(rng.choice(others))
        constraint.advance(ids[-1:])
    raise AssertionError(f"{most} tokens and no end")


async def texts(name: str, form: Form, source: str, walks: int) -> list[str]:
    compiled = await GRAMMARS[name].compile(form, source)
    found = []
    for seed in range(walks):
        constraint = compiled.constraint()
        ids = walk(constraint, TOKENIZERS[name].eos_ids, random.Random(seed))
        assert constraint.failure is None
        found.append(decode(name, ids))
    return found


def decode(name: str, ids: Sequence[int]) -> str:
    """As a stream shows it after a prompt."""
    stream = TOKENIZERS[name].stream(TOKENIZERS[name].encode("x"))
    return "".join([stream.feed(token) for token in ids] + [stream.finish()])


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "schema", [ORDER, TREE, {"enum": [1, "zwei", None]}], ids=["nested", "recursive", "enum"]
)
async def test_every_path_satisfies_the_schema(name: str, schema: dict[str, Any]) -> None:
    # Without free white space: a random walk would fill the text with it.
    strict = schema | {"x-guidance": {"whitespace_flexible": False}}
    for text in await texts(name, "json_schema", json.dumps(strict), 15):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "regex", ["[a-c]{2,5}(é|🦊|ß)+[0-9]{2}", "(yes|no|maybe so)", "[α-ω]{3} [一-三]", ""]
)
async def test_every_path_matches_the_regex(name: str, regex: str) -> None:
    for text in await texts(name, "regex", regex, 15):
        assert re.fullmatch(regex, text)


async def test_a_grammar_can_recurse() -> None:
    lark = 'start: "(" start ")" | "ab" | "é"'
    for text in await texts("tiny", "grammar", lark, 25):
        assert text.count("(") == text.count(")")
        assert text.strip("()") in {"ab", "é"}


@pytest.mark.parametrize("name", SIZES)
async def test_looking_ahead_is_the_same_as_going_there(name: str) -> None:
    """mask(drafted) is what a fresh constraint says that was advanced one token at a time; drafts
    that are not allowed, wherever, give None; and none of it moves anything."""
    compiled = await GRAMMARS[name].compile("json_schema", json.dumps(ORDER))
    check_ahead(compiled.constraint, TOKENIZERS[name].eos_ids, SIZES[name])


def check_ahead(
    make: Callable[[], Constraint], eos_ids: Sequence[int], vocab_size: int, rounds: int = 40
) -> None:
    rng = random.Random(7)
    constraint, done = make(), list[int]()
    for _ in range(rounds):
        drafts: list[int] = []
        fresh = make()
        for token in done:
            fresh.advance([token])
        for depth in range(5):
            allowed = fresh.mask([])
            assert allowed is not None
            ahead = constraint.mask(drafts)
            assert ahead is not None
            assert np.array_equal(ahead, allowed)
            bad = rng.randrange(vocab_size)
            if bad not in ids_of(allowed):
                assert constraint.mask([*drafts, bad]) is None
                assert constraint.mask([*drafts, bad, *eos_ids[:1]]) is None
            drafts.append(rng.choice(ids_of(allowed)))
            fresh.advance(drafts[-1:])
            if rng.random() < 0.3:  # not always asked in order
                assert constraint.mask(drafts[: rng.randrange(depth + 1)]) is not None
        taken = drafts[: rng.randrange(len(drafts) + 1)]
        constraint.advance(taken)
        done += taken
        if set(eos_ids) & set(done):
            constraint, done = make(), []


async def test_looking_ahead_must_not_advance() -> None:
    """Mutation: without the copy a draft moves the row."""
    compiled = await GRAMMARS["tiny"].compile("json_schema", json.dumps(ORDER))

    class Moved(GrammarConstraint):
        def _after(self, drafted: tuple[int, ...]) -> Any:
            return self._matcher if self._takes(self._matcher, drafted) else None

    def make() -> Constraint:
        return Moved(compiled._matcher.deep_copy(), compiled._vocabulary)

    with pytest.raises(AssertionError):
        check_ahead(make, TOKENIZERS["tiny"].eos_ids, SIZES["tiny"])


@pytest.mark.parametrize("name", SIZES)
async def test_masks_have_the_models_width_and_no_foreign_bits(name: str) -> None:
    tokenizer, size = TOKENIZERS[name], SIZES[name]
    compiled = await GRAMMARS[name].compile("regex", "(?s:.)*")
    mask = compiled.constraint().mask([])
    assert mask is not None
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-size // 32),)
    allowed = set(ids_of(mask))
    # Whatever begins a text may come, and the end; no special token else.
    text = {t for t in range(size) if begins_a_text(tokenizer.token_bytes(t) or b"\xff")}
    assert allowed == text - tokenizer.special_ids | set(tokenizer.eos_ids)
    assert max(allowed) < tokenizer.vocab_size


def begins_a_text(piece: bytes) -> bool:
    """Is UTF-8 as far as it goes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(piece)
    except UnicodeDecodeError:
        return False
    return True


async def test_tokens_that_are_spelt_alike_are_allowed_alike() -> None:
    """SentencePiece has `a` as a token and as a byte."""
    tokenizer = TOKENIZERS["sentencepiece"]
    twins = [t for t in range(SIZES["sentencepiece"]) if tokenizer.token_bytes(t) == b"a"]
    assert len(twins) == 2
    compiled = await GRAMMARS["sentencepiece"].compile("regex", "a(b|c)")
    mask = compiled.constraint().mask([])
    assert mask is not None
    assert ids_of(mask) == twins
    for twin in twins:
        constraint = compiled.constraint()
        assert constraint.mask([twin]) is not None
        constraint.advance([twin])
        assert constraint.failure is None


async def test_where_the_text_is_forced_every_spelling_of_it_is_allowed() -> None:
    """The law is the model's over all tokens that fit, not the tokenizer's favourite."""
    tokenizer = TOKENIZERS["tiny"]
    compiled = await GRAMMARS["tiny"].compile("regex", "return")
    mask = compiled.constraint().mask([])
    assert mask is not None
    fitting = {t for t in range(4096) if b"return".startswith(tokenizer.token_bytes(t) or b"?")}
    assert set(ids_of(mask)) == fitting
    assert len(fitting) >= 3


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
async def test_a_character_split_over_tokens(name: str) -> None:
    """Each of its bytes has to be followed by its next one."""
    compiled = await GRAMMARS[name].compile("regex", "🦊{2}")
    constraint = compiled.constraint()
    tokenizer = TOKENIZERS[name]
    for byte in "🦊🦊".encode():
        mask = constraint.mask([])
        assert mask is not None
        wanted = [t for t in ids_of(mask) if tokenizer.token_bytes(t) == bytes([byte])]
        assert wanted
        assert all(
            "🦊🦊".encode().find(tokenizer.token_bytes(t) or b"?") >= 0 for t in ids_of(mask)
        )
        constraint.advance(wanted[:1])
    mask = constraint.mask([])
    assert mask is not None
    assert tuple(ids_of(mask)) == tuple(sorted(tokenizer.eos_ids))


async def test_end_tokens_come_where_the_text_may_end_and_nowhere_else() -> None:
    tokenizer = TOKENIZERS["tiny"]
    ends = set(tokenizer.eos_ids)
    assert len(ends) == 2
    compiled = await GRAMMARS["tiny"].compile("regex", "ab*")
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    constraint = compiled.constraint()
    first = constraint.mask([])
    assert first is not None
    assert not ends & set(ids_of(first))
    for end in ends:
        assert constraint.mask([end]) is None
        after = constraint.mask([a, b, end])
        assert after is not None
        assert set(ids_of(after)) == ends
        assert constraint.mask([a, end, b]) is None
    constraint.advance([a])
    now = constraint.mask([])
    assert now is not None
    assert {b, *ends} <= set(ids_of(now))
    constraint.advance([b, tokenizer.eos_ids[0]])
    closed = constraint.mask([])
    assert closed is not None
    assert set(ids_of(closed)) == ends
    assert constraint.mask([b]) is None
    assert constraint.failure is None


async def test_rows_do_not_share_what_they_have_said() -> None:
    compiled = await GRAMMARS["tiny"].compile("regex", "a{3}")
    one, two = compiled.constraint(), compiled.constraint()
    (a,) = TOKENIZERS["tiny"].encode("a")
    one.advance([a])
    assert two.mask([a, a, a, a]) is None
    assert two.mask([a, a, a]) is not None
    assert one.mask([a, a, a]) is None


async def test_special_tokens_can_be_named() -> None:
    tokenizer = TOKENIZERS["tiny"]
    compiled = await GRAMMARS["tiny"].compile("grammar", 'start: <|im_start|> "x"')
    mask = compiled.constraint().mask([])
    assert mask is not None
    (token,) = ids_of(mask)
    assert tokenizer.decode([token], skip_special_tokens=False) == "<|im_start|>"


async def test_an_emitted_token_that_breaks_the_form_is_noticed() -> None:
    compiled = await GRAMMARS["tiny"].compile("regex", "a")
    constraint = compiled.constraint()
    constraint.advance(TOKENIZERS["tiny"].encode("b"))
    assert constraint.failure is not None
    mask = constraint.mask([])
    assert mask is not None
    assert set(ids_of(mask)) == set(TOKENIZERS["tiny"].eos_ids)


async def test_a_dead_end_ends_the_text_and_says_so() -> None:
    """No text is `a` followed by infinitely many `b`, which shows only on the way."""
    tokenizer = TOKENIZERS["tiny"]
    compiled = await GRAMMARS["tiny"].compile("grammar", 'start: "a" x\nx: x "b"')
    constraint = compiled.constraint()
    (a,) = tokenizer.encode("a")
    assert constraint.failure is None
    ahead = constraint.mask([a])
    assert ahead is not None
    assert constraint.failure is None  # it has not come there yet
    constraint.advance([a])
    mask = constraint.mask([])
    assert mask is not None
    assert set(ids_of(mask)) == set(tokenizer.eos_ids) == set(ids_of(ahead))
    assert constraint.failure == "a dead end"


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
    monkeypatch.setattr(module, "_SLOW_MASK_S", -1.0)  # every mask is slow now
    for _ in range(module._SLOW_MASKS):
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
    assert len(grammars._cache) == 2
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
    limits = GrammarLimits(memory_bytes=1 << 26, timeout_s=5.0)
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096, limits=limits)
    said = "longer than 5 s" if sys.platform == "darwin" else "too much memory"
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
