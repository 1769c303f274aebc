"""Constraints: every text they let through has the form, and they say the same ahead as step by
step."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.plan import Constraint
from service.text.constraint import GrammarConstraint
from tests.service.text.walks import (
    GRAMMARS,
    ORDER,
    SIZES,
    TOKENIZERS,
    TREE,
    decode,
    ids_of,
    texts,
)

pytestmark = pytest.mark.anyio


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


async def test_white_space_comes_to_an_end() -> None:
    """A model that would write nothing else has to go on after a while, wherever it is."""
    tokenizer = TOKENIZERS["byte_level"]
    compiled = await GRAMMARS["byte_level"].compile(
        "json_schema", '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 9}'
    )
    blank = {t for t in range(437) if not (tokenizer.token_bytes(t) or b"x").strip()}
    longest = 0
    for seed in range(10):
        constraint, rng, ids = compiled.constraint(), random.Random(seed), list[int]()
        while len(ids) < 200:
            mask = constraint.mask([])
            assert mask is not None
            allowed = ids_of(mask)
            token = rng.choice([t for t in allowed if t in blank] or allowed)
            if token in tokenizer.eos_ids:
                break
            ids.append(token)
            constraint.advance([token])
        found = re.findall(r"[ \n\r\t]+", decode("byte_level", ids))
        longest = max([longest, *map(len, found)])
    assert 10 <= longest <= 20


async def test_a_schema_without_demands_is_any_json() -> None:
    masks = []
    for schema in ("{}", " { } ", "true"):
        compiled = await GRAMMARS["tiny"].compile("json_schema", schema)
        masks.append(compiled.constraint().mask([]))
    assert all(np.array_equal(mask, masks[0]) for mask in masks)  # type: ignore[arg-type]


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
