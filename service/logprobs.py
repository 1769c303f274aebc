"""Log probabilities as messages."""

from __future__ import annotations

from collections.abc import Sequence

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import Logprobs


def output_logprobs(logprobs: Logprobs, ids: Sequence[int]) -> pb.OutputLogProbs:
    """Those of the first len(ids) positions, whose tokens are `ids`."""
    count = len(ids)
    return pb.OutputLogProbs(
        token_ids=ids,
        token_logprobs=logprobs.chosen[:count],
        top_logprobs=_tops(logprobs)[:count],
    )


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
