"""From a protobuf request to values that can be trusted, with every violation reported at once."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MAX_DEPTH, SamplingParams
from service.config import RequestLimits
from service.errors import Violation

NOT_YET: Final = "not supported yet"

Complain = Callable[[str, str], None]
"""(field path, what its limit is)."""


class Violations:
    """Collects what is wrong with one request; call it with a field path and a description."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def __call__(self, field: str, description: str) -> None:
        self.found.append(Violation(field, description))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parts of a `GenerateRequest` that do not depend on its prompt."""

    sampling: SamplingParams
    max_tokens: int | None
    """None: as much as the context has left, up to the server's default."""
    stop_strings: tuple[str, ...]
    stop_ids: tuple[int, ...]
    """The model's end tokens included, unless they are ignored."""
    include_stop: bool
    skip_special_tokens: bool
    depth_cap: int | None


def read_options(
    request: pb.GenerateRequest,
    complain: Complain,
    *,
    limits: RequestLimits,
    vocab_size: int,
    eos_ids: tuple[int, ...],
) -> Options:
    """Options of `request`. What is out of range goes to `complain`; the result is then no good."""
    params = request.sampling_params
    _refuse_unsupported(params, complain)
    ignore_eos = params.ignore_eos if params.HasField("ignore_eos") else False
    return Options(
        sampling=_sampling(params, complain),
        max_tokens=_max_tokens(params, complain),
        stop_strings=_stop_strings(params, complain, limits),
        stop_ids=_stop_ids(params, complain, limits, vocab_size, () if ignore_eos else eos_ids),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=_default(params, "skip_special_tokens", True),
        depth_cap=_depth_cap(request.speculation, complain),
    )


_REQUEST_ID = re.compile(r"[\x21-\x7e]+")


def check_request_id(request_id: str, complain: Complain, limits: RequestLimits) -> None:
    """1 … max printable ASCII characters without spaces."""
    most = limits.max_request_id_chars
    if len(request_id) > most or not _REQUEST_ID.fullmatch(request_id):
        complain("request_id", f"must be 1 … {most} printable ASCII characters without spaces")


def check_token_ids(ids: Any, path: str, complain: Complain, vocab_size: int) -> None:
    """Complains about the first id of `ids` that is not in the vocabulary."""
    for index, token in enumerate(ids):
        if token >= vocab_size:
            complain(
                f"{path}[{index}]", f"must be in 0 … {vocab_size - 1} (vocab_size), is {token}"
            )
            return


def check_known(message: Message, complain: Complain) -> None:
    """Complains about every field that this server's version of the API does not have."""
    for path, number in _unknown_fields(message, ""):
        complain(f"{path}{number}", f"field number {number} is not known to this server")


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield path, unknown[index].field_number
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        entry: Any = field.message_type
        if entry.GetOptions().map_entry:
            if entry.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
                for key in value:
                    yield from _unknown_fields(value[key], f"{path}{field.name}[{key}].")
        elif field.is_repeated:
            for index, item in enumerate(value):
                yield from _unknown_fields(item, f"{path}{field.name}[{index}].")
        else:
            yield from _unknown_fields(value, f"{path}{field.name}.")


def _default(message: Any, name: str, default: Any) -> Any:
    """The value of an `optional` field, or what its absence means."""
    return getattr(message, name) if message.HasField(name) else default


_NEUTRAL: Final = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "n": 1,
    "spaces_between_special_tokens": True,
}


def _refuse_unsupported(params: pb.SamplingParams, complain: Complain) -> None:
    for name, neutral in _NEUTRAL.items():
        if _default(params, name, neutral) != neutral:
            shown = str(neutral).lower() if isinstance(neutral, bool) else f"{neutral:g}"
            complain(f"sampling_params.{name}", f"{NOT_YET}: must be absent or {shown}")
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            complain(f"sampling_params.{name}", f"{NOT_YET}: must be absent")
    if params.logit_bias:
        complain("sampling_params.logit_bias", f"{NOT_YET}: must be empty")
    if (constraint := params.WhichOneof("constraint")) is not None:
        complain(f"sampling_params.{constraint}", f"{NOT_YET}: must be absent")


def _sampling(params: pb.SamplingParams, complain: Complain) -> SamplingParams:
    temperature = _default(params, "temperature", 1.0)
    if not (math.isfinite(temperature) and temperature >= 0):
        complain("sampling_params.temperature", f"must be finite and >= 0, is {temperature:g}")
    top_p = _default(params, "top_p", 1.0)
    if not 0 < top_p <= 1:
        complain("sampling_params.top_p", f"must be in (0, 1], is {top_p:g}")
    top_k = _default(params, "top_k", 0)
    if top_k < -1:
        complain("sampling_params.top_k", f"must be >= 1, or 0 or -1 for all, is {top_k}")
    min_p = _default(params, "min_p", 0.0)
    if not 0 <= min_p < 1:
        complain("sampling_params.min_p", f"must be in [0, 1), is {min_p:g}")
    return SamplingParams(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        min_p=min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
    )


def _max_tokens(params: pb.SamplingParams, complain: Complain) -> int | None:
    if not params.HasField("max_tokens"):
        return None
    if params.max_tokens < 1:
        complain("sampling_params.max_tokens", "must be >= 1")
    return params.max_tokens


def _stop_strings(
    params: pb.SamplingParams, complain: Complain, limits: RequestLimits
) -> tuple[str, ...]:
    stops = tuple(params.stop)
    if len(stops) > limits.max_stop_strings:
        complain(
            "sampling_params.stop", f"at most {limits.max_stop_strings} strings, are {len(stops)}"
        )
        return stops
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= limits.max_stop_string_chars:
            complain(
                f"sampling_params.stop[{index}]",
                f"must be 1 … {limits.max_stop_string_chars} characters, is {len(stop)}",
            )
    return stops


def _stop_ids(
    params: pb.SamplingParams,
    complain: Complain,
    limits: RequestLimits,
    vocab_size: int,
    eos_ids: tuple[int, ...],
) -> tuple[int, ...]:
    path = "sampling_params.stop_token_ids"
    check_token_ids(params.stop_token_ids, path, complain, vocab_size)
    ids = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
    if len(ids) > limits.max_stop_ids:
        complain(
            path,
            f"at most {limits.max_stop_ids} ids with the model's {len(eos_ids)} end tokens, "
            f"are {len(ids)}",
        )
    return ids


def _depth_cap(speculation: pb.Speculation, complain: Complain) -> int | None:
    depth = speculation.max_depth if speculation.HasField("max_depth") else None
    if depth is not None and depth > MAX_DEPTH:
        complain("speculation.max_depth", f"must be in 0 … {MAX_DEPTH}, is {depth}")
    match speculation.mode:
        case pb.SPECULATION_MODE_UNSPECIFIED:
            return depth
        case pb.SPECULATION_MODE_OFF:
            if depth:
                complain("speculation.max_depth", "must be absent or 0 when mode is off")
            return 0
        case pb.SPECULATION_MODE_REJECTION:
            if depth == 0:
                complain("speculation.max_depth", "must be absent or >= 1 when mode is rejection")
            return depth
        case pb.SPECULATION_MODE_COUPLED:
            complain("speculation.mode", f"coupled is {NOT_YET}")
        case unknown:
            complain("speculation.mode", f"{unknown} is not a mode known to this server")
    return None
