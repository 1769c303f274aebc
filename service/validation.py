"""From a protobuf request to values that can be trusted, with every violation reported at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import MAX_LOGPROBS, SamplingParams
from scheduler.request import Priority
from service.config import RequestLimits
from service.errors import Violation, invalid
from service.sampling import Complain, read_sampling, read_speculation, value_of
from service.text.grammar import Form

NOT_YET: Final = "not supported yet"


class Violations:
    """Collects what is wrong with one request; call it with a field path and a description."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def __call__(self, field: str, description: str) -> None:
        self.found.append(Violation(field, description))

    def raise_found(self) -> None:
        """Raises ServiceError (INVALID_ARGUMENT) when there are any."""
        if self.found:
            raise invalid(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parts of a `GenerateRequest` that do not depend on its prompt."""

    sampling: SamplingParams
    """Of the first sequence."""
    mode: pb.SpeculationMode
    """The `SpeculationMode` used: off, rejection or coupled."""
    n: int
    max_tokens: int | None
    """None: as much as the context has left, up to the server's default."""
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_ids: tuple[int, ...]
    """The model's end tokens included, unless they are ignored."""
    include_stop: bool
    skip_special_tokens: bool
    depth_cap: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    form: Form | None
    """Which field holds the grammar, if one does."""
    session_id: str | None
    reuse_prefix: bool
    priority: Priority


def read_options(
    request: pb.GenerateRequest,
    complain: Complain,
    *,
    limits: RequestLimits,
    max_n: int,
    vocab_size: int,
    eos_ids: tuple[int, ...],
) -> Options:
    """Options of `request`. What is out of range goes to `complain`; the result is then no good."""
    params = request.sampling_params
    ignore_eos = params.ignore_eos if params.HasField("ignore_eos") else False
    mode, depth_cap = read_speculation(request, complain)
    n = _sequences(params, complain, min(limits.max_n, max_n))
    session_id, reuse_prefix = _session(request, complain, limits, n)
    return Options(
        sampling=read_sampling(
            params, complain, vocab_size=vocab_size, coupled=mode != pb.SPECULATION_MODE_REJECTION
        ),
        mode=mode,
        n=n,
        max_tokens=_max_tokens(params, complain),
        min_tokens=_min_tokens(params, complain),
        stop_strings=_stop_strings(params, complain, limits),
        stop_ids=_stop_ids(params, complain, limits, vocab_size, () if ignore_eos else eos_ids),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=value_of(params, "skip_special_tokens", True),
        depth_cap=depth_cap,
        logprobs=_logprobs(params, "logprobs", complain),
        prompt_logprobs=_logprobs(params, "prompt_logprobs", complain),
        form=_form(params, complain),
        session_id=session_id,
        reuse_prefix=reuse_prefix,
        priority=_priority(request, complain),
    )


_ID = re.compile(r"[\x21-\x7e]+")


def check_id(field: str, value: str, complain: Complain, limits: RequestLimits) -> None:
    """1 … max printable ASCII characters without spaces."""
    most = limits.max_request_id_chars
    if len(value) > most or not _ID.fullmatch(value):
        complain(field, f"must be 1 … {most} printable ASCII characters without spaces")


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


def _sequences(params: pb.SamplingParams, complain: Complain, most: int) -> int:
    n: int = value_of(params, "n", 1)
    if not 1 <= n <= most:
        complain("sampling_params.n", f"must be in 1 … {most}, is {n}")
    return n


def _min_tokens(params: pb.SamplingParams, complain: Complain) -> int:
    least: int = value_of(params, "min_tokens", 0)
    if params.HasField("max_tokens") and least > params.max_tokens:
        complain(
            "sampling_params.min_tokens",
            f"must be at most max_tokens {params.max_tokens}, is {least}",
        )
    return least


def _logprobs(params: pb.SamplingParams, name: str, complain: Complain) -> int | None:
    count: int | None = value_of(params, name, None)
    if count is not None and count > MAX_LOGPROBS:
        complain(f"sampling_params.{name}", f"must be in 0 … {MAX_LOGPROBS}, is {count}")
    return count


def _form(params: pb.SamplingParams, complain: Complain) -> Form | None:
    """Which grammar there is, if it goes together with the rest; not whether it is a good one."""
    form: Form | None = params.WhichOneof("constraint")
    if form is None:
        return None
    if params.ignore_eos:
        complain(
            "sampling_params.ignore_eos",
            f"must be absent or false with {form}: its texts end with an end token",
        )
    if params.min_tokens:
        complain(
            "sampling_params.min_tokens",
            f"must be absent or 0 with {form}: it alone says when a text may end",
        )
    return form


_PRIORITIES: Final = {
    pb.PRIORITY_UNSPECIFIED: Priority.DEFAULT,
    pb.PRIORITY_BATCH: Priority.BATCH,
    pb.PRIORITY_DEFAULT: Priority.DEFAULT,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}


def _priority(request: pb.GenerateRequest, complain: Complain) -> Priority:
    if request.priority not in _PRIORITIES:
        complain("priority", f"{request.priority} is not a priority known to this server")
        return Priority.DEFAULT
    return _PRIORITIES[request.priority]


def _session(
    request: pb.GenerateRequest, complain: Complain, limits: RequestLimits, n: int
) -> tuple[str | None, bool]:
    reuse: bool = value_of(request, "reuse_prefix", True)
    if not request.HasField("session_id"):
        return None, reuse
    check_id("session_id", request.session_id, complain, limits)
    if not reuse:
        complain("reuse_prefix", "must be absent or true with session_id")
    if n > 1:
        complain("sampling_params.n", "must be absent or 1 with session_id: a session is one text")
    return request.session_id, reuse
