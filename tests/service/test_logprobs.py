"""Log probabilities: beside the tokens they belong to, whatever the bursts and ends."""

from __future__ import annotations

import pytest
from selfdraft import Generation
from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import Logprobs
from service import relay
from service.logprobs import add_input, add_output
from tests.service.harness import VOCAB, Running, pretend_logprobs, running, saying

pytestmark = pytest.mark.anyio


async def check_chunks(generation: Generation, count: int) -> dict[int, list[int]]:
    """Every chunk with tokens has the log probabilities of exactly those, as the engine gave them;
    returns the tokens by index. Raises AssertionError."""
    ids: dict[int, list[int]] = {}
    async for chunk in generation:
        assert chunk.HasField("output_logprobs") is bool(chunk.token_ids)
        found = chunk.output_logprobs
        assert list(found.token_ids) == list(chunk.token_ids)
        expected = pretend_logprobs(chunk.token_ids, count)
        assert list(found.token_logprobs) == pytest.approx(expected.chosen)
        if count:
            assert [tuple(top.token_ids) for top in found.top_logprobs] == list(expected.top_ids)
            for top, values in zip(found.top_logprobs, expected.top, strict=True):
                assert list(top.values) == pytest.approx(values)
        else:
            assert not found.top_logprobs
        ids.setdefault(chunk.index, []).extend(chunk.token_ids)
    return ids


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_each_token_has_its_own(count: int) -> None:
    async with running(acceptance=0.9) as up:
        generation = up.client.generate(
            text="x", max_tokens=40, ignore_eos=True, logprobs=count, n=2, seed=3
        )
        ids = await check_chunks(generation, count)
        assert [len(tokens) for tokens in ids.values()] == [40, 40]


async def check_stop(up: Running) -> None:
    """A stop string in the middle of a burst cuts tokens and log probabilities alike."""
    generation = up.client.generate(
        text="x", stop=["n fox ju"], max_tokens=200, logprobs=2, temperature=0.5
    )
    ids = await check_chunks(generation, 2)
    done = generation.complete
    assert done is not None
    assert (done.matched_stop_str, done.completion_tokens) == ("n fox ju", len(ids[0]))


async def test_a_stop_string_in_a_burst_cuts_both() -> None:
    text = "The quick brown fox jumps over the lazy dog. "
    async with running(token=saying(text), acceptance=0.99) as up:
        for _ in range(5):
            await check_stop(up)


async def test_uncut_logprobs_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: those of the whole burst are sent."""

    def uncut(target: pb.OutputLogProbs, logprobs: Logprobs, ids: object) -> None:
        add_output(target, logprobs, range(len(logprobs.chosen)))

    monkeypatch.setattr(relay, "add_output", uncut)
    text = "The quick brown fox jumps over the lazy dog. "
    async with running(token=saying(text), acceptance=0.99) as up:
        with pytest.raises(AssertionError):
            await check_stop(up)


@pytest.mark.parametrize("count", [0, 3])
async def test_the_prompts_come_first_and_once(count: int) -> None:
    prompt = (5, 6, 7, 8)
    async with running() as up:
        generation = up.client.generate(
            token_ids=prompt, max_tokens=8, ignore_eos=True, prompt_logprobs=count, n=3
        )
        chunks = [chunk async for chunk in generation]
        with_prompt = [chunk for chunk in chunks if chunk.HasField("input_logprobs")]
        assert [chunk.index for chunk in with_prompt] == [0]
        assert with_prompt[0] == next(chunk for chunk in chunks if chunk.index == 0)
        found = with_prompt[0].input_logprobs
        assert tuple(found.token_ids) == prompt
        assert not found.token_logprobs[0].HasField("value")
        values = [entry.value for entry in found.token_logprobs[1:]]
        assert values == pytest.approx(pretend_logprobs(prompt[1:], count).chosen)
        if count:
            assert not found.top_logprobs[0].token_ids
            tops = [tuple(top.token_ids) for top in found.top_logprobs[1:]]
            assert tops == list(pretend_logprobs(prompt[1:], count).top_ids)
        else:
            assert not found.top_logprobs
        assert not any(chunk.HasField("output_logprobs") for chunk in chunks)


async def test_nothing_is_reported_unasked() -> None:
    async with running() as up:
        async for chunk in up.client.generate(text="x", max_tokens=20, ignore_eos=True):
            assert not chunk.HasField("output_logprobs")
            assert not chunk.HasField("input_logprobs")


def test_messages_of_one_token_prompts() -> None:
    empty = pretend_logprobs((), 3)
    message = pb.InputLogProbs()
    add_input(message, empty, (9,))
    assert (list(message.token_ids), len(message.token_logprobs)) == ([9], 1)
    assert not message.token_logprobs[0].HasField("value")
    last = pb.OutputLogProbs()
    add_output(last, pretend_logprobs((VOCAB - 1,), 1), (VOCAB - 1,))
    assert (list(last.token_ids), len(last.token_logprobs)) == ([VOCAB - 1], 1)
