"""Structural tags, format by format: what is let through, what is not, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from service.config import GrammarLimits
from service.text import parts
from service.text.constraint import GrammarError
from service.text.grammar import Grammars
from tests.service.text.structures import satisfies
from tests.service.text.test_grammar import check_ahead
from tests.service.text.walks import GRAMMARS, SIZES, TOKENIZERS, decode, walk

pytestmark = pytest.mark.anyio

INTEGER: Any = {"type": "integer"}
OBJECT: Any = {
    "type": "object",
    "properties": {"a": INTEGER},
    "required": ["a"],
    "additionalProperties": False,
}


def value(schema: Any, **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": schema, **fields}


def const(text: str) -> Any:
    return {"type": "const_string", "value": text}


def tag(begin: Any, content: Any, end: Any) -> Any:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def made(kind: str, **fields: Any) -> Any:
    return {"type": kind, **fields}


ANY = made("any_text")
TAGS = [tag("<f=a>", value(OBJECT), "</f>"), tag("<f=ab>", value(INTEGER), "</f>")]
CALLS = made("triggered_tags", triggers=["<f="], tags=TAGS)
XML = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "d"},
        "age": INTEGER,
        "kind": {"type": "string", "enum": ["x", "xy"]},
    },
    "required": ["name"],
}
FORMATS: dict[str, tuple[Any, list[str], list[str]]] = {
    "const_string": (const("héllo 🦊"), ["héllo 🦊"], ["", "héllo", "héllo 🦊!"]),
    "json_schema": (
        value(OBJECT),
        ['{"a":1}', '{ "a": -12 }'],
        ["{}", "{", '{"a":1} x', ' {"a":1}'],
    ),
    "regex": (made("regex", pattern="[a-c]+/x"), ["ab/x"], ["/x", "ab/xx"]),
    "EBNF": (
        made("grammar", grammar='root ::= "yes" | "no"'),
        ["yes", "no"],
        ["maybe", "", "yesno"],
    ),
    "Lark": (made("grammar", grammar='start: "(" start ")" | "x"'), ["((x))"], ["((x)"]),
    "any_text": (made("any_text", excludes=["bad"]), ["", "b ad\n", "ba"], ["bad", "a bad b"]),
    "sequence": (
        made("sequence", elements=[const("A: "), value(INTEGER), made("regex", pattern="[a-c]*")]),
        ["A: 1", "A: 20cab"],
        ["A: ", "A: 1d", "1"],
    ),
    "or": (
        made("or", elements=[const("yes"), value(OBJECT), const("yes sir"), value(INTEGER)]),
        ["yes", '{"a":1}', "yes sir", "-7"],
        ["yes ", "", " 7", "no"],
    ),
    "optional": (made("optional", content=value(OBJECT)), ["", '{"a":1}'], ['{"a":1}{"a":1}']),
    "plus": (made("plus", content=tag("(", value(INTEGER), ")")), ["(1)", "(1)(2)"], ["", "(1"]),
    "star": (
        made("star", content=made("or", elements=[const("ab"), const("a")])),
        ["", "aab"],
        ["b"],
    ),
    "repeat": (
        made("repeat", min=1, max=2, content=tag("(", value(INTEGER), ")")),
        ["(1)", "(1)(2)"],
        ["", "(1)(2)(3)"],
    ),
    "repeat without end": (
        made("repeat", min=2, max=-1, content=const("x")),
        ["xx", "x" * 9],
        ["x"],
    ),
    "tag": (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a</</t>"], ["<t>", "<t></t></t>", "a<t></t>"]),
    "tag with ends": (
        tag("<t>", ANY, ["```", "</t>"]),
        ["<t>x```", "<t>``</t>"],
        ["<t>x````", "<t>x``"],
    ),
    "tag around values": (
        tag("[", made("sequence", elements=[value(OBJECT)]), ""),
        ['[{"a":1}'],
        ["["],
    ),
    "triggered_tags": (
        CALLS,
        ["", "text", 'one <f=a>{"a":1}</f> two <f=ab>7</f> three', "<f", "<<f=ab>1</f>"],
        ["<f=", "<f=b>", "<f=ab>7", "<f=a>7</f>"],
    ),
    "triggered, at least one": (
        CALLS | {"at_least_one": True},
        ["<f=ab>1</f>", "<f=ab>1</f> text <f=ab>2</f>"],
        ["", "text", " <f=ab>1</f>"],
    ),
    "triggered, at most one": (
        CALLS | {"stop_after_first": True},
        ["", "text", "text<f=ab>1</f>"],
        ["<f=ab>1</f> ", "<f=ab>1</f><f=ab>1</f>"],
    ),
    "triggered, just one": (
        CALLS | {"at_least_one": True, "stop_after_first": True, "excludes": None},
        ["<f=ab>1</f>"],
        ["", " <f=ab>1</f>", "<f=ab>1</f> "],
    ),
    "triggered in a tag": (
        tag("<o>", CALLS | {"excludes": ["zz"]}, "</o>"),
        ["<o></o>", "<o>a<f=ab>1</f>b</o>", "<o><f=ab>1</f></o>"],
        ["<o>", "<o>zz</o>", "<o></o></o>", "<o><f=ab>1</o>"],
    ),
    "tags_with_separator": (
        made("tags_with_separator", tags=TAGS, separator=", "),
        ["", "<f=ab>1</f>", '<f=ab>1</f>, <f=a>{"a":1}</f>'],
        ["<f=ab>1</f>, ", "<f=ab>1</f><f=ab>1</f>", "x"],
    ),
    "tags, just one": (
        made(
            "tags_with_separator",
            tags=TAGS,
            separator=";",
            at_least_one=True,
            stop_after_first=True,
        ),
        ["<f=ab>1</f>"],
        ["", "<f=ab>1</f>;<f=ab>1</f>"],
    ),
    "dispatch": (
        made("dispatch", rules=[["<q>", value(OBJECT)], ["[", const("x]")]], excludes=["zz"]),
        ["", 'a<q>{"a":1}b[x]'],
        ["<q>", "[y]", "zz"],
    ),
    "dispatch once": (
        made("dispatch", rules=[["<q>", value(INTEGER)]], loop=False),
        ["a", "a<q>1"],
        ["a<q>1b", "<q>"],
    ),
    "qwen_xml_parameter": (
        made("qwen_xml_parameter", json_schema=XML),
        [
            "<parameter=name>Bob & </b></parameter><parameter=age>\t100\n</parameter>",
            "\n<parameter=name>\nB\n</parameter>\n<parameter=kind>x</parameter>\n",
        ],
        [
            "",
            "<parameter=age>1</parameter>",
            "<parameter=name>B</parameter><parameter=kind>y</parameter>",
        ],
    ),
    "json_schema as XML": (
        value(
            {"properties": {"n": {"$ref": "#/$defs/i", **INTEGER}}, "$defs": {"i": INTEGER}},
            style="qwen_xml",
        ),
        ["", "<parameter=n>1</parameter>"],
        ["<parameter=n>x</parameter>", "<parameter=m>1</parameter>"],
    ),
}


async def accepts(name: str, source: Any, text: str) -> bool:
    compiled = await GRAMMARS[name].compile("structural_tag", json.dumps(source))
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False)
    assert TOKENIZERS[name].decode(ids, skip_special_tokens=False) == text
    end = TOKENIZERS[name].eos_ids[0]
    ahead = compiled.constraint().mask([*ids, end]) is not None
    # The same one token at a time: what is emitted instead of drafted.
    constraint = compiled.constraint()
    stepwise = True
    for token in (*ids, end):
        mask = constraint.mask([])
        assert mask is not None
        stepwise = stepwise and bool(mask[token // 32] >> (token % 32) & 1)
        constraint.advance([token])
    assert stepwise == ahead
    return ahead


@pytest.mark.parametrize("name", ["tiny", "byte_level"])
@pytest.mark.parametrize("kind", FORMATS)
async def test_a_format_lets_through_what_it_means(kind: str, name: str) -> None:
    form, right, wrong = FORMATS[kind]
    for text in right:
        assert await accepts(name, {"format": form}, text), text
    for text in wrong:
        assert not await accepts(name, {"format": form}, text), text


SLOW = [
    kind
    for kind, (form, _, _) in FORMATS.items()
    if not any(word in json.dumps(form) for word in ("grammar", "dispatch", "qwen_xml", "-1"))
]


@pytest.mark.parametrize("kind", SLOW)
def test_the_slow_reading_says_the_same(kind: str) -> None:
    form, right, wrong = FORMATS[kind]
    assert [satisfies(form, text) for text in right] == [True] * len(right)
    assert [satisfies(form, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("wrapped", [True, False])
async def test_the_older_form(wrapped: bool) -> None:
    source = {
        "structures": [
            {"begin": "<f=a>", "schema": json.dumps(OBJECT) if wrapped else OBJECT, "end": "</f>"},
            {"begin": "<f=ab>", "schema": INTEGER, "end": "</f>"},
        ],
        "triggers": ["<f="],
        **({"type": "structural_tag"} if wrapped else {}),
    }
    _, right, wrong = FORMATS["triggered_tags"]
    for text in right:
        assert await accepts("tiny", source, text), text
    for text in wrong:
        assert not await accepts("tiny", source, text), text


async def test_a_special_token_that_is_spelt_out_is_that_token() -> None:
    """And its letters, one by one, are not."""
    mark = "<|im_start|>"
    form = made(
        "triggered_tags",
        triggers=[f"{mark}tool", f"{mark}think"],
        tags=[
            tag(f"{mark}tool:a{mark}", value(OBJECT), mark),
            tag(f"{mark}think", ANY, {"type": "token", "token": mark}),
        ],
    )
    source = {"type": "structural_tag", "format": form}
    right = ["", f'x{mark}tool:a{mark}{{"a":1}}{mark}y', f"{mark}think 1 2{mark}"]
    for text in right:
        assert await accepts("tiny", source, text), text
    for text in [mark, f"{mark}other", f"{mark}think", f'{mark}tool:a{mark}{{"a":1}}']:
        assert not await accepts("tiny", source, text), text
    compiled = await GRAMMARS["tiny"].compile("structural_tag", json.dumps(source))
    tokenizer = TOKENIZERS["tiny"]
    letters = [token for char in f"{mark}tool" for token in tokenizer.encode(char)]
    assert compiled.constraint().mask(letters) is None


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no object": ([], "", "must be an object"),
    "no format": ({}, "format", "must be set"),
    "another type": ({"type": "x", "format": ANY}, "type", "structural_tag"),
    "another field": ({"format": ANY, "more": 1}, "more", "is not supported"),
    "unknown": ({"format": made("any_tokens")}, "format.type", "'any_tokens' is not supported"),
    "unknown inside": (
        {
            "format": made(
                "triggered_tags",
                triggers=["<f="],
                tags=[TAGS[0], tag("<f=c>", {"type": "token"}, "")],
            )
        },
        "format.tags[1].content.type",
        "'token' is not supported",
    ),
    "no type": (
        {"format": made("sequence", elements=[{}])},
        "format.elements[0].type",
        "must be set",
    ),
    "budget": ({"format": made("any_text", max_tokens=9)}, "format.max_tokens", "is not supported"),
    "any order": ({"format": value(OBJECT, any_order=True)}, "format.any_order", "not supported"),
    "style": ({"format": value(OBJECT, style="glm_xml")}, "format.style", "'glm_xml' is not"),
    "no trigger": ({"format": CALLS | {"triggers": []}}, "format.triggers", "at least one"),
    "trigger of none": ({"format": CALLS | {"triggers": ["<f=", "[x"]}}, "format", "no tag begins"),
    "alike": ({"format": CALLS | {"triggers": ["<f", "<f="]}}, "format", "part of the other"),
    "foreign tag": ({"format": CALLS | {"triggers": ["<g"]}}, "format.tags[0].begin", "no trigger"),
    "end token": ({"format": tag("<|im_end|>", ANY, "x")}, "format.begin", "ends a text"),
    "no token": ({"format": tag({"token": "<f="}, ANY, "x")}, "format.begin.token", "no special"),
    "no token at the end": (
        {"format": tag("x", ANY, {"type": "token", "token": "y"})},
        "format.end.token",
        "'y' is no special token",
    ),
    "half a character as a field": (
        {"format": ANY, "\ud800": 1},
        "\\ud800",
        "is not supported",
    ),
    "half a character as a parameter": (
        {"format": made("qwen_xml_parameter", json_schema={"properties": {"\ud800": {}}})},
        "format.json_schema.properties.\\ud800",
        "half a character",
    ),
    "a parameter without a schema": (
        {"format": made("qwen_xml_parameter", json_schema={"properties": {"x": True}})},
        "format.json_schema.properties.x",
        "must be a JSON schema that is an object",
    ),
    "a long name": (
        {"format": ANY, "k" * 100_000: 1},
        f"{'k' * 199}… {'k' * 199}",
        "is not supported",
    ),
    "end that cannot come": (
        {"format": tag("(", made("any_text", excludes=["f>"]), "</f>")},
        "format.content",
        '"f>" occurs in "</f>"',
    ),
    "open border": (
        {"format": made("sequence", elements=[ANY, value(OBJECT)])},
        "format",
        "cannot be told from what follows",
    ),
    "numbers": ({"format": made("star", content=value(INTEGER))}, "format", "next repetition"),
    "two beginnings": (
        {
            "format": made(
                "or", elements=[made("regex", pattern="[a-z]+"), tag("a", value(OBJECT), "")]
            )
        },
        "format",
        "begin alike",
    ),
    "tag without end": (
        {"format": made("triggered_tags", triggers=["<"], tags=[tag("<", value(INTEGER), "")])},
        "format",
        "from the text after it",
    ),
    "bound": ({"format": made("repeat", min=2, max=1, content=ANY)}, "format.max", "at least min"),
    "many": ({"format": made("repeat", min=0, max=10_001, content=ANY)}, "format.max", "10000"),
    "regex": ({"format": made("regex", pattern="a\\")}, "format.pattern", "lone backslash"),
    "EBNF": ({"format": made("grammar", grammar="root ::= (((")}, "format.grammar", "no EBNF"),
    "half a character": ({"format": const("\ud800")}, "format.value", "half a character"),
    "XML of anything": (
        {"format": made("qwen_xml_parameter", json_schema={"properties": {"x": {}}})},
        "format.json_schema.properties.x",
        "must say that it is a text",
    ),
    "XML with more": (
        {"format": made("qwen_xml_parameter", json_schema={"additionalProperties": True})},
        "format.json_schema.additionalProperties",
        "must be absent or false",
    ),
    "XML of a pattern": (
        {
            "format": made(
                "qwen_xml_parameter",
                json_schema={"properties": {"x": {"type": "string", "pattern": "a"}}},
            )
        },
        "format.json_schema.properties.x.pattern",
        "is not supported",
    ),
    "older form": (
        {"structures": [{"begin": "<a>", "schema": "{", "end": ""}], "triggers": ["<"]},
        "structures[0].schema",
        "not JSON",
    ),
    "older form, deep": (
        {
            "structures": [{"begin": "<a>", "schema": '{"not":' * 80 + "1" + "}" * 80, "end": ""}],
            "triggers": ["<"],
        },
        "structures[0].schema",
        "nested at most 64 deep",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_is_refused_by_its_path(name: str) -> None:
    source, path, said = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        await GRAMMARS["tiny"].compile("structural_tag", json.dumps(source))
    assert caught.value.path == path
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x" * 131_073, "at most 131072 characters"),
        ('{"format":', "is not JSON"),
        ('{"format":' * 80 + "1" + "}" * 80, "nested at most 64 deep"),
        (json.dumps({"format": value({"enum": []})}), "Unsatisfiable schema"),
        (json.dumps({"format": made("regex", pattern="(a")}), "unclosed group"),
        (
            json.dumps(
                {"format": tag("(", value({"type": "integer", "multipleOf": 999_983}), ")")}
            ),
            "takes longer than",
        ),
        (
            json.dumps(
                {"format": made("plus", content=made("regex", pattern=r"(a{1,999}){1,999}b"))}
            ),
            "",
        ),
    ],
)
async def test_it_has_the_bounds_of_the_other_forms(source: str, said: str) -> None:
    limits = GrammarLimits(timeout_s=1.5)
    grammars = Grammars(TOKENIZERS["tiny"], vocab_size=4096, limits=limits)
    if said:
        with pytest.raises(GrammarError, match=said):
            await grammars.compile("structural_tag", source)
    else:
        assert await grammars.compile("structural_tag", source)


@pytest.mark.parametrize("name", SIZES)
async def test_drafts_are_held_to_it(name: str) -> None:
    """What a constraint says of drafts is what it says of them once they are emitted."""
    source = json.dumps({"format": CALLS | {"at_least_one": True}})
    compiled = await GRAMMARS[name].compile("structural_tag", source)
    check_ahead(compiled.constraint, TOKENIZERS[name].eos_ids, SIZES[name])


def test_sets_in_sets_are_not_looked_into(recwarn: pytest.WarningsRecorder) -> None:
    """Python would warn of them, in a server's log."""
    for pattern in ("[[:alpha:]]", "[a&&b]", "[a--b]", "x[^b~~c]", "[a||b]"):
        assert parts.alphabet_of(pattern) is None
    assert parts.alphabet_of("--(a||b)[c]") == frozenset("-abc")
    assert not recwarn.list


def swallows() -> bool:
    """Whether a number is let through twice, which llguidance reads as one."""
    form = made("star", content=made("sequence", elements=[const("x"), value(INTEGER), const("5")]))
    try:
        compiled = asyncio.run(
            GRAMMARS["byte_level"].compile("structural_tag", json.dumps({"format": form}))
        )
    except GrammarError:
        return False
    tokenizer = TOKENIZERS["byte_level"]
    for seed in range(5):
        try:
            walk(compiled.constraint(), tokenizer.eos_ids, random.Random(seed), most=90)
        except AssertionError:
            continue
        return False
    return compiled.constraint().mask(tokenizer.encode("x15")) is not None


def test_a_border_that_is_not_looked_at_would_swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: `x15` is of the form and the grammar does not know it has ended."""
    assert not swallows()
    monkeypatch.setattr(parts, "meet", lambda left, right: False)
    GRAMMARS["byte_level"]._cache.clear()
    assert swallows()
    GRAMMARS["byte_level"]._cache.clear()


async def test_a_random_text_has_its_calls() -> None:
    compiled = await GRAMMARS["byte_level"].compile(
        "structural_tag", json.dumps({"format": CALLS | {"at_least_one": True}})
    )
    for seed in range(10):
        ids = walk(compiled.constraint(), TOKENIZERS["byte_level"].eos_ids, random.Random(seed))
        text = decode("byte_level", ids)
        assert satisfies(CALLS | {"at_least_one": True}, text), text
