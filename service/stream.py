"""From bursts of token ids to what the client is sent. One `TextStream` per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from service.text.stop import StopMatcher
from service.text.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What a burst adds: ids that belong to the sequence, and text that became certain."""

    ids: tuple[int, ...]
    text: str


class TextStream:
    """Detokenizes, ends at stop strings, and knows which token ended the sequence.

    Tokens are taken one at a time, whatever the bursts: where a sequence ends does not depend on
    how many tokens a cycle happened to emit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`include_stop` keeps the stop string, or the stop token's text, at the end."""
        self._detokenizer = tokenizer.stream(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop_strings, include=include_stop)
        self._matches = bool(stop_strings)
        self._stop_ids = frozenset(stop_ids)
        self._include_stop = include_stop
        self.completion_tokens = 0
        """Tokens in the deltas so far."""
        self.stop_id: int | None = None
        """The stop token that ended the sequence."""
        self.stop_string: str | None = None
        """The stop string that ended the sequence."""

    @property
    def ended(self) -> bool:
        """A stop token or stop string was seen; tokens fed from now on are dropped."""
        return self.stop_id is not None or self.stop_string is not None

    def feed(self, ids: Sequence[int]) -> Delta:
        """Takes one burst."""
        if self.ended:
            return Delta((), "")
        taken = 0
        text: list[str] = []
        for token in ids:
            taken += 1
            if token in self._stop_ids:
                self.stop_id = token
                if not self._include_stop:
                    break
            piece = self._detokenizer.feed(token)
            if self._matches:
                match = self._matcher.feed(piece)
                piece = match.text
                if self.stop_id is None:
                    self.stop_string = match.matched
            text.append(piece)
            if self.stop_id is not None or self.stop_string is not None:
                break
        self.completion_tokens += taken
        return Delta(tuple(ids[:taken]), "".join(text))

    def finish(self) -> str:
        """The text held back so far, once no token follows."""
        if self.stop_string is not None:
            return ""
        end = self._matcher.feed(self._detokenizer.finish())
        self.stop_string = end.matched
        return end.text + self._matcher.finish()
