"""Stop strings do not care how a text was cut, and hold back no more than they must."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.stream import TextStream
from service.text.stop import StopMatcher
from tests.service.harness import EOS, tokenizer
from tests.service.text.checks import Matcher, check_stops

# Few letters, so that stops overlap with the text, with each other and with themselves.
PIECES = st.lists(st.text("ab", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


class Own:
    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._matcher = StopMatcher(stops, include=include)

    def feed(self, text: str) -> tuple[str, str | None]:
        match = self._matcher.feed(text)
        return match.text, match.matched

    def finish(self) -> str:
        return self._matcher.finish()


@given(pieces=PIECES, stops=STOPS, include=st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_cut_gives_the_same_and_nothing_is_held_too_long(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    check_stops(Own, pieces, stops, include)


def test_the_first_to_end_counts_and_then_the_longest() -> None:
    assert StopMatcher(["abcd", "bc"]).feed("xabcd").matched == "bc"
    assert StopMatcher(["c", "bc", "abc"]).feed("xabc").matched == "abc"


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything").text == "anything"
    assert matcher.finish() == ""


def test_empty_stops_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


class PerPiece:
    """Looks for a stop string in each piece by itself."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include

    def feed(self, text: str) -> tuple[str, str | None]:
        for stop in self._stops:
            if (at := text.find(stop)) >= 0:
                return text[: at + len(stop) if self._include else at], stop
        return text, None

    def finish(self) -> str:
        return ""


class HoldsTooMuch(PerPiece):
    """Always keeps as many characters as the longest stop string has."""

    held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        text = self.held + text
        shown, stop = super().feed(text)
        if stop is not None:
            return shown, stop
        keep = max(map(len, self._stops)) - 1
        self.held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - len(self.held)], None

    def finish(self) -> str:
        return self.held


class RestartsAtMismatch(PerPiece):
    """Forgets that the character that broke one match may begin another: misses "ab" in "aab"."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        super().__init__(stops, include)
        self._state, self._held = 0, ""

    def feed(self, text: str) -> tuple[str, str | None]:
        shown, stop = "", self._stops[0]
        for character in text:
            self._held += character
            self._state = self._state + 1 if stop[self._state] == character else 0
            if self._state == len(stop):
                return shown + (self._held if self._include else ""), stop
            if not self._state:
                shown, self._held = shown + self._held, ""
        return shown, None

    def finish(self) -> str:
        return self._held


@pytest.mark.parametrize(
    ("wrong", "pieces", "stops"),
    [
        (PerPiece, ["a", "b"], ["ab"]),
        (HoldsTooMuch, ["bb", "bb"], ["aab"]),
        (RestartsAtMismatch, ["aab"], ["ab"]),
    ],
)
def test_wrong_matchers_are_caught(
    wrong: type[PerPiece], pieces: list[str], stops: list[str]
) -> None:
    check_stops(Own, pieces, stops, False)

    def make(stops: Sequence[str], include: bool) -> Matcher:
        return wrong(stops, include)

    with pytest.raises(AssertionError):
        check_stops(make, pieces, stops, False)


# --- tokens, bursts and stops together ------------------------------------------------------------

TOKENIZER = tokenizer()
SENTENCE = TOKENIZER.encode("The quick brown fox 🤖 jumps over the lazy dog.")


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stop=st.sampled_from(["fox", " 🤖 j", "dog.", "zzz", "e", "The quick brown fox 🤖 jumps"]),
    include=st.booleans(),
    end=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_bursts_do_not_change_the_outcome(
    cuts: list[int], stop: str, include: bool, end: bool
) -> None:
    def run(sizes: list[int]) -> tuple[object, ...]:
        stream = TextStream(
            TOKENIZER,
            prompt_ids=[5],
            stop_ids=[EOS],
            stop_strings=[stop],
            include_stop=include,
        )
        ids: list[int] = []
        text, rest = "", [*SENTENCE, *([EOS] if end else [])]
        while rest:
            size = sizes.pop(0) if sizes else 1
            delta = stream.feed(rest[:size])
            rest = rest[size:]
            ids += delta.ids
            text += delta.text
        text += stream.finish()
        return ids, text, stream.stop_id, stream.stop_string, stream.completion_tokens

    assert run(cuts) == run([])


def test_tokens_after_the_end_are_dropped() -> None:
    stream = TextStream(TOKENIZER, prompt_ids=[5], stop_ids=[EOS], stop_strings=["fox"])
    delta = stream.feed([*SENTENCE, EOS])
    assert delta.text == "The quick brown "
    assert stream.ended
    assert stream.feed(SENTENCE).ids == ()
    assert stream.completion_tokens == len(delta.ids) < len(SENTENCE)
    assert stream.finish() == ""


def test_text_held_for_a_stop_is_sent_when_the_sequence_ends_otherwise() -> None:
    stream = TextStream(TOKENIZER, prompt_ids=[5], stop_ids=[EOS], stop_strings=["dog. And"])
    text = stream.feed([*SENTENCE, EOS]).text
    assert not text.endswith("dog.")
    assert (text + stream.finish()).endswith("dog.")
    assert (stream.stop_id, stream.stop_string) == (EOS, None)
