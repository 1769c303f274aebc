"""Cut benchmark prompts from the held-out packages at function boundaries.

``python prompts.py --work WORK --model MODEL`` writes ``MODEL/heldout.jsonl``. A prompt starts at a
top-level statement and ends after a function's signature, or after its docstring if it has one.
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fetch import Package, read_corpus
from tokenizers import Tokenizer

COUNT: Final = 64
SHORTEST, LONGEST = 40, 400


def last_prompt_line(node: ast.FunctionDef) -> int:
    """Return the 1-based line on which the signature, or the docstring after it, ends."""
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        return first.end_lineno
    return first.lineno - 1


def candidates(text: str) -> Iterator[str]:
    """Yield prompts of one file: from the start of a top-level statement to a function's head."""
    lines = text.split("\n")
    for top in ast.parse(text).body:
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                end = last_prompt_line(node)
                if top.lineno <= node.lineno <= end:
                    yield "\n".join(lines[top.lineno - 1 : end]).rstrip()


def pick(work: Path, tokenizer: Tokenizer, packages: dict[str, Package]) -> list[dict[str, object]]:
    """Return the chosen prompts with their origin, spread evenly over the packages."""
    rng = random.Random(0)
    found: dict[str, list[dict[str, object]]] = {name: [] for name in packages}
    with (work / "heldout.jsonl").open(encoding="utf-8") as documents:
        for line in documents:
            document = json.loads(line)
            package = packages[document["package"]]
            choices = list(candidates(document["text"]))
            for prompt in rng.sample(choices, min(6, len(choices))):
                tokens = len(tokenizer.encode(prompt).ids)
                if SHORTEST <= tokens <= LONGEST:
                    origin = {"package": package.name, "version": package.version}
                    origin |= {"licence": package.licence, "path": document["path"]}
                    found[package.name].append(origin | {"tokens": tokens, "prompt": prompt})
    for group in found.values():
        rng.shuffle(group)
    share = -(-COUNT // len(found))
    return [entry for group in found.values() for entry in group[:share]][:COUNT]


def main() -> None:
    """Parse the command line and write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    packages = {p.name: p for p in read_corpus() if p.split == "heldout"}
    with (options.model / "heldout.jsonl").open("w", encoding="utf-8") as out:
        for entry in pick(options.work, tokenizer, packages):
            out.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
