"""The tokenizer of a checkpoint directory: encoding, decoding, end tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from service.text.detokenizer import Detokenizer
from service.text.pieces import Piece, PieceRule, UnsupportedTokenizerError, rule_of
from service.text.template import ChatTemplate, ChatTemplateError

_PRIMING = 4
"""Tokens of a prompt, those that show nothing not counted, that can matter to what follows: three
may hold a byte each of a character the prompt left unfinished."""


class TokenizerError(Exception):
    """The directory's tokenizer cannot be used; the text names the file and why."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads at once."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Raises UnsupportedTokenizerError when its text cannot be streamed exactly."""
        # A tokenizer.json can ask for silent truncation or padding, which no prompt survives.
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        self._rule: PieceRule = rule_of(json.loads(raw.to_str())["decoder"])
        self._pieces: dict[int, Piece] = {}
        self._whole: dict[int, str] = {}
        """Of `_pieces`, those that are text by themselves, as such."""
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """Tokens that are no text, e.g. the end of a turn."""
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.chat_template = chat_template

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json, generation_config.json,
        config.json, special_tokens_map.json and chat_template.jinja. Raises TokenizerError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file")
        settings = _read_json(directory / "tokenizer_config.json")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
            special = _special_tokens(_read_json(directory / "special_tokens_map.json") | settings)
            source = _template_source(directory, settings)
            template = ChatTemplate(source, special) if source is not None else None
            return cls(raw, eos_ids=_eos_ids(directory, raw, special), chat_template=template)
        except (UnsupportedTokenizerError, ChatTemplateError) as error:
            raise TokenizerError(f"{directory}: {error}") from error
        except Exception as error:  # the library raises plain Exception
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added ones included; a model may have more."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; may be empty."""
        return tuple(self._raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([stream.feed(token) for token in ids] + [stream.finish()])

    def token_bytes(self, token: int) -> bytes | None:
        """What `token` adds to a text that has begun; the name of a special one. None for an id
        that the tokenizer does not know."""
        piece = self._any_piece(token, False)
        return piece.encode() if isinstance(piece, str) else piece

    def stream(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A detokenizer for what follows `prompt_ids`."""
        piece_of = self._shown_piece if skip_special_tokens else self._any_piece
        whole = self._whole if skip_special_tokens else None
        # Of a prompt only its last bytes matter, and whether it shows anything at all.
        shown = (token for token in reversed(prompt_ids) if piece_of(token, True) is not None)
        tail = list(islice(shown, _PRIMING))
        return Detokenizer(piece_of, self._rule, reversed(tail), whole=whole)

    def _shown_piece(self, token: int, first: bool) -> Piece | None:
        return None if token in self.special_ids else self._any_piece(token, first)

    def _any_piece(self, token: int, first: bool) -> Piece | None:
        if token in self._pieces and not (first and self._rule.drop_leading_marks):
            return self._pieces[token]
        # A model's vocabulary may be padded beyond the tokenizer's: such ids show nothing.
        text = self._raw.id_to_token(token)
        if text is None:
            return None
        if first:
            return self._rule.first_piece(text)
        piece = self._pieces[token] = self._rule.piece(text)
        if token not in self.special_ids and (whole := _whole(piece)) is not None:
            self._whole[token] = whole
        return piece


def _whole(piece: Piece) -> str | None:
    """The text of a piece that is no part of a character."""
    if isinstance(piece, str):
        return piece
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", …}: plain strings, or objects with a `content`."""
    special = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return special


def _eos_ids(
    directory: Path, raw: tokenizers.Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    """End tokens: those of generation_config.json, else of config.json; and the tokenizer's own."""
    config = _read_json(directory / "config.json")
    text_config = config.get("text_config")
    places = [_read_json(directory / "generation_config.json"), config]
    places += [text_config] if isinstance(text_config, dict) else []
    ids: list[int] = []
    for place in places:
        value = place.get("eos_token_id")
        if value is not None:
            ids = [value] if isinstance(value, int) else [int(id) for id in value]
            break
    own = raw.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the `chat_template` key; of several, the one named "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if value is None:
        value = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        if "default" not in named:
            raise TokenizerError(f"{directory}: no chat template named 'default' in {list(named)}")
        value = named["default"]
    return value if isinstance(value, str) else None
