"""What each token id contributes to the text, and the rule that joins contributions.

A tokenizer's decoder turns a list of tokens into a text in one go. To do the same token by token,
without decoding anything twice, it is split into a table (id to `Piece`) and a joining rule that
needs only the bytes of one unfinished character as state. Two kinds of decoder cover the models
served here:

* *byte-level* (GPT-2, Qwen, DeepSeek, GLM, Llama 3): every token is a run of bytes, spelt with one
  printable character per byte; the text is the UTF-8 decoding of all bytes.
* *SentencePiece* (Llama 2, Mistral, Gemma): a token is text with U+2581 for a space, or one byte
  (`<0xE4>`) of a character that has no token; the text may lose one leading space.

Anything else is refused, so that what is streamed is never a guess.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Piece = bytes | str
"""A token's share of the text: raw bytes (possibly part of a character) or finished text."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizerError(Exception):
    """The tokenizer's decoder is of a kind whose text cannot be streamed exactly."""


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("selfdraft.mark_each_byte", _one_mark_per_byte)


def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes, in order, for
    the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRule:
    """How a tokenizer's tokens become text."""

    kind: Literal["byte_level", "sentencepiece"]
    replacements: tuple[tuple[str, str], ...] = ()
    """Applied to every SentencePiece token, in order; usually U+2581 to a space."""
    byte_fallback: bool = False
    """`<0xE4>` is a byte, not text."""
    strip_leading: int = 0
    """Spaces removed from the start of the whole text, at most."""
    drop_leading_marks: str = ""
    """Metaspace decoders drop every such mark of the first token."""

    @property
    def on_invalid_utf8(self) -> str:
        """The codec error handler for bytes that are no UTF-8.

        As the tokenizers library does it: one U+FFFD per broken sequence on byte-level tokenizers,
        one per byte with byte fallback. (There it also spoils complete characters that came before
        a broken one without a text token between; a stream has sent those already, rightly.)
        """
        return "replace" if self.kind == "byte_level" else "selfdraft.mark_each_byte"

    def piece(self, token: str) -> Piece:
        """The share of `token`, wherever it stands but at the start of a text."""
        if self.kind == "byte_level":
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token, spelt as it reads
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def first_piece(self, token: str) -> Piece:
        """The share of `token` as the first of a text, before `strip_leading`."""
        if self.drop_leading_marks:
            token = token.replace(self.drop_leading_marks, "")
        return self.piece(token)


_BYTE_OF = byte_of_character()


def rule_of(decoder: Mapping[str, Any] | None) -> PieceRule:
    """The rule of the `decoder` entry of a tokenizer.json.

    Raises UnsupportedTokenizerError naming the part that has no rule.
    """
    if decoder is None:
        raise UnsupportedTokenizerError("tokenizer.json has no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        if set(kinds) - {"ByteLevel", "Fuse"}:
            raise UnsupportedTokenizerError(f"decoder steps {kinds} are not supported together")
        return PieceRule(kind="byte_level")
    return _sentencepiece_rule(steps)


def _sentencepiece_rule(steps: list[Mapping[str, Any]]) -> PieceRule:
    replacements: list[tuple[str, str]] = []
    byte_fallback, fused, strip, drop = False, False, 0, ""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not byte_fallback
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)} if len(steps) == 1:
                replacements.append((mark, " "))
                # Old files spell the scheme as a flag.
                prepends = step.get("prepend_scheme", "always") != "never"
                drop = mark if prepends and step.get("add_prefix_space", True) else ""
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case _:
                raise UnsupportedTokenizerError(f"decoder step {dict(step)} is not supported")
    return PieceRule(
        kind="sentencepiece",
        replacements=tuple(replacements),
        byte_fallback=byte_fallback,
        strip_leading=strip,
        drop_leading_marks=drop,
    )
