"""What callers say in plain Python, as messages of `selfdraft.v1`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

from google.protobuf import struct_pb2

from selfdraft.v1 import selfdraft_pb2 as pb

Messages = Sequence[tuple[str, str] | Mapping[str, Any]]
"""In order: (role, content) pairs, or mappings with the fields of `ChatMessage`, of which
`tool_calls` may be JSON text or what it would be parsed to, and `content` a list of
{"type": "text", "text": …} as OpenAI's API has it."""

Tools = Sequence[str | Mapping[str, Any]]
"""Functions the model may call, each as JSON text or what it would be parsed to."""

SpeculationMode = Literal["auto", "coupled", "rejection", "off"]
"""How drafts are verified, as in the .proto file; auto leaves it to the server."""

MODES: Final = {
    "auto": pb.SPECULATION_MODE_UNSPECIFIED,
    "coupled": pb.SPECULATION_MODE_COUPLED,
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "off": pb.SPECULATION_MODE_OFF,
}


Priority = Literal["batch", "default", "interactive"]
"""Who goes first when requests wait, as in the .proto file."""

PRIORITIES: Final = {
    "batch": pb.PRIORITY_BATCH,
    "default": pb.PRIORITY_DEFAULT,
    "interactive": pb.PRIORITY_INTERACTIVE,
}


class Sampling(TypedDict, total=False):
    """Fields of `SamplingParams`; see there. At most one of json_schema, regex, grammar
    and structural_tag."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    n: int
    logprobs: int
    prompt_logprobs: int
    json_schema: str | Mapping[str, Any]
    """JSON text, or what it would be parsed to."""
    regex: str
    grammar: str
    structural_tag: str | Mapping[str, Any]
    """As `json_schema`."""
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    ignore_eos: bool
    include_stop_str_in_output: bool
    seed: int


def sampling_params(**sampling: Unpack[Sampling]) -> pb.SamplingParams:
    """The message of these fields; JSON may be given as what its text parses to."""
    fields: dict[str, Any] = {**sampling}
    for name in ("json_schema", "structural_tag"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = json.dumps(fields[name])
    return pb.SamplingParams(**fields)


def chat_input(
    messages: Messages,
    variables: Mapping[str, Any] | None = None,
    *,
    tools: Tools = (),
    documents: Tools = (),
) -> pb.ChatInput:
    """A conversation as a message, with further variables for the template, the functions the
    model may call, and documents, given as tools are. Raises ValueError for a field that a message
    does not have."""
    chat = pb.ChatInput(
        messages=map(_chat_message, messages),
        tools=map(_json_text, tools),
        documents=map(_json_text, documents),
    )
    if variables:
        kwargs = struct_pb2.Struct()
        kwargs.update(variables)
        chat.chat_template_kwargs.CopyFrom(kwargs)
    return chat


def _chat_message(message: tuple[str, str] | Mapping[str, Any]) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        role, content = message
        return pb.ChatMessage(role=role, content=content)
    fields = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = _json_text(fields["tool_calls"])
    if "content" in fields and not isinstance(fields["content"], str):
        fields["content_parts"] = [pb.ContentPart(**part) for part in fields.pop("content")]
    return pb.ChatMessage(**fields)


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
