"""A conversation as a request has it, checked, and as a chat template sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from google.protobuf.json_format import MessageToDict
from selfdraft.v1 import selfdraft_pb2 as pb

from service.config import RequestLimits
from service.sampling import Complain


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool


def read_chat(
    chat: pb.ChatInput, reserved: frozenset[str], complain: Complain, limits: RequestLimits
) -> Conversation | None:
    """The conversation; None where something was complained about. `reserved` are variables a
    request must not set."""
    if len(chat.messages) > limits.max_messages:
        complain("chat.messages", f"at most {limits.max_messages}, are {len(chat.messages)}")
        return None
    reader = _Reader(complain, limits)
    reader.check_size(chat)
    reader.check_variables(chat, reserved)
    conversation = Conversation(
        messages=[reader.message(m, f"chat.messages[{n}]") for n, m in enumerate(chat.messages)],
        tools=reader.tools(chat),
        documents=reader.documents(chat),
        variables=_integers(MessageToDict(chat.chat_template_kwargs)),
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        ),
    )
    return conversation if reader.sound else None


class _Reader:
    """Reads the parts of one chat, and remembers whether all of them were sound."""

    def __init__(self, complain: Complain, limits: RequestLimits) -> None:
        self._complain = complain
        self._limits = limits
        self.sound = True

    def _bad(self, field: str, description: str) -> None:
        self.sound = False
        self._complain(field, description)

    def check_size(self, chat: pb.ChatInput) -> None:
        if not chat.messages:
            self._bad("chat.messages", "must hold at least one message")
        chars = sum(map(_chars, chat.messages)) + sum(map(len, chat.documents))
        if chars > self._limits.max_text_chars:
            limit = f"at most {self._limits.max_text_chars} characters, are {chars}"
            self._bad("chat.messages", limit)

    def check_variables(self, chat: pb.ChatInput, reserved: frozenset[str]) -> None:
        size, most = chat.chat_template_kwargs.ByteSize(), self._limits.max_template_bytes
        if size > most:
            self._bad("chat.chat_template_kwargs", f"at most {most} bytes, are {size}")
        for name in chat.chat_template_kwargs.fields:
            if name in reserved or not name.isidentifier():
                self._bad(f"chat.chat_template_kwargs.{name}", "is not a name a request may set")

    def message(self, message: pb.ChatMessage, path: str) -> dict[str, Any]:
        """A field that is absent is no key: templates ask for what is defined."""
        self._check_length(f"{path}.role", message.role, self._limits.max_role_chars)
        seen: dict[str, Any] = {"role": message.role, "content": self._content(message, path)}
        if message.HasField("name"):
            self._check_length(f"{path}.name", message.name, self._limits.max_role_chars)
            seen["name"] = message.name
        if message.HasField("tool_calls"):
            seen["tool_calls"] = self._json(
                f"{path}.tool_calls",
                message.tool_calls,
                _is_list_of_objects,
                "a JSON array of objects, at least one",
            )
        if message.HasField("tool_call_id"):
            most = self._limits.max_tool_call_id_chars
            self._check_length(f"{path}.tool_call_id", message.tool_call_id, most)
            seen["tool_call_id"] = message.tool_call_id
        if message.HasField("reasoning_content"):
            seen["reasoning_content"] = message.reasoning_content
        return seen

    def _content(self, message: pb.ChatMessage, path: str) -> str | list[dict[str, str]]:
        if not message.content_parts:
            return message.content
        parts, most = message.content_parts, self._limits.max_content_parts
        if message.content:
            self._bad(f"{path}.content", "must be empty beside content_parts")
        if len(parts) > most:
            self._bad(f"{path}.content_parts", f"at most {most}, are {len(parts)}")
            return ""
        for n, part in enumerate(parts):
            if part.type != "text":
                at = f"{path}.content_parts[{n}].type"
                self._bad(at, f"{part.type[:40]!r} is not supported: only text")
        return [{"type": "text", "text": part.text} for part in parts]

    def documents(self, chat: pb.ChatInput) -> list[dict[str, Any]]:
        most = self._limits.max_documents
        if len(chat.documents) > most:
            self._bad("chat.documents", f"at most {most}, are {len(chat.documents)}")
        if not self.sound:  # nor is what is too long parsed
            return []
        return [
            self._json(f"chat.documents[{n}]", text, _is_object, "a JSON object")
            for n, text in enumerate(chat.documents)
        ]

    def tools(self, chat: pb.ChatInput) -> list[dict[str, Any]]:
        limits, chars = self._limits, sum(map(len, chat.tools))
        if len(chat.tools) > limits.max_tools:
            self._bad("chat.tools", f"at most {limits.max_tools}, are {len(chat.tools)}")
            return []
        if chars > limits.max_tools_chars:
            self._bad("chat.tools", f"at most {limits.max_tools_chars} characters, are {chars}")
            return []
        return [
            self._json(f"chat.tools[{n}]", text, _is_object, "a JSON object")
            for n, text in enumerate(chat.tools)
        ]

    def _check_length(self, field: str, text: str, most: int) -> None:
        if not 1 <= len(text) <= most:
            limit = f"at most {most} characters, is {len(text)}" if text else "must not be empty"
            self._bad(field, limit)

    def _json(self, field: str, text: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """What `text` says; None after a complaint."""
        depth = self._limits.max_json_depth
        try:
            value = json.loads(text, parse_constant=_no_constant)
            if not _within(value, depth):
                raise RecursionError
            # Half a surrogate pair, or 1e999: JSON by its letters, and no text a prompt can have.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except RecursionError:
            self._bad(field, f"nested at most {depth} deep")
            return None
        except ValueError as error:
            self._bad(field, f"is not JSON: {error}")
            return None
        if not fits(value):
            self._bad(field, f"must be {wanted}")
            return None
        return value


def _chars(message: pb.ChatMessage) -> int:
    said = len(message.content) + sum(len(part.text) for part in message.content_parts)
    return said + len(message.tool_calls) + len(message.reasoning_content)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_object, value))


def _within(value: Any, depth: int) -> bool:
    """Whether arrays and objects in `value` are nested at most so deep."""
    level = [value]
    for _ in range(depth + 1):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [x for p in parts for x in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return True
    return False


def _integers(value: Any) -> Any:
    """A protobuf Struct knows only floating point: 3 would reach the prompt as 3.0."""
    if isinstance(value, dict):
        return {key: _integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
