"""Log probabilities as messages."""

from __future__ import annotations

from collections.abc import Sequence

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import Logprobs


def add_output(target: pb.OutputLogProbs, logprobs: Logprobs, ids: Sequence[int]) -> None:
    """Puts those of the first len(ids) positions, whose tokens are `ids`, into an empty message."""
    count = len(ids)
    target.token_ids.extend(ids)
    target.token_logprobs.extend(logprobs.chosen[:count])
    if not any(logprobs.top):
        return
    for values, top_ids in zip(logprobs.top[:count], logprobs.top_ids[:count], strict=True):
        top = target.top_logprobs.add()
        top.values.extend(values)
        top.token_ids.extend(top_ids)


def input_logprobs(logprobs: Logprobs, prompt_ids: Sequence[int]) -> pb.InputLogProbs:
    """Those of a whole prompt, of which `logprobs` leaves out the first token."""
    tops = _tops(logprobs)
    return pb.InputLogProbs(
        token_ids=prompt_ids,
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=value) for value in logprobs.chosen),
        ],
        top_logprobs=[pb.TopLogProbs(), *tops] if tops else [],
    )


def _tops(logprobs: Logprobs) -> list[pb.TopLogProbs]:
    """One per position; none at all when no alternatives were asked for."""
    tops = zip(logprobs.top, logprobs.top_ids, strict=True)
    messages = [pb.TopLogProbs(values=values, token_ids=ids) for values, ids in tops]
    return messages if any(message.values for message in messages) else []
