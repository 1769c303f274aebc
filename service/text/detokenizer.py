"""Token ids to text, one token at a time, at a cost that does not depend on what came before."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping

from service.text.pieces import Piece, PieceRule

PieceOf = Callable[[int, bool], Piece | None]
"""(token id, is it the first of the text) to its share; None for an id that is left out."""


class Detokenizer:
    """The text of one growing sequence.

    However a sequence is cut into calls, the texts returned, with `finish` last, join to the text
    of the whole sequence. A text never ends inside a character: the bytes of an unfinished one wait
    for the next token. A sequence that continues a prompt is told so by `continuing`; its first
    token then keeps the leading space that a text of its own would lose.
    """

    def __init__(
        self,
        piece_of: PieceOf,
        rule: PieceRule,
        continuing: Iterable[int] = (),
        *,
        whole: Mapping[int, str] | None = None,
    ) -> None:
        """`whole`: the texts of some tokens that begin and end between characters, as they are
        wherever no character is unfinished but at the start of a text."""
        self._piece_of = piece_of
        self._whole = {} if whole is None else whole
        self._between = False
        """The text has begun, and no character is unfinished."""
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors=rule.on_invalid_utf8)
        self._strip = rule.strip_leading
        self._first = True
        for token in continuing:
            self.feed(token)

    def feed(self, token: int) -> str:
        """The text that `token` makes certain, often its own, sometimes none."""
        if self._between and (known := self._whole.get(token)) is not None:
            return known
        piece = self._piece_of(token, self._first)
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            text = self._bytes.decode(piece)
        else:
            text = self._bytes.decode(b"", final=True) + piece
        if self._strip:
            text = self._without_leading_spaces(text)
        self._between = not self._strip and not self._bytes.getstate()[0]
        return text

    def finish(self) -> str:
        """The mark of a character that will stay unfinished, if there is one."""
        return self._bytes.decode(b"", final=True)

    def _without_leading_spaces(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text
