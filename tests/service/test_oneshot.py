"""What `selfdraft generate` prints, with a server whose answers are known."""

from __future__ import annotations

from typing import Any

import pytest

from service.oneshot import Ask, _stream
from tests.service.harness import pretend_logprobs, running, saying, tokenizer

pytestmark = pytest.mark.anyio


def ask(**options: Any) -> Ask:
    """A prompt with these sampling parameters."""
    return Ask(
        prompt="x",
        chat=False,
        system=None,
        sampling={"max_tokens": 4, "seed": 7, **options},
        session_id=None,
        speculation="coupled",
        max_depth=None,
        timeout=None,
    )


async def test_log_probabilities_are_a_line_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(token=saying("The quick")) as up:
        await _stream(up.client, ask(logprobs=2))
    out, err = capsys.readouterr()
    ids = [saying("The quick")((), n) for n in range(4)]
    assert out == tokenizer().decode(ids) + "\n"
    lines = err.splitlines()
    assert len(lines) == 5
    found = pretend_logprobs(ids, 2)
    for token, own_logprob, top, line in zip(ids, found.chosen, found.top, lines, strict=False):
        own = tokenizer().decode([token]).replace('"', '\\"')
        assert line.split()[0] == f"{own_logprob:.4f}"
        assert f'"{own}"' in line
        assert line.endswith(f" {top[1]:.3f}")
    assert "4 tokens in" in lines[-1]
    assert "seed 7 (coupled)" in lines[-1]


async def test_several_texts_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(token=saying("ab")) as up:
        await _stream(up.client, ask(n=2))
    out, err = capsys.readouterr()
    assert out == "--- 0\nabab\n--- 1\nabab\n"
    assert len(err.splitlines()) == 2
