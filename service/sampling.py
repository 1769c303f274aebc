"""How a request's tokens are drawn: `SamplingParams` and `Speculation`, checked."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Final

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MAX_DEPTH, MAX_LOGIT_BIAS, SamplingParams

MAX_PENALTY: Final = 2.0
"""Of frequency and presence penalty, either sign."""
MAX_REPETITION_PENALTY: Final = 10.0
MAX_BIAS: Final = 100.0
"""Of one token's logit, either sign: enough to force or forbid it, and no overflow."""

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
    temperature = value_of(params, "temperature", 1.0)
    top_p = value_of(params, "top_p", 1.0)
    top_k = value_of(params, "top_k", 0)
    min_p = value_of(params, "min_p", 0.0)
    frequency = value_of(params, "frequency_penalty", 0.0)
    presence = value_of(params, "presence_penalty", 0.0)
    repetition = value_of(params, "repetition_penalty", 1.0)
    penalties = f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
    bounds = (
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and >= 0"),
        ("top_p", top_p, 0 < top_p <= 1, "in (0, 1]"),
        ("top_k", top_k, top_k >= -1, ">= 1, or 0 or -1 for all"),
        ("min_p", min_p, 0 <= min_p < 1, "in [0, 1)"),
        ("frequency_penalty", frequency, abs(frequency) <= MAX_PENALTY, penalties),
        ("presence_penalty", presence, abs(presence) <= MAX_PENALTY, penalties),
        (
            "repetition_penalty",
            repetition,
            0 < repetition <= MAX_REPETITION_PENALTY,
            f"in (0, {MAX_REPETITION_PENALTY:g}]",
        ),
    )
    for name, value, holds, limit in bounds:
        if not holds:
            complain(f"sampling_params.{name}", f"must be {limit}, is {value:g}")
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=_logit_bias(params.logit_bias.items(), complain, vocab_size),
        coupled=coupled,
    )


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


def _logit_bias(
    items: Iterable[tuple[int, float]], complain: Complain, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    path = "sampling_params.logit_bias"
    bias = tuple(sorted(items))
    if len(bias) > MAX_LOGIT_BIAS:
        complain(path, f"at most {MAX_LOGIT_BIAS} entries, are {len(bias)}")
        return ()
    for token, value in bias:
        if token >= vocab_size:
            complain(f"{path}[{token}]", f"ids must be in 0 … {vocab_size - 1} (vocab_size)")
        if not abs(value) <= MAX_BIAS:
            complain(f"{path}[{token}]", f"must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], is {value:g}")
    return tuple((token, value) for token, value in bias if value)
