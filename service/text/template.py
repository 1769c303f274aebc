"""Chat templates, rendered the way Hugging Face's `apply_chat_template` renders them.

A template comes with the model, so it runs in jinja2's immutable sandbox: it can read what it is
given and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The template cannot be used, or refuses these messages; the text says why."""


RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What the server itself tells a template, besides its special tokens."""


class ChatTemplate:
    """A compiled template with the special tokens it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are its variables, e.g. {"bos_token": "<s>"}.

        Raises ChatTemplateError when `source` is not a template.
        """
        self._special_tokens = dict(special_tokens)
        self.reserved = RESERVED_VARIABLES | self._special_tokens.keys()
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. `variables` must not name one of `reserved`.

        Raises ChatTemplateError when the template refuses or fails on these messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **(variables or {}),
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # whatever a template's own expression can raise
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it
    is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter: that one escapes HTML, which no prompt wants.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
