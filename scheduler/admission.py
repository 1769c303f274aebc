"""The door: can this request ever run here? No state, no queue, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.plan import MAX_LOGPROBS, MAX_STOP_IDS, EngineInfo, SamplingParams, pages_needed
from engine.sampling_limits import violations
from scheduler.config import SchedulerConfig
from scheduler.request import GenerationRequest, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request: the stricter of the engine's and the operator's."""

    vocab_size: int
    context_length: int
    """Positions: prompt plus max_tokens."""
    prompt_tokens: int
    max_tokens: int
    pool_tokens: int
    """Positions that fit all pages of the pool."""
    page_size: int

    @classmethod
    def of(cls, info: EngineInfo, config: SchedulerConfig) -> Limits:
        context = info.context_length
        return cls(
            vocab_size=info.vocab_size,
            context_length=context,
            prompt_tokens=min(config.max_prompt_tokens or context, config.max_queued_tokens),
            max_tokens=config.max_completion_tokens or context,
            pool_tokens=info.pages * info.page_size,
            page_size=info.page_size,
        )

    @property
    def pages_per_row(self) -> int:
        """Pages of the longest row that can be admitted."""
        return pages_needed(min(self.context_length, self.pool_tokens), self.page_size)

    def room(self, prompt_tokens: int) -> int:
        """Largest `max_tokens` a prompt of this length can ask for; < 1 when it cannot run."""
        positions = min(self.context_length, self.pool_tokens)
        return min(self.max_tokens, positions - prompt_tokens)


def validate(
    request: GenerationRequest, limits: Limits, known: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """The prompt as int32; `known` if it was made of the very same `prompt_ids` before. Raises
    InvalidRequestError naming the field and the limit."""
    prompt = _prompt(request.prompt_ids, limits) if known is None else known
    _lengths(len(prompt), request.max_tokens, limits)
    _stop_ids(request.stop_ids, limits)
    _sampling(request.sampling, limits)
    _reports(request)
    if request.session_id is not None and not request.reuse_prefix:
        raise InvalidRequestError("session_id", "a session keeps its prefix; set reuse_prefix")
    if request.depth_cap is not None and request.depth_cap < 0:
        raise InvalidRequestError("depth_cap", "must be >= 0")
    if request.deadline is not None and math.isnan(request.deadline):
        raise InvalidRequestError("deadline", "must be a number")
    return prompt


def _prompt(ids: tuple[int, ...], limits: Limits) -> NDArray[np.int32]:
    if not ids:
        raise InvalidRequestError("prompt_ids", "must hold at least one token")
    if len(ids) > limits.prompt_tokens:
        message = f"{len(ids)} tokens; the limit is {limits.prompt_tokens} prompt tokens"
        raise InvalidRequestError("prompt_ids", message)
    out_of_range = f"token ids must be in 0 … {limits.vocab_size - 1} (vocab_size)"
    try:
        prompt = np.array(ids, dtype=np.int32)
    except OverflowError:
        raise InvalidRequestError("prompt_ids", out_of_range) from None
    if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
        raise InvalidRequestError("prompt_ids", out_of_range)
    return prompt


def _lengths(prompt_tokens: int, max_tokens: int, limits: Limits) -> None:
    if max_tokens < 1:
        raise InvalidRequestError("max_tokens", "must be >= 1")
    if max_tokens > limits.max_tokens:
        message = f"{max_tokens}; the limit is {limits.max_tokens} (max_tokens)"
        raise InvalidRequestError("max_tokens", message)
    total = prompt_tokens + max_tokens
    asked = f"{prompt_tokens} prompt tokens plus max_tokens {max_tokens} is {total}"
    if total > limits.context_length:
        message = f"{asked}; the limit is {limits.context_length} (context length)"
        raise InvalidRequestError("max_tokens", message)
    if total > limits.pool_tokens:
        message = f"{asked}; the limit is {limits.pool_tokens} (KV page pool)"
        raise InvalidRequestError("max_tokens", message)


def _stop_ids(ids: tuple[int, ...], limits: Limits) -> None:
    if len(ids) > MAX_STOP_IDS:
        raise InvalidRequestError("stop_ids", f"{len(ids)} ids; the limit is {MAX_STOP_IDS}")
    if any(not 0 <= token < limits.vocab_size for token in ids):
        message = f"token ids must be in 0 … {limits.vocab_size - 1} (vocab_size)"
        raise InvalidRequestError("stop_ids", message)


def _sampling(sampling: SamplingParams, limits: Limits) -> None:
    for found in violations(sampling, vocab_size=limits.vocab_size):
        about = "" if found.entry is None else f"token {found.entry}: "
        raise InvalidRequestError(f"sampling.{found.field}", about + found.message)


def _reports(request: GenerationRequest) -> None:
    if not 0 <= request.min_tokens <= request.max_tokens:
        message = f"{request.min_tokens}; must be in 0 … {request.max_tokens} (max_tokens)"
        raise InvalidRequestError("min_tokens", message)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(request, name)
        if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
            raise InvalidRequestError(name, f"{asked}; must be in 0 … {MAX_LOGPROBS}")
