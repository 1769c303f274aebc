"""Streamed text equals whole text on tokenizers built as those of model families are, and on the
bundled one: special tokens in the middle, shown or left out, broken bytes, any prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from engine.tiny import MODEL_DIR
from service.stream import TextStream
from service.text import tokenizer as tokenizer_module
from service.text.pieces import PieceRule
from service.text.stop import StopMatch, StopMatcher
from service.text.tokenizer import Tokenizer
from tests.service.fixtures.make_tokenizers import CORPUS
from tests.service.text.checks import check_stream, held_back, reference_stop

SPECIAL = ["<s>", "</s>", "<turn>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _llama_decoder() -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def _gemma_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _bpe(normalizer: normalizers.Normalizer, decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    raw = tokenizers.Tokenizer(model)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *SPECIAL, *BYTES], show_progress=False
    )
    raw.normalizer = normalizer
    raw.train_from_iterator(CORPUS[:3], trainer)
    raw.decoder = decoder
    return raw


def llama() -> tokenizers.Tokenizer:
    """Llama 2: a space before every text, and one taken from it again."""
    prepend = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _bpe(normalizers.Sequence(prepend), _llama_decoder())


def gemma() -> tokenizers.Tokenizer:
    """Gemma: nothing is put before a text, nothing taken from it; runs of spaces are tokens."""
    raw = _bpe(normalizers.Replace(" ", "▁"), _gemma_decoder())
    raw.add_tokens([AddedToken("▁▁▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    return raw


def unigram() -> tokenizers.Tokenizer:
    """T5 and the like: a Unigram model, Metaspace in front, byte fallback."""
    raw = tokenizers.Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    vocab = [(piece, score) for piece, score in _pieces(raw)] + [(byte, -20.0) for byte in BYTES]
    raw.model = models.Unigram(vocab, 0, True)
    raw.decoder = _llama_decoder()
    return raw


def _pieces(raw: tokenizers.Tokenizer) -> list[tuple[str, float]]:
    return [(piece, score) for piece, score in json.loads(raw.to_str())["model"]["vocab"]]


def bundled() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama": llama,
    "gemma": gemma,
    "unigram": unigram,
    "bundled": bundled,
}
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def both(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours, and the library's own to compare with."""
    if kind != "bundled":
        content = KINDS[kind]()
        # The trainer takes byte tokens as special ones only, where they are ordinary vocabulary.
        text = _without_special_bytes(content.to_str())
        return Tokenizer(tokenizers.Tokenizer.from_str(text)), tokenizers.Tokenizer.from_str(text)
    return Tokenizer.load(MODEL_DIR), bundled()


def _without_special_bytes(text: str) -> str:
    content = json.loads(text)
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in BYTES
    ]
    return json.dumps(content)


def byte_ids(own: Tokenizer, text: bytes) -> list[int]:
    """Ids of byte tokens."""
    ids = [own._raw.token_to_id(f"<0x{byte:02X}>") for byte in text]
    return [token for token in ids if token is not None]


def _bytes_of(kind: str) -> list[int]:
    """Ids of single bytes, which make broken characters when drawn at random."""
    own, raw = both(kind)
    names = (raw.id_to_token(token) or "" for token in range(own.vocab_size))
    ids = [token for token, name in enumerate(names) if name in BYTES]
    return ids or [
        token for token in range(own.vocab_size) if len(own.token_bytes(token) or b"") == 1
    ]


def _any_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Tokens at random, with many single bytes, and with special tokens among them."""
    own, _ = both(kind)
    token = st.one_of(
        st.integers(0, own.vocab_size - 1),
        st.sampled_from(_bytes_of(kind)),
        st.sampled_from(sorted(own.special_ids)),
    )
    return st.lists(token, max_size=30)


TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("the fox  \n\t.▁"),
        st.sampled_from("éüß你好世界مرحبا한글ไทย"),
        st.sampled_from(["👍", "🏽", "👨", "\u200d", "👩", "🇩", "🇪", "\ufe0f", "e\u0301"[1]]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)


@kinds
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_tokens_after_any_prompt_stream_to_the_whole(kind: str, data: st.DataObject) -> None:
    """Wherever the prompt ends, inside a character too; special tokens shown or left out."""
    own, _ = both(kind)
    skip = data.draw(st.booleans())
    ids = data.draw(_any_ids(kind))
    cut = data.draw(st.integers(0, len(ids)))
    check_splits(own, ids, cut, skip)


def check_splits(own: Tokenizer, ids: Sequence[int], cut: int, skip: bool) -> None:
    """What was fed as a prompt and what as tokens makes no difference. Raises AssertionError."""
    whole = own.decode(ids, skip_special_tokens=skip)
    before = own.stream(skip_special_tokens=skip)
    prefix = "".join(map(before.feed, ids[:cut]))  # without the mark of an unfinished character
    stream = own.stream(ids[:cut], skip_special_tokens=skip)
    shown = "".join(map(stream.feed, ids[cut:])) + stream.finish()
    assert prefix + shown == whole


@kinds
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_deltas_are_never_taken_back(kind: str, data: st.DataObject) -> None:
    own, _ = both(kind)
    check_stream(own.stream, own.decode, data.draw(_any_ids(kind)))


@kinds
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_library_agrees_on_any_tokens(kind: str, data: st.DataObject) -> None:
    """Where all bytes make characters the texts are equal; where they do not both say so, the
    library with further marks (see `PieceRule.on_invalid_utf8`)."""
    own, raw = both(kind)
    skip, ids = data.draw(st.booleans()), data.draw(_any_ids(kind))
    found = own.decode(ids, skip_special_tokens=skip)
    expected = raw.decode(ids, skip_special_tokens=skip)
    if kind == "bundled" or "\ufffd" not in expected:
        assert found == expected
    else:
        assert "\ufffd" in found


@kinds
@given(parts=st.lists(TEXTS, min_size=1, max_size=4), skip=st.booleans())
@example(parts=[" a", " b"], skip=True)
@example(parts=["👨\u200d👩", "e\u0301"], skip=False)
@settings(max_examples=80, deadline=None)
def test_texts_between_special_tokens(kind: str, parts: list[str], skip: bool) -> None:
    """Conversations: each part encoded by itself, a special token after each."""
    own, raw = both(kind)
    end = sorted(own.special_ids)[-1]
    ids = [token for part in parts for token in (*own.encode(part), end)]
    found = own.decode(ids, skip_special_tokens=skip)
    assert found == raw.decode(ids, skip_special_tokens=skip)
    for cut in range(0, len(ids) + 1, 3):
        check_splits(own, ids, cut, skip)


@kinds
@given(text=TEXTS)
@settings(max_examples=80, deadline=None)
def test_no_delta_ends_inside_a_character(kind: str, text: str) -> None:
    own, raw = both(kind)
    ids = own.encode(text)
    stream = own.stream()
    deltas = [stream.feed(token) for token in ids]
    assert "".join(deltas) + stream.finish() == raw.decode(list(ids))
    if "\ufffd" not in text and "<unk>" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
        assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["gemma", "bundled"])
@given(text=TEXTS)
@settings(max_examples=80, deadline=None)
def test_what_loses_nothing_gives_the_text_back(kind: str, text: str) -> None:
    """Leading and repeated spaces included. (A ▁ of the text itself is a space in Gemma's.)"""
    own, _ = both(kind)
    ids = own.encode(text, add_special_tokens=False)
    wanted = text.replace("▁", " ") if kind == "gemma" else text
    assert own.decode(ids, skip_special_tokens=False) == wanted


def test_bytes_that_are_no_character_are_marked_one_by_one() -> None:
    own, _ = both("llama")
    face = byte_ids(own, "🤖".encode())
    stream = own.stream(face[:2])
    assert [stream.feed(token) for token in face[2:]] == ["", "🤖"]
    assert own.decode(byte_ids(own, b"\xff\xf0\x9f")) == "\ufffd" * 3
    broken = own.stream(own.encode("x"))
    assert broken.feed(face[0]) == ""
    assert broken.feed(own.encode("fox")[-1]).startswith("\ufffd")


def test_a_character_may_have_any_number_of_hidden_tokens_inside() -> None:
    own, _ = both("llama")
    byte = byte_ids(own, "🤖".encode())
    hidden = [sorted(own.special_ids)[0]] * 20
    ids = [*byte[:2], *hidden, *byte[2:]]
    assert own.decode(ids) == "🤖"
    for cut in range(len(ids)):
        check_splits(own, ids, cut, True)


# --- stop strings over tokens, bursts and broken characters -----------------------------------


def check_stopped(
    own: Tokenizer, bursts: Sequence[Sequence[int]], stops: Sequence[str], include: bool
) -> None:
    """The text is that of a search through the whole, and after every burst all is out but what may
    become a character or a stop string. Raises AssertionError."""
    whole = own.decode([token for burst in bursts for token in burst])
    expected, expected_stop = reference_stop(whole, stops, include)
    stream = TextStream(own, prompt_ids=[], stop_strings=stops, include_stop=include)
    certain, shown = own.stream(), ""
    text = ""
    for burst in bursts:
        text += "".join(map(certain.feed, burst))
        shown += stream.feed(burst).text
        if stream.ended:
            break
        assert text[len(shown) :] == held_back(text, stops)
    shown += stream.finish()
    assert (shown, stream.stop_string) == (expected, expected_stop)


@kinds
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_stops_are_found_as_in_the_whole_text(kind: str, data: st.DataObject) -> None:
    """Stops are taken from the text itself, so that most are there, and whole and half ones meet
    cuts, bursts, hidden tokens and marks of broken characters."""
    own, _ = both(kind)
    ids = data.draw(st.one_of(_any_ids(kind), TEXTS.map(own.encode).map(list)))
    whole = own.decode(ids) or "x"
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        stop = whole[at : at + data.draw(st.integers(1, 6))]
        stops.append(stop + data.draw(st.sampled_from(["", "", "z", stop])))
    bursts, rest = [], list(ids)
    while rest:
        size = data.draw(st.integers(1, 5))
        bursts.append(rest[:size])
        rest = rest[size:]
    check_stopped(own, bursts, stops, data.draw(st.booleans()))


# --- planted faults ---------------------------------------------------------------------------


def test_forgetting_the_prompts_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = both("llama")
    ids = byte_ids(own, "🤖".encode())
    check_splits(own, ids, 3, True)
    monkeypatch.setattr(tokenizer_module, "_PRIMING", 2)
    with pytest.raises(AssertionError):
        check_splits(own, ids, 3, True)


def test_a_space_lost_again_after_a_prompt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = both("llama")
    ids = own.encode("the fox")
    check_splits(own, ids, len(ids) - 1, True)
    monkeypatch.setattr(tokenizer_module, "_PRIMING", 0)
    with pytest.raises(AssertionError):
        check_splits(own, [*ids, *own.encode("fox")], len(ids), True)


def test_byte_tokens_taken_for_text_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own, raw = both("gemma")
    ids = byte_ids(own, "🤖".encode())
    assert own.decode(ids) == raw.decode(ids)
    piece = PieceRule.piece

    def as_text(self: PieceRule, token: str) -> bytes | str:
        return token if token in BYTES else piece(self, token)

    monkeypatch.setattr(PieceRule, "piece", as_text)
    monkeypatch.setattr(own, "_pieces", {})
    assert own.decode(ids) != raw.decode(ids)


def test_holding_back_too_much_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = both("bundled")
    bursts = [[token] for token in own.encode("the quick brown fox")]
    check_stopped(own, bursts, ["foxes", "zz"], False)
    feed, kept = StopMatcher.feed, [""]

    def late(self: StopMatcher, text: str) -> StopMatch:
        match = feed(self, text)
        shown, kept[0] = kept[0] + match.text[:-1], match.text[-1:]
        return StopMatch(shown, match.matched)

    monkeypatch.setattr(StopMatcher, "feed", late)
    with pytest.raises(AssertionError):
        check_stopped(own, bursts, ["foxes", "zz"], False)
