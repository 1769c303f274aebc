"""Random structural tags, held to the slow reading of them in `structures`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from service.text.constraint import CompiledGrammar, GrammarError
from service.text.grammar import Grammars
from tests.service.text.structures import satisfies
from tests.service.text.walks import SIZES, TOKENIZERS, decode, walk

VALUES: list[tuple[Any, list[str]]] = [
    ({"type": "integer"}, ["1", "-20", "7"]),
    ({"type": "boolean"}, ["true", "false"]),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        ['{"a":1}', '{"a": 3}'],
    ),
    ({"enum": ["x", "ab", None]}, ['"x"', '"ab"', "null"]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1, 2]"]),
]
WORDS = ["a", "ab", "b", "<", "1", "{", "tr", "aba"]
BEGINS = ["<f=a>", "<f=ab>", "<f=b>", "<f=a>x", "<g>", "[", "[[", "a"]
ENDS = ["</f>", "]", ">", "ab", "```", ""]
TRIGGERS = ["<f=", "<g", "["]
FRAGMENTS = [*WORDS, *BEGINS, *ENDS, *TRIGGERS, ", ", ";", " "] + [
    t for _, ts in VALUES for t in ts
]


def tagged(content: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    end = st.sampled_from(ENDS) | st.lists(st.sampled_from(ENDS), min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {"type": st.just("tag"), "begin": st.sampled_from(BEGINS), "content": content, "end": end}
    )


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tags = st.lists(tagged(inner), min_size=1, max_size=3)
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    several = st.lists(inner, min_size=1, max_size=3)

    def made(kind: str, **fields: Any) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({"type": st.just(kind), **fields})

    return st.one_of(
        made("sequence", elements=several),
        made("or", elements=several),
        made("optional", content=inner),
        made("star", content=inner),
        made("plus", content=inner),
        made("repeat", min=st.integers(0, 1), max=st.integers(1, 2), content=inner),
        tagged(inner),
        made("tags_with_separator", tags=tags, separator=st.sampled_from([", ", ";", ""]), **flags),
        st.builds(triggered, tags, st.lists(st.sampled_from(["zz", "ab"]), max_size=1), **flags),
    )


def triggered(tags: Any, excludes: Any, at_least_one: bool, stop_after_first: bool) -> Any:
    """With just the triggers that its tags need."""
    triggers = [t for t in TRIGGERS if any(tag["begin"].startswith(t) for tag in tags)]
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "excludes": excludes,
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }


FORMATS = st.recursive(
    st.one_of(
        st.builds(lambda v: {"type": "const_string", "value": v}, st.sampled_from([*WORDS, ""])),
        st.builds(
            lambda p: {"type": "regex", "pattern": p},
            st.sampled_from(["[ab]+", "1*", "a|ab", "x?"]),
        ),
        st.builds(lambda v: {"type": "json_schema", "json_schema": v[0]}, st.sampled_from(VALUES)),
        st.builds(
            lambda x: {"type": "any_text", "excludes": x},
            st.lists(st.sampled_from(["</f>", "ab", "zz"]), max_size=2),
        ),
    ),
    composed,
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join)


class Untried(Grammars):
    """Compiles here and now: these do no harm, and a process for each takes a third of a second."""

    async def _probe(self, source: str, vocabulary: object) -> None:
        return None


NAMES = ("tiny", "byte_level")
UNTRIED = {name: Untried(TOKENIZERS[name], vocab_size=SIZES[name]) for name in NAMES}


def compiled(name: str, form: Any) -> CompiledGrammar | None:
    """None where it is refused."""
    source = json.dumps({"format": form})
    try:
        return asyncio.run(UNTRIED[name].compile("structural_tag", source))
    except GrammarError as error:
        if not error.path:
            assert "atisf" in str(error), error  # noqa: PT017 - the only other reason
        return None


def accepts(grammar: CompiledGrammar, name: str, ids: Sequence[int]) -> bool:
    constraint = grammar.constraint()
    return constraint.mask([*ids, TOKENIZERS[name].eos_ids[0]]) is not None


def check(form: Any, texts: Sequence[str], name: str, seed: int) -> bool:
    """Whether the tag was taken. Raises AssertionError where both readings differ."""
    grammar = compiled(name, form)
    if grammar is None:
        return False
    rng = random.Random(seed)
    made = []
    for _ in range(3):
        constraint = grammar.constraint()
        try:
            ids = tuple(walk(constraint, TOKENIZERS[name].eos_ids, rng, most=60))
        except AssertionError:  # free text that does not come to its end by chance
            continue
        assert constraint.failure is None
        made.append(decode(name, ids))
        assert satisfies(form, made[-1]), made[-1]
    for text in [*texts, *(edited(text, rng) for text in made), *made]:
        ids = TOKENIZERS[name].encode(text, add_special_tokens=False)
        if TOKENIZERS[name].decode(ids) == text:
            assert accepts(grammar, name, ids) == satisfies(form, text), text
    return True


def edited(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice([*FRAGMENTS, ""]) + text[place + rng.randrange(3) :]


TAKEN: list[bool] = []


@settings(
    max_examples=120,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(FORMATS, st.lists(TEXTS, max_size=6), st.sampled_from(NAMES), st.integers(0, 99))
def test_a_text_is_let_through_if_and_only_if_it_has_the_form(
    form: Any, texts: list[str], name: str, seed: int
) -> None:
    TAKEN.append(check(form, texts, name, seed))


def test_most_of_them_are_taken() -> None:
    """Else the property would hold of nothing. After the test above, or without it."""
    assert not TAKEN or sum(TAKEN) > len(TAKEN) / 3
