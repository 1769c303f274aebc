"""Whatever way sampling parameters come in, the same bad values are refused, by the field's name.

The ways: a message to the service, a request to the scheduler, a plan for the engine, a call of
`LoadedModel.generate`. Each says which fields it carries at all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.api import LoadedModel
from engine.plan import RowSpec, SamplingParams
from engine.rules import check_spec
from engine.sampling_limits import ENGINE_LIMITS, PUBLIC_LIMITS, SamplingLimits, violations
from scheduler.admission import Limits, validate
from scheduler.config import SchedulerConfig
from scheduler.request import InvalidRequestError
from service.sampling import read_sampling
from tests.scheduler.bench import make_request
from tests.scheduler.fake_engine import FakeEngine

VOCAB = FakeEngine().info.vocab_size
FIELDS = frozenset(field.name for field in fields(SamplingParams))
UNBOUNDED = {"coupled"}

BAD: Mapping[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.nan, math.inf, -math.inf),
    "top_k": (-2,),
    "top_p": (0.0, -0.5, 1.01, math.nan, math.inf),
    "min_p": (-0.1, 1.0, math.nan),
    "seed": (-1, 2**64),
    "draft_temperature": (-1.0, math.nan, math.inf),
    "repetition_penalty": (0.0, -1.0, math.nan, math.inf),
    "frequency_penalty": (2.1, -2.1, math.nan, math.inf),
    "presence_penalty": (2.1, -2.1, math.nan, -math.inf),
    "logit_bias": (
        tuple((token, 1.0) for token in range(301)),
        ((1, 1.0), (1, 2.0)),
        ((VOCAB, 1.0),),
        ((-1, 1.0),),
        ((1, math.inf),),
        ((1, math.nan),),
    ),
}
GOOD: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1, 10**6),
    "top_p": (1.0, 0.01),
    "min_p": (0.0, 0.99),
    "seed": (0, 2**64 - 1),
    "draft_temperature": (None, 0.0, 100.0),
    "repetition_penalty": (0.01, 10.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "logit_bias": ((), tuple((t, -1.0) for t in range(300)), ((VOCAB - 1, 100.0), (0, -100.0))),
    "coupled": (False, True),
}
NARROWER: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (10.5,),
    "logit_bias": (((1, 100.5),), ((1, -100.5),)),
}
"""What the engine can obey and the service does not offer."""


def through_the_service(name: str, value: Any) -> str | None:
    message = pb.SamplingParams()
    if name != "logit_bias":
        setattr(message, name, value)
    else:
        try:
            message.logit_bias.update(dict(value))
        except ValueError:
            return "logit_bias: no such message"
        if len(message.logit_bias) != len(value):
            return "logit_bias: no such message"
    complaints: list[str] = []
    read_sampling(
        message,
        lambda path, limit: complaints.append(f"{path.removeprefix('sampling_params.')}: {limit}"),
        vocab_size=VOCAB,
        coupled=True,
    )
    return "; ".join(complaints) or None


def through_the_scheduler(name: str, value: Any) -> str | None:
    limits = Limits.of(FakeEngine().info, SchedulerConfig())
    request = replace(make_request(), sampling=SamplingParams(**{name: value}))
    try:
        validate(request, limits)
    except InvalidRequestError as error:
        return f"{error.field.removeprefix('sampling.')}: {error.message}"
    return None


def through_a_plan(name: str, value: Any) -> str | None:
    try:
        check_spec(3, RowSpec(sampling=SamplingParams(**{name: value}), max_tokens=1), VOCAB)
    except ValueError as error:
        return str(error).removeprefix("row 3: ")
    return None


class NothingRuns:
    """An engine, as far as arguments are checked against it."""

    info = FakeEngine().info


class Checked(LoadedModel):
    def _run(self, requests: Any, depth: Any) -> list[Any]:
        return []


def through_a_call(name: str, value: Any) -> str | None:
    engine: Any = NothingRuns()
    call: Any = Checked(engine).generate
    try:
        assert call([[1]], max_tokens=1, **{name: value}) == []
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Way:
    refusal: Callable[[str, Any], str | None]
    """What one field with this value is refused for, if it is."""
    carries: frozenset[str]
    limits: SamplingLimits = ENGINE_LIMITS


# A uint64 cannot be out of the seed's range; which mode is coupled is no field of its own.
ON_THE_WIRE = FIELDS & frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
WAYS = {
    "service": Way(through_the_service, ON_THE_WIRE, PUBLIC_LIMITS),
    "scheduler": Way(through_the_scheduler, FIELDS),
    "plan": Way(through_a_plan, FIELDS),
    "call": Way(
        through_a_call, FIELDS & frozenset(inspect.signature(LoadedModel.generate).parameters)
    ),
}


def cases(values: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    return [
        pytest.param(way, name, value, id=f"{way}-{name}-{str(value)[:24]}")
        for way in WAYS
        for name in sorted(WAYS[way].carries & values.keys())
        for value in values[name]
        if not (way == "service" and name == "seed" and not 0 <= value < 2**64)
    ]


def test_every_field_is_here() -> None:
    assert BAD.keys() | UNBOUNDED == FIELDS == GOOD.keys()
    assert not BAD.keys() & UNBOUNDED
    assert {"draft_temperature", "coupled"} == FIELDS - ON_THE_WIRE
    assert WAYS["call"].carries == {"temperature", "top_k", "top_p", "min_p", "seed"}


@pytest.mark.parametrize(("way", "name", "value"), cases(BAD))
def test_a_bad_value_is_refused_by_name(way: str, name: str, value: Any) -> None:
    refusal = WAYS[way].refusal(name, value)
    assert refusal is not None
    assert refusal.startswith(name)


@pytest.mark.parametrize(("way", "name", "value"), cases(GOOD))
def test_a_value_at_its_limit_is_taken(way: str, name: str, value: Any) -> None:
    assert WAYS[way].refusal(name, value) is None


@pytest.mark.parametrize(("way", "name", "value"), cases(NARROWER))
def test_only_the_service_draws_it_tighter(way: str, name: str, value: Any) -> None:
    refused = WAYS[way].refusal(name, value) is not None
    assert refused is (way == "service")


@pytest.mark.parametrize(("way", "name", "value"), cases(BAD))
def test_the_words_are_the_same(way: str, name: str, value: Any) -> None:
    """What is told is what the checker says, in that way's own error."""
    refusal = WAYS[way].refusal(name, value)
    assert refusal is not None
    params = SamplingParams(**{name: value})
    first = next(violations(params, vocab_size=VOCAB, limits=WAYS[way].limits))
    message = first.message.replace("or 0", "or 0 or -1") if way == "service" else first.message
    assert message.split(", is ")[0] in refusal or refusal.endswith("no such message")


def test_all_that_is_wrong_is_told() -> None:
    params = SamplingParams(temperature=-1.0, top_p=0.0, logit_bias=((VOCAB, math.nan),))
    found = [str(violation) for violation in violations(params, vocab_size=VOCAB)]
    assert found == [
        "temperature: must be finite and >= 0, is -1",
        "top_p: must be in (0, 1], is 0",
        f"logit_bias[{VOCAB}]: ids must be in 0 … {VOCAB - 1} (vocab_size)",
        f"logit_bias[{VOCAB}]: must be finite, is nan",
    ]
