"""Chat templates, rendered the way Hugging Face's `apply_chat_template` renders them.

A template comes with the model, so it runs in jinja2's immutable sandbox: it can read what it is
given and nothing else. What it may take is bounded too: the length of its text, and how much it may
count, for one that loops over what a client has sent should not hold the server up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class ChatTemplateError(Exception):
    """The template cannot be used, or refuses these messages; the text says why."""


RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt"}
    | {"range", "raise_exception", "strftime_now"}
)
"""What the server itself tells a template, besides its special tokens."""

MAX_PROMPT_CHARS: Final = 16_000_000
"""A text longer than this is refused while it is being made."""

MAX_COUNTED: Final = 1_000_000
"""Numbers that all `range`s of one rendering may give; most that one `*` may repeat."""

MAX_POWER: Final = 64
"""Largest exponent."""


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
        self._takes_parts = True
        self._takes_parts = self._shows_parts()

    def _shows_parts(self) -> bool:
        """Whether it shows the text of a part, and not the list that it is in."""
        probe = "selfdraft0"
        said = {"role": "user", "content": [{"type": "text", "text": probe}]}
        try:
            text = self.render([said], add_generation_prompt=False, max_chars=100_000)
        except ChatTemplateError:
            return False
        return probe in text and not re.search(rf"""['"]text['"]: ['"]{probe}""", text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> str:
        """The text of a conversation. Without `tools` the template's `tools` is none, and so with
        `documents`. A message's content may be a list of {"type": "text", "text": …}: a template
        that takes only texts gets these joined by line ends. `variables` must not name one of
        `reserved`.

        Raises ChatTemplateError when the template refuses or fails on these messages, or makes
        more than `max_chars` characters of them.
        """
        try:
            parts = self._template.generate(
                messages=list(messages if self._takes_parts else map(_joined_parts, messages)),
                tools=list(tools) or None,
                documents=list(documents) or None,
                add_generation_prompt=add_generation_prompt,
                range=_Counter(),
                **self._special_tokens,
                **(variables or {}),
            )
            return _joined(parts, max_chars)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # whatever a template's own expression can raise
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


def _joined_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """As vLLM does for such templates."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it
    is only its content. It is a scope, as in transformers: what is set inside stays inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """jinja2's `namespace`, without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # any name may be a keyword, `self` too
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ChatTemplateError(f"stores {name!r} in a namespace; no underscore may begin a name")


class _Counter:
    """The `range` of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_COUNTED

    def __call__(self, *args: int) -> range:
        numbers = range(*args)
        self._left -= len(numbers)
        if self._left < 0:
            raise ChatTemplateError(f"counts further than {MAX_COUNTED}")
        return numbers


def _joined(parts: Iterable[str], max_chars: int) -> str:
    taken, length = [], 0
    for part in parts:
        length += len(part)
        if length > max_chars:
            raise ChatTemplateError(f"makes more than {max_chars} characters of them")
        taken.append(part)
    return "".join(taken)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, and no huge values by short expressions: `'x' * 10**10`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of one of `intercepted_binops`."""
        if operator == "**":
            if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
                raise ChatTemplateError("raises what is no number to a power")
            if abs(right) > MAX_POWER or abs(left) > MAX_COUNTED:
                raise ChatTemplateError(f"raises a number to more than {MAX_POWER}")
        else:
            for sized, times in ((left, right), (right, left)):
                repeats = isinstance(sized, (str, list, tuple)) and isinstance(times, int)
                if repeats and len(sized) * times > MAX_COUNTED:
                    raise ChatTemplateError(f"repeats something to more than {MAX_COUNTED}")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
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
