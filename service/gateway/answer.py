"""From the messages of a `selfdraft.v1` stream to the gateway's.

`Answer` stands in for the call's context where `Inference.Generate` is answered, so one relay
serves both protocols.
"""

from __future__ import annotations

from typing import Any

from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.endings import Context


class Answer:
    """A gateway's call as `Inference.Generate` sees a context."""

    def __init__(self, context: Context, request: vllm.GenerateRequest) -> None:
        self._context = context
        self._stream = request.stream
        self._prompt_tokens = len(request.tokenized.input_ids)
        self._sequences = max(request.sampling_params.n, 1)
        self._whole: dict[int, vllm.GenerateComplete] = {}
        """By index, of a call that is answered at its end: what will be in `complete`."""
        self._ended: dict[int, vllm.GenerateComplete] = {}
        """By index, of such a call: `complete`s that wait for the others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nothing: headers go with the first message. Until they are there the gateway can give the
        request to another worker."""

    async def write(self, message: pb.GenerateResponse) -> None:
        """Sends what a message is for the gateway: nothing, when it waits for the end."""
        if message.HasField("complete"):
            await self._end(self._complete(message.complete))
        elif not self._stream:
            self._keep(message.chunk)
        elif message.chunk.token_ids:  # text alone is nothing: the gateway detokenizes itself
            chunk = self._chunk(message.chunk)
            await self._context.write(vllm.GenerateResponse(chunk=chunk))

    async def _end(self, complete: vllm.GenerateComplete) -> None:
        """Sends `complete`: of a call that is answered at its end after those before it, because
        the gateway then takes their order for their index."""
        if self._stream:
            await self._context.write(vllm.GenerateResponse(complete=complete))
            return
        self._ended[complete.index] = complete
        if len(self._ended) == self._sequences:
            for _, ended in sorted(self._ended.items()):
                await self._context.write(vllm.GenerateResponse(complete=ended))

    def _chunk(self, chunk: pb.GenerateStreamChunk) -> vllm.GenerateStreamChunk:
        ours = vllm.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(chunk.token_ids),  # of this chunk: the gateway adds them up
            index=chunk.index,
        )
        if chunk.HasField("output_logprobs"):
            add_output(ours.output_logprobs, chunk.output_logprobs)
        if chunk.HasField("input_logprobs"):
            add_input(ours.input_logprobs, chunk.input_logprobs)
        return ours

    def _keep(self, chunk: pb.GenerateStreamChunk) -> None:
        whole = self._whole.setdefault(chunk.index, vllm.GenerateComplete())
        whole.output_ids.extend(chunk.token_ids)
        if chunk.HasField("output_logprobs"):
            add_output(whole.output_logprobs, chunk.output_logprobs)
        if chunk.HasField("input_logprobs"):
            add_input(whole.input_logprobs, chunk.input_logprobs)

    def _complete(self, complete: pb.GenerateComplete) -> vllm.GenerateComplete:
        ours = self._whole.pop(complete.index, vllm.GenerateComplete())
        ours.finish_reason = complete.finish_reason
        ours.index = complete.index
        ours.prompt_tokens = complete.prompt_tokens
        ours.cached_tokens = complete.cached_tokens
        ours.completion_tokens = complete.completion_tokens
        ours.spec_draft_tokens = complete.spec_draft_tokens
        ours.spec_accepted_tokens = complete.spec_accepted_tokens
        match complete.WhichOneof("matched_stop"):
            case "matched_token_id":
                ours.matched_token_id = complete.matched_token_id
            case "matched_stop_str":
                ours.matched_stop_str = complete.matched_stop_str
        return ours


def add_output(target: vllm.OutputLogProbs, source: pb.OutputLogProbs) -> None:
    """Appends `source`."""
    target.token_logprobs.extend(source.token_logprobs)
    target.token_ids.extend(source.token_ids)
    for top in source.top_logprobs:
        target.top_logprobs.add(values=top.values, token_ids=top.token_ids)


def add_input(target: vllm.InputLogProbs, source: pb.InputLogProbs) -> None:
    """Appends `source`."""
    for token in source.token_logprobs:
        value = token.value if token.HasField("value") else None
        target.token_logprobs.add(value=value)
    target.token_ids.extend(source.token_ids)
    for top in source.top_logprobs:
        target.top_logprobs.add(values=top.values, token_ids=top.token_ids)
