"""How a request's tokens are drawn: `SamplingParams` and `Speculation`, checked."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MAX_DEPTH, SamplingParams
from engine.sampling_limits import PUBLIC_LIMITS, violations

Complain = Callable[[str, str], None]
"""(field path, what its limit is)."""


def value_of(message: Any, name: str, default: Any) -> Any:
    """The value of an `optional` field, or what its absence means."""
    return getattr(message, name) if message.HasField(name) else default


def read_sampling(
    params: pb.SamplingParams, complain: Complain, *, vocab_size: int, coupled: bool
) -> SamplingParams:
    """The engine's parameters; a seed is drawn when there is none. What is out of range goes to
    `complain`."""
    top_k = value_of(params, "top_k", 0)
    sampling = SamplingParams(
        temperature=value_of(params, "temperature", 1.0),
        top_k=0 if top_k == -1 else top_k,
        top_p=value_of(params, "top_p", 1.0),
        min_p=value_of(params, "min_p", 0.0),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        repetition_penalty=value_of(params, "repetition_penalty", 1.0),
        frequency_penalty=value_of(params, "frequency_penalty", 0.0),
        presence_penalty=value_of(params, "presence_penalty", 0.0),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        coupled=coupled,
    )
    for found in violations(sampling, vocab_size=vocab_size, limits=PUBLIC_LIMITS):
        message = found.message
        if found.field == "top_k":  # another neutral value, here only
            message = message.replace("or 0", "or 0 or -1")
        complain(f"sampling_params.{found.path}", message)
    return replace(sampling, logit_bias=tuple(pair for pair in sampling.logit_bias if pair[1]))


def read_speculation(
    request: pb.GenerateRequest, complain: Complain
) -> tuple[pb.SpeculationMode, int | None]:
    """(`SpeculationMode` to use, most drafts per cycle or None). `SpeculationMode` in the .proto
    file says what each mode promises."""
    speculation = request.speculation
    depth = value_of(speculation, "max_depth", None)
    if depth is not None and depth > MAX_DEPTH:
        complain("speculation.max_depth", f"must be in 0 … {MAX_DEPTH}, is {depth}")
    match speculation.mode:
        case pb.SPECULATION_MODE_OFF:
            if depth:
                complain("speculation.max_depth", "must be absent or 0 when mode is off")
            return pb.SPECULATION_MODE_OFF, 0
        case pb.SPECULATION_MODE_REJECTION | pb.SPECULATION_MODE_COUPLED as mode:
            if depth == 0:
                name = "coupled" if mode == pb.SPECULATION_MODE_COUPLED else "rejection"
                complain("speculation.max_depth", f"must be absent or >= 1 when mode is {name}")
            return mode, depth
        case pb.SPECULATION_MODE_UNSPECIFIED:
            pass
        case unknown:
            complain("speculation.mode", f"{unknown} is not a mode known to this server")
    if depth == 0:
        return pb.SPECULATION_MODE_OFF, 0
    seeded = request.sampling_params.HasField("seed")
    return pb.SPECULATION_MODE_COUPLED if seeded else pb.SPECULATION_MODE_REJECTION, depth


def mode_name(mode: pb.SpeculationMode) -> str:
    """ "off", "rejection" or "coupled"."""
    return pb.SpeculationMode.Name(mode).rsplit("_", 1)[1].lower()
