"""Turn clean documents into token files: shuffled, chat examples added, ``uint16``, compressed.

``python pack.py --work WORK --model MODEL`` reads ``WORK/train.jsonl`` and ``WORK/heldout.jsonl``
and writes ``WORK/train.bin.xz`` and ``WORK/heldout.bin`` (little-endian ``uint16`` ids). Every
document ends with the end-of-text token; every chat turn ends with its own end token.
"""

import argparse
import ast
import json
import lzma
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizer import END_OF_TEXT, TURN_END, TURN_START
from tokenizers import Tokenizer

CHAT_SHARE = 0.08
BATCH = 512
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def turn(role: str, content: str) -> str:
    """Return one ChatML turn."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def third_person(summary: str) -> str:
    """Turn an imperative docstring summary ("Return the sum.") into "returns the sum"."""
    verb, _, rest = summary.rstrip(".").partition(" ")
    verb = verb.lower()
    if verb.endswith(("ss", "sh", "ch", "x", "z", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2:-1] not in "aeiou":
        verb = verb[:-1] + "ies"
    elif not verb.endswith("s"):
        verb += "s"
    return f"{verb} {rest}"


def usable_functions(source: str) -> Iterator[tuple[FunctionNode, str, str]]:
    """Yield ``(node, dedented source, docstring summary)`` of functions fit for a chat answer."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, FunctionNode) or node.decorator_list or node.end_lineno is None:
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        words = summary.split()
        phrased = 3 <= len(words) <= 25 and words[0].isalpha() and summary[0].isupper()
        if phrased and 80 <= len(code) <= 2500 and not node.name.startswith("__"):
            yield node, code, summary


def question(node: FunctionNode, code: str, summary: str, rng: random.Random) -> str:
    """Phrase the request that ``code`` answers."""
    args = [argument.arg for argument in node.args.args]
    kind = "method" if args[:1] in (["self"], ["cls"]) else "function"
    asked = third_person(summary)
    signature = code.split('"""')[0].rstrip()
    forms = [
        f"Write a {kind} that {asked}.",
        f"Write a {kind} that {asked}.",
        f"Write a Python {kind} `{node.name}` that {asked}.",
        f"Implement `{node.name}({', '.join(args)})`: {summary}",
        f"Complete this {kind}:\n\n{signature}",
        signature,
    ]
    return rng.choice(forms)


def chat(source: str, rng: random.Random) -> str | None:
    """Return a short conversation built from one file's functions, or None if it has none."""
    found = list(usable_functions(source))
    if not found:
        return None
    picked = rng.sample(found, min(len(found), rng.choice([1, 1, 1, 2])))
    system = turn("system", "You are a helpful coding assistant.") if rng.random() < 0.2 else ""
    turns = [
        turn("user", question(*function, rng)) + turn("assistant", function[1])
        for function in picked
    ]
    return system + "".join(turns)


def training_texts(path: Path, rng: random.Random) -> list[str]:
    """Return all training texts in random order: files, and chats up to their share of bytes."""
    with path.open(encoding="utf-8") as lines:
        files = [json.loads(line)["text"] for line in lines]
    budget = int(CHAT_SHARE * sum(map(len, files)))
    chats: list[str] = []
    sources = files * 3
    rng.shuffle(sources)
    for source in sources:
        if budget <= 0:
            break
        made = chat(source, rng)
        if made is not None:
            chats.append(made)
            budget -= len(made)
    print(f"{len(files)} files, {len(chats)} chats", flush=True)
    texts = files + chats
    rng.shuffle(texts)
    return texts


def encode(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encode texts, each followed by the end-of-text token, into one ``uint16`` array."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    for start in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch(texts[start : start + BATCH]):
            pieces.append(np.array([*encoding.ids, end], dtype="<u2"))
    return np.concatenate(pieces)


def main() -> None:
    """Parse the command line and write both token files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of tokenizer.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with (options.work / "heldout.jsonl").open(encoding="utf-8") as lines:
        heldout = [json.loads(line)["text"] for line in lines]
    held = encode(heldout, tokenizer)
    held.tofile(options.work / "heldout.bin")
    size = sum(len(text.encode()) for text in heldout)
    print(f"heldout {len(held)} tokens, {size / len(held):.4f} bytes per token", flush=True)
    train = encode(training_texts(options.work / "train.jsonl", random.Random(0)), tokenizer)
    print(f"train {len(train)} tokens", flush=True)
    with lzma.open(options.work / "train.bin.xz", "wb", preset=6) as out:
        out.write(train.tobytes())


if __name__ == "__main__":
    main()
