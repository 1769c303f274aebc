"""Streamed text equals whole text, for any tokens, on both kinds of tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text.pieces import UnsupportedTokenizerError, rule_of
from service.text.tokenizer import Tokenizer, TokenizerError
from tests.service.harness import FIXTURES, tokenizer
from tests.service.text.checks import Streamer, check_stream

KINDS = ("byte_level", "sentencepiece")
TOKENIZERS = {kind: tokenizer(kind) for kind in KINDS}
REFERENCE = {
    kind: tokenizers.Tokenizer.from_file(str(FIXTURES / kind / "tokenizer.json")) for kind in KINDS
}

TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("abc  \n\t.'<>|▁"),
        st.sampled_from("éüß你好世界مرحبا"),
        st.sampled_from("👍👍🏽👨‍👩‍👧🇩🇪🤖"),
        st.sampled_from("\u0301\u0308\u200d\ufe0f\u20e3\ufffd\x00"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, beyond the vocabulary too, as a sampler at high temperature makes them."""
    return st.lists(st.integers(0, TOKENIZERS[kind].vocab_size + 3), max_size=40)


def streamer(kind: str, prompt: Sequence[int]) -> Streamer:
    return TOKENIZERS[kind].stream(prompt)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_stream_to_the_whole(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    check_stream(lambda prompt: streamer(kind, prompt), TOKENIZERS[kind].decode, ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cut=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_texts_survive_and_continue_any_prompt(kind: str, text: str, cut: int) -> None:
    own = TOKENIZERS[kind]
    ids = own.encode(text)
    assert own.decode(ids) == REFERENCE[kind].decode(list(ids))
    if kind == "byte_level" and not any(own.decode([id]) == "" for id in ids):
        assert own.decode(ids) == text
    prompt = ids[: min(cut, len(ids))]
    if not own.decode(prompt).endswith("\ufffd"):  # a prompt cut inside a character: see below
        check_stream(lambda p: streamer(kind, p), own.decode, ids[len(prompt) :], prompt)


@given(ids=ids_of("byte_level"), skip=st.booleans())
@settings(max_examples=250, deadline=None)
def test_byte_level_decodes_as_the_library_for_any_tokens(ids: list[int], skip: bool) -> None:
    own = TOKENIZERS["byte_level"].decode(ids, skip_special_tokens=skip)
    assert own == REFERENCE["byte_level"].decode(ids, skip_special_tokens=skip)


@given(ids=ids_of("sentencepiece"), skip=st.booleans())
@settings(max_examples=250, deadline=None)
def test_sentencepiece_decodes_as_the_library_but_for_characters_before_broken_bytes(
    ids: list[int], skip: bool
) -> None:
    """The library replaces a whole run of byte tokens when any of it is broken. A stream cannot
    know that when it sends the run's first character, and should not."""
    own = TOKENIZERS["sentencepiece"].decode(ids, skip_special_tokens=skip)
    reference = REFERENCE["sentencepiece"].decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in reference:
        assert own == reference
    else:
        assert "\ufffd" in own


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_every_delta_is_whole_characters(kind: str, text: str) -> None:
    own = TOKENIZERS[kind]
    ids = own.encode(text)
    stream = own.stream()
    deltas = [stream.feed(token) for token in ids]
    if "\ufffd" not in text and REFERENCE[kind].decode(list(ids)).count("\ufffd") == 0:
        assert not any("\ufffd" in delta for delta in deltas)
        assert stream.finish() == ""


def test_a_prompt_cut_inside_a_character_is_completed() -> None:
    own = TOKENIZERS["byte_level"]
    ids = own.encode("🤖")
    assert len(ids) > 1
    stream = own.stream(ids[:-1])
    assert stream.feed(ids[-1]) + stream.finish() == "🤖"


def test_leading_space_is_lost_only_at_the_start_of_a_text() -> None:
    own = TOKENIZERS["sentencepiece"]
    ids = own.encode("fox")
    assert own.decode(ids) == "fox"
    continued = own.stream(own.encode("The"))
    assert "".join(map(continued.feed, ids)) == " fox"
    hidden = own.stream([own.eos_ids[0]])
    assert "".join(map(hidden.feed, ids)) == "fox"


def test_special_tokens_are_left_out_or_kept() -> None:
    own = TOKENIZERS["byte_level"]
    ids = own.encode("a<|end|>b<think>c")
    assert own.decode(ids) == "ab<think>c"
    assert own.decode(ids, skip_special_tokens=False) == "a<|end|>b<think>c"


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_metaspace_decoders(scheme: str, data: st.DataObject) -> None:
    content = json.loads((FIXTURES / "sentencepiece" / "tokenizer.json").read_text())
    content["decoder"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": scheme,
        "split": True,
    }
    raw = tokenizers.Tokenizer.from_str(json.dumps(content))
    own = Tokenizer(raw)
    ids = data.draw(ids_of("sentencepiece"))
    assert own.decode(ids) == raw.decode(ids)
    check_stream(own.stream, own.decode, ids)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "CTC"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
    ],
)
def test_other_decoders_are_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(UnsupportedTokenizerError):
        rule_of(decoder)


def test_cost_per_token_does_not_grow() -> None:
    own = TOKENIZERS["byte_level"]
    stream = own.stream()
    ids = own.encode("word 你好 " * 200)

    def seconds() -> float:
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for token in ids:
                stream.feed(token)
            best = min(best, time.perf_counter() - started)
        return best

    early = seconds()
    for _ in range(40):
        for token in ids:
            stream.feed(token)
    assert seconds() < 5 * early + 0.001


def test_loading_reports_the_file() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(FIXTURES)


# --- the same checks must catch what others got wrong ---------------------------------------------


class _PerToken:
    """Decodes every token by itself."""

    def __init__(self, kind: str) -> None:
        self._raw = REFERENCE[kind]

    def feed(self, token: int) -> str:
        return self._raw.decode([token])

    def finish(self) -> str:
        return ""


class _ForgetsTheRest(_PerToken):
    """Holds broken characters back and never lets them go."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._ids: list[int] = []
        self._sent = ""

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._raw.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        delta, self._sent = text[len(self._sent) :], text
        return delta


class _SendsBroken(_ForgetsTheRest):
    """Sends the replacement mark of a character that is not complete yet."""

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._raw.decode(self._ids)
        delta, self._sent = text[len(self._sent) :], text
        return delta


@pytest.mark.parametrize(
    ("kind", "wrong", "text"),
    [
        ("byte_level", _PerToken, "🤖"),
        ("sentencepiece", _PerToken, "a b c d"),
        ("byte_level", _SendsBroken, "a🤖"),
        ("byte_level", _ForgetsTheRest, None),
    ],
)
def test_wrong_detokenizers_are_caught(kind: str, wrong: type[_PerToken], text: str | None) -> None:
    own = TOKENIZERS[kind]
    ids = own.encode(text) if text is not None else own.encode("🤖")[:-1]
    check_stream(lambda prompt: streamer(kind, prompt), own.decode, ids)
    with pytest.raises(AssertionError):
        check_stream(lambda prompt: wrong(kind), own.decode, ids)
