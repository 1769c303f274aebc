"""Requests that are taken: what of them reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from selfdraft import SelfdraftError
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.service.changes import NEUTRAL, Change, sound, with_ids, with_sampling
from tests.service.harness import VOCAB, running

pytestmark = pytest.mark.anyio


ACCEPTED: dict[str, tuple[Change, dict[str, Any]]] = {
    "frequency": (with_sampling(frequency_penalty=-2.0), {"frequency_penalty": -2.0}),
    "presence": (with_sampling(presence_penalty=2.0), {"presence_penalty": 2.0}),
    "repetition": (with_sampling(repetition_penalty=10.0), {"repetition_penalty": 10.0}),
    "bias": (
        with_sampling(logit_bias={VOCAB - 1: -100.0, 3: 100.0, 9: 0.0}),
        {"logit_bias": ((3, 100.0), (VOCAB - 1, -100.0))},
    ),
    "seed": (with_sampling(seed=7), {"seed": 7, "coupled": True}),
    "no seed": (lambda r: None, {"coupled": False}),
}


async def test_values_at_their_limits_reach_the_engine() -> None:
    async with running() as up:
        for name, (change, expected) in ACCEPTED.items():
            request = sound()
            change(request)
            await up.client.start(request).text()
            sampling = up.engines[0].specs()[-1].sampling
            assert {key: getattr(sampling, key) for key in expected} == expected, name


async def test_row_options_reach_the_engine() -> None:
    async with running() as up:
        generation = up.client.generate(
            text="def add", max_tokens=9, min_tokens=9, logprobs=20, prompt_logprobs=0
        )
        await generation.text()
        spec = up.engines[0].specs()[-1]
        assert (spec.min_tokens, spec.max_tokens) == (9, 9)
        assert (spec.logprobs, spec.prompt_logprobs) == (20, 0)
        assert spec.constraint is None
        await up.client.generate(text="x", max_tokens=9, regex="[ab]{2}").text()
        assert up.engines[0].specs()[-1].constraint is not None


Seed = int | None
MODES: list[tuple[str, int | None, Seed, str, bool, bool]] = [
    # asked mode, max_depth, seed, mode used, coupled noise, drafts
    ("auto", None, None, "REJECTION", False, True),
    ("auto", None, 5, "COUPLED", True, True),
    ("auto", 0, None, "OFF", True, False),
    ("auto", 0, 5, "OFF", True, False),
    ("auto", 2, 5, "COUPLED", True, True),
    ("off", None, None, "OFF", True, False),
    ("off", None, 5, "OFF", True, False),
    ("coupled", None, None, "COUPLED", True, True),
    ("coupled", None, 5, "COUPLED", True, True),
    ("rejection", None, 5, "REJECTION", False, True),
    ("rejection", None, None, "REJECTION", False, True),
]


async def test_speculation_modes() -> None:
    async with running() as up:
        for mode, depth, seed, used, coupled, drafts in MODES:
            options: dict[str, Any] = {} if seed is None else {"seed": seed}
            generation = up.client.generate(
                text="x",
                speculation=mode,  # type: ignore[arg-type]
                max_depth=depth,
                max_tokens=30,
                ignore_eos=True,
                **options,
            )
            await generation.text()
            done = generation.complete
            assert done is not None
            case = (mode, depth, seed)
            assert pb.SpeculationMode.Name(done.speculation_mode).endswith(used), case
            assert (done.spec_draft_tokens > 0) is drafts, case
            sampling = up.engines[0].specs()[-1].sampling
            assert sampling.coupled is coupled, case
            assert sampling.seed == done.seed, case
            assert seed is None or done.seed == seed, case


def _with(request: pb.GenerateRequest, change: Change) -> pb.GenerateRequest:
    change(request)
    return request


async def test_neutral_values_mean_absent() -> None:
    async with running() as up:
        bare, spelt = sound(), sound()
        bare.sampling_params.CopyFrom(pb.SamplingParams(max_tokens=3, seed=2**64 - 1))
        spelt.sampling_params.CopyFrom(NEUTRAL)
        first, second = up.client.start(bare), up.client.start(spelt)
        assert await first.text() == await second.text()


async def test_the_last_of_several_inputs_is_the_input() -> None:
    """Protobuf itself keeps one member of a oneof, so "both" cannot reach the server."""
    async with running() as up:
        both = sound().SerializeToString() + _with(sound(), with_ids(9)).SerializeToString()
        generation = up.client.start(pb.GenerateRequest.FromString(both))
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.prompt_tokens == 1


async def test_chat_template_variables() -> None:
    async with running() as up:
        ok = up.client.generate(
            messages=[("user", "x")], template_variables={"enable_thinking": False}, max_tokens=1
        )
        await ok.text()
        for name in ("messages", "bos_token", "add_generation_prompt", "not a name"):
            bad = up.client.generate(messages=[("user", "x")], template_variables={name: 1})
            with pytest.raises(SelfdraftError) as caught:
                await bad.text()
            assert caught.value.violations[0].field == f"chat.chat_template_kwargs.{name}"
