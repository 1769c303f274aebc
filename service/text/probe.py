"""Compiles one grammar in a process of its own, to learn whether it can be compiled here.

A grammar is a stranger's input to a compiler: one of a few kilobytes can overflow its stack, which
kills the process, or take gigabytes and minutes (a long chain of references, a large `multipleOf`).
So the first to compile it is a process that may die. Run as a file; it needs nothing of ours.

Reads {"grammar", "special", "limits", "memory_bytes"} as JSON on standard input and answers with
{"error"} on standard output; no answer means that it died.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_STACK_BYTES = 4 * 1024 * 1024
"""Half of what a server's thread has: what fits here fits there."""


_END_ID = 256


def special_ids(special: list[str]) -> dict[str, int]:
    """Ids of the special tokens in the vocabulary that grammars are tried with."""
    return {name: _END_ID + 1 + n for n, name in enumerate(special)}


class _Bytes:
    """A tokenizer of 256 bytes and the model's special tokens: all that a grammar can name."""

    eos_token_id = _END_ID
    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([n]) for n in range(256)] + [b"\xff<end>"]
        self.special_token_ids = [_END_ID, *special_ids(special).values()]
        self.tokens += [token.encode() for token in special]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _limit_memory(size: int) -> None:
    import resource

    # macOS has the call and no such limit: there the deadline is all.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def probe(ask: dict[str, Any]) -> str:
    """Why the grammar does not compile; empty when it does."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(ask["special"])))
    limits = LLParserLimits(**ask["limits"])
    matcher = LLMatcher(tokenizer, ask["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
        return ""
    return matcher.get_error()


def main() -> None:
    ask = json.load(sys.stdin)
    answer: list[str] = []
    _limit_memory(ask["memory_bytes"])
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: answer.append(probe(ask)))
    thread.start()
    thread.join()
    json.dump({"error": answer[0]}, sys.stdout)


if __name__ == "__main__":
    main()
