"""Requests to be validated, and changes to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from selfdraft import SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.service.harness import Running

Change = Callable[[pb.GenerateRequest], object]


def with_sampling(**values: object) -> Change:
    return lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(**values))  # type: ignore[arg-type]


def with_speculation(**values: object) -> Change:
    return lambda r: r.speculation.MergeFrom(pb.Speculation(**values))  # type: ignore[arg-type]


def with_input(**values: object) -> Change:
    def change(request: pb.GenerateRequest) -> None:
        request.ClearField("text")
        request.MergeFrom(pb.GenerateRequest(**values))  # type: ignore[arg-type]

    return change


def with_chat(*messages: tuple[str, str], **more: object) -> Change:
    said = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return with_input(chat=pb.ChatInput(messages=said, **more))  # type: ignore[arg-type]


def with_ids(*ids: int) -> Change:
    return with_input(tokenized=pb.TokenizedInput(input_ids=ids))


NEUTRAL = pb.SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    max_tokens=3,
    min_tokens=0,
    skip_special_tokens=True,
    spaces_between_special_tokens=False,
    ignore_eos=False,
    n=1,
    include_stop_str_in_output=False,
    seed=2**64 - 1,
    logit_bias={5: 0.0},
)


async def refused(up: Running, request: pb.GenerateRequest) -> SelfdraftError:
    with pytest.raises(SelfdraftError) as caught:
        await up.client.start(request).text()
    return caught.value


def sound() -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="def add")
    request.sampling_params.max_tokens = 2
    return request
