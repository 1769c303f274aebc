"""Random walks through grammars: what takes the place of a model that wants anything at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.plan import Constraint
from engine.tiny import MODEL_DIR
from service.text.grammar import Form, Grammars
from service.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
SIZES = {"byte_level": 437, "sentencepiece": 437, "tiny": 4096}
"""The model's vocabulary: not that of the tokenizer, nor a multiple of 32."""


def load(name: str) -> Tokenizer:
    """With a second end token, as many models have one."""
    tokenizer = Tokenizer.load(MODEL_DIR if name == "tiny" else FIXTURES / name)
    if name != "tiny":
        tokenizer.eos_ids = (*tokenizer.eos_ids, 3)
    return tokenizer


TOKENIZERS = {name: load(name) for name in SIZES}
GRAMMARS = {name: Grammars(TOKENIZERS[name], vocab_size=SIZES[name]) for name in SIZES}

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "médium", "großer 🦊"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 20}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "paid": {"type": ["boolean", "null"]},
    },
    "required": ["name", "size", "where"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def ids_of(mask: NDArray[np.uint32]) -> list[int]:
    """Tokens a mask allows, by the contract's own words."""
    return [t for t in range(32 * len(mask)) if int(mask[t // 32]) >> (t % 32) & 1]


def walk(
    constraint: Constraint, eos_ids: Sequence[int], rng: random.Random, *, most: int = 400
) -> list[int]:
    """Random allowed tokens up to an end token, which is not in the result. An early end is
    unlikely, a late one is not: after a while every chance to end is taken."""
    ids: list[int] = []
    while len(ids) < most:
        mask = constraint.mask(ids[len(ids) :])
        assert mask is not None
        allowed = ids_of(mask)
        assert allowed, "at least one token always is"
        ends = [token for token in allowed if token in eos_ids]
        others = [token for token in allowed if token not in eos_ids]
        if ends and (not others or len(ids) > 40 or rng.random() < 0.1):
            constraint.advance([rng.choice(ends)])
            return ids
        ids.append(rng.choice(others))
        constraint.advance(ids[-1:])
    raise AssertionError(f"{most} tokens and no end")


async def texts(name: str, form: Form, source: str, walks: int) -> list[str]:
    compiled = await GRAMMARS[name].compile(form, source)
    found = []
    for seed in range(walks):
        constraint = compiled.constraint()
        ids = walk(constraint, TOKENIZERS[name].eos_ids, random.Random(seed))
        assert constraint.failure is None
        found.append(decode(name, ids))
    return found


def decode(name: str, ids: Sequence[int]) -> str:
    """As a stream shows it after a prompt."""
    stream = TOKENIZERS[name].stream(TOKENIZERS[name].encode("x"))
    return "".join([stream.feed(token) for token in ids] + [stream.finish()])
