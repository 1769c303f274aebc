"""Log probabilities as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import Logprobs


def add_output(target: pb.OutputLogProbs, logprobs: Logprobs, ids: Sequence[int]) -> None:
    """Puts those of the first len(ids) positions, whose tokens are `ids`, into an empty message."""
    count = len(ids)
    target.token_ids.extend(ids)
    target.token_logprobs.extend(logprobs.chosen[:count])
    if any(logprobs.top):
        _add_tops(target.top_logprobs, logprobs, count)


def add_input(target: pb.InputLogProbs, logprobs: Logprobs, prompt_ids: Sequence[int]) -> None:
    """Puts those of a whole prompt, of which `logprobs` leaves out the first token, into an empty
    message."""
    target.token_ids.extend(prompt_ids)
    target.token_logprobs.add()
    for value in logprobs.chosen:
        target.token_logprobs.add(value=value)
    if any(logprobs.top):
        target.top_logprobs.add()
        _add_tops(target.top_logprobs, logprobs, len(logprobs.top))


def _add_tops(target: Any, logprobs: Logprobs, count: int) -> None:
    for values, top_ids in zip(logprobs.top[:count], logprobs.top_ids[:count], strict=True):
        top = target.add()
        top.values.extend(values)
        top.token_ids.extend(top_ids)
