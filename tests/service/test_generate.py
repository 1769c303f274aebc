"""Generate over a real connection: text, ends, usage, many at once."""

from __future__ import annotations

import anyio
import pytest
from selfdraft import Client
from selfdraft.v1 import selfdraft_pb2 as pb

from tests.scheduler.fake_engine import expected_tokens
from tests.service.harness import EOS, VOCAB, running, saying, tokenizer

pytestmark = pytest.mark.anyio


async def test_streams_tokens_and_text() -> None:
    async with running() as up:
        prompt = (5, 6, 7)
        expected = expected_tokens(prompt, seed=3, max_tokens=40, vocab_size=VOCAB)
        chunks: list[pb.GenerateStreamChunk] = []
        async with up.client.generate(
            token_ids=prompt, seed=3, max_tokens=40, ignore_eos=True
        ) as generation:
            chunks = [chunk async for chunk in generation]
        done = generation.complete
        assert done is not None
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert ids == expected
        assert [c.completion_tokens for c in chunks if c.token_ids][-1] == 40
        assert "".join(c.text for c in chunks) == tokenizer().decode(expected)
        assert (done.finish_reason, done.WhichOneof("matched_stop")) == ("length", None)
        assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (3, 0, 40)
        assert done.spec_draft_tokens == sum(c.spec_draft_tokens for c in chunks)
        assert done.spec_accepted_tokens == sum(c.spec_accepted_tokens for c in chunks)
        assert sum(done.spec_draft_tokens_per_pos) == done.spec_draft_tokens
        assert sum(done.spec_accepted_tokens_per_pos) == done.spec_accepted_tokens
        assert 0 < done.spec_accepted_tokens < done.spec_draft_tokens
        assert done.completion_tokens == 1 + done.spec_cycles + done.spec_accepted_tokens
        assert 0 <= done.queue_seconds <= done.time_to_first_token_seconds <= done.e2e_seconds
        assert done.seed == 3
        await up.until_idle()


async def test_text_and_chat_are_encoded_as_tokenize_says() -> None:
    async with running(token=saying("ok", then_eos=True)) as up:
        for kind in ({"text": "def add"}, {"messages": [("user", "def add")]}):
            ids = await up.client.tokenize(**kind)
            assert ids[0] != 0
            generation = up.client.generate(**kind)
            assert await generation.text() == "ok"
            assert generation.complete is not None
            assert generation.complete.prompt_tokens == len(ids)
        chat = await up.client.tokenize(messages=[("user", "def add")])
        text = await up.client.detokenize(chat, skip_special_tokens=False)
        assert text == "<|user|>def add<|end|><|assistant|>"
        assert await up.client.detokenize(chat) == "def add"


async def test_end_token_ends_the_text_and_is_not_shown() -> None:
    async with running(token=saying("bye", then_eos=True)) as up:
        generation = up.client.generate(text="x")
        assert await generation.text() == "bye"
        done = generation.complete
        assert done is not None
        assert done.finish_reason == "stop"
        assert done.matched_token_id == EOS
        ignoring = up.client.generate(text="x", ignore_eos=True, max_tokens=30)
        assert await ignoring.text() == "bye"
        assert ignoring.complete is not None
        assert ignoring.complete.finish_reason == "length"
        assert ignoring.complete.completion_tokens == 30


async def test_stop_token_text_is_kept_on_request() -> None:
    stop = tokenizer().encode("The quick fox")[-1]
    async with running(token=saying("The quick fox jumps")) as up:
        bare = up.client.generate(text="x", stop_token_ids=[stop], max_tokens=50)
        kept = up.client.generate(
            text="x", stop_token_ids=[stop], max_tokens=50, include_stop_str_in_output=True
        )
        short, long = await bare.text(), await kept.text()
        assert long.startswith(short)
        assert len(long) > len(short)
        assert bare.complete is not None
        assert bare.complete.matched_token_id == stop


@pytest.mark.parametrize("depth", [0, 1, 4])
async def test_stop_string_across_tokens_and_bursts(depth: int) -> None:
    text = "The quick brown fox jumps over the lazy dog. "
    async with running(token=saying(text), acceptance=0.9) as up:
        for include in (False, True):
            async with up.client.generate(
                text="x",
                stop=["never", "n fox ju"],
                include_stop_str_in_output=include,
                max_depth=depth,
                max_tokens=200,
            ) as generation:
                chunks = [chunk async for chunk in generation]
            shown = "".join(chunk.text for chunk in chunks)
            assert shown == ("The quick brown fox ju" if include else "The quick brow")
            done = generation.complete
            assert done is not None
            assert (done.finish_reason, done.matched_stop_str) == ("stop", "n fox ju")
            ids = [token for chunk in chunks for token in chunk.token_ids]
            assert done.completion_tokens == len(ids)
            # The ids end with the token that completed the stop string, whatever the burst.
            assert "n fox ju" in tokenizer().decode(ids)
            assert "n fox ju" not in tokenizer().decode(ids[:-1])
        await up.until_idle()
        assert up.finished("stop_string") == 2


async def test_many_sessions_at_once_get_their_own_tokens() -> None:
    async with running(max_rows=4, step_s=0.001) as up:
        texts: dict[int, list[int]] = {}

        async def one(seed: int) -> None:
            prompt = [seed + 1] * (1 + seed % 7)
            async with up.client.generate(
                token_ids=prompt,
                seed=seed,
                max_tokens=10 + seed,
                ignore_eos=True,
                temperature=seed / 10,
            ) as generation:
                texts[seed] = [t async for chunk in generation for t in chunk.token_ids]

        async with anyio.create_task_group() as tasks:
            for seed in range(24):
                tasks.start_soon(one, seed)
        for seed, ids in texts.items():
            prompt = tuple([seed + 1] * (1 + seed % 7))
            assert ids == expected_tokens(prompt, seed=seed, max_tokens=10 + seed, vocab_size=VOCAB)
        await up.until_idle()


async def test_speculation_can_be_turned_off_per_request() -> None:
    async with running() as up:
        for message in (
            pb.Speculation(mode=pb.SPECULATION_MODE_OFF),
            pb.Speculation(max_depth=0),
        ):
            request = pb.GenerateRequest(text="x", speculation=message)
            request.sampling_params.max_tokens = 20
            generation = up.client.start(request)
            await generation.text()
            assert generation.complete is not None
            assert generation.complete.spec_draft_tokens == 0
        capped = up.client.generate(text="x", max_depth=1, max_tokens=50, ignore_eos=True)
        await capped.text()
        assert capped.complete is not None
        assert len(capped.complete.spec_draft_tokens_per_pos) == 1


async def test_default_max_tokens_is_what_the_context_has_left() -> None:
    async with running(context_length=64, token=saying("a")) as up:
        generation = up.client.generate(token_ids=[7] * 10)
        await generation.text()
        assert generation.complete is not None
        assert generation.complete.completion_tokens == 54


async def test_drawn_seed_is_reported_and_repeats() -> None:
    async with running() as up:
        first = up.client.generate(text="x", max_tokens=20)
        text = await first.text()
        assert first.complete is not None
        again = up.client.generate(text="x", max_tokens=20, seed=first.complete.seed)
        assert await again.text() == text
        other = up.client.generate(text="x", max_tokens=20)
        await other.text()
        assert other.complete is not None
        assert other.complete.seed != first.complete.seed


async def test_emoji_is_never_split_between_chunks() -> None:
    text = "👨‍👩‍👧 déjà 你好 🤖"
    async with running(token=saying(text, then_eos=True), acceptance=0.3) as up:
        async with up.client.generate(text="x") as generation:
            parts = [chunk.text async for chunk in generation]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


async def test_text_continues_the_prompt_with_its_space() -> None:
    pieces = tokenizer("sentencepiece")
    ids = pieces.encode("fox jumps")

    def token(prompt: tuple[int, ...], index: int) -> int:
        return ids[index] if index < len(ids) else pieces.eos_ids[0]

    async with running(
        with_tokenizer=lambda: tokenizer("sentencepiece"), token=token, vocab_size=420
    ) as up:
        assert await up.client.generate(text="The quick").text() == " fox jumps"


async def test_model_info_names_the_model() -> None:
    async with running(max_rows=3, pages=99) as up:
        info = await up.client.model_info()
        assert (info.model, info.family, info.max_depth) == ("fake", "fake", 4)
        assert (info.max_rows, info.kv_pages, info.page_size) == (3, 99, 16)
        assert list(info.eos_token_ids) == [EOS]
        assert info.has_chat_template
        assert info.default_max_tokens == 99 * 16 - 1


async def test_one_client_many_calls(anyio_backend: str) -> None:
    async with running() as up, Client(up.target) as other:
        results = []

        async def info(client: Client) -> None:
            results.append((await client.model_info()).model)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(info, up.client)
                tasks.start_soon(info, other)
        assert results == ["fake"] * 40
