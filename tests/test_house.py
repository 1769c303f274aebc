"""What must hold of the checkout itself: links, commands, licence, no switches, no giants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests import checkout, commands

# Written in pieces so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w./-])/(?:work|root|tmp/bash_jobs)" + r"(?=[/\s\"'`]|$)")
REGISTRY_HOSTS = re.compile(
    r"\b(?:py"
    r"pi\.org|pythonhosted\.org|npm"
    r"js\.(?:org|com)|(?:deb|security|archive)\.(?:debian|ubuntu)\.(?:org|com)"
    r"|proxy\.go"
    r"lang\.org|crates\.io|repo\.maven\.apache\.org|rubygems\.org)\b"
)
# Configuration is one value, read in one place. The peer whose ideas we serve has 762 switches.
NO_SWITCHES = ("engine", "metal", "scheduler", "service", "proto")
FUNCTION_LIMIT = 100
LINK = re.compile(r"!?\[[^\]\[]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:make|selfdraft) [a-z-][^`]*)`")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.M)


def text_files() -> Iterator[tuple[PurePosixPath, str]]:
    for path in checkout.files():
        try:
            yield path, checkout.read(path)
        except UnicodeDecodeError:
            continue


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in text_files()
        for match in pattern.finditer(text)
    ]


def test_no_path_of_one_machine_is_written_down() -> None:
    assert matches(MACHINE_PATHS) == []


def test_no_registry_is_named() -> None:
    """Which index packages come from is the machine's configuration, not the project's."""
    assert matches(REGISTRY_HOSTS) == []


@pytest.mark.parametrize(
    ("pattern", "text", "seen"),
    [
        (MACHINE_PATHS, "cd /wo" + "rk/main", True),
        (MACHINE_PATHS, "'/ro" + "ot/.cache'", True),
        (MACHINE_PATHS, "frame/work/x and docs/root/y", False),
        (REGISTRY_HOSTS, "see https://pypi" + ".org/simple", True),
        (REGISTRY_HOSTS, "from PyPI, with pip", False),
    ],
)
def test_the_patterns_see(pattern: re.Pattern[str], text: str, seen: bool) -> None:
    assert bool(pattern.search(text)) is seen


def test_licence() -> None:
    text = checkout.read(PurePosixPath("LICENSE"))
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in checkout.read(PurePosixPath("pyproject.toml"))


def markdown() -> list[PurePosixPath]:
    return [path for path in checkout.files() if path.suffix == ".md"]


def anchor(heading: str) -> str:
    """The fragment that a code host gives a heading."""
    bare = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", bare).strip().replace(" ", "-")


def broken_links(path: PurePosixPath, text: str) -> list[str]:
    prose = FENCE.sub("", text)
    broken = []
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        there = checkout.ROOT / path.parent / name if name else None
        if there and not there.exists():
            broken.append(f"{path}: {target}")
        elif fragment and (there is None or there.suffix == ".md"):
            page = there.read_text(encoding="utf-8") if there else text
            if fragment not in map(anchor, HEADING.findall(FENCE.sub("", page))):
                broken.append(f"{path}: {target} (no such heading)")
    return broken


def test_links_resolve() -> None:
    assert [line for path in markdown() for line in broken_links(path, checkout.read(path))] == []


def test_a_broken_link_is_seen() -> None:
    page = "# One two\n[a](Makefile) [b](#one-two) [c](nowhere.md) [d](#three) [e](https://x.test)"
    assert broken_links(PurePosixPath("page.md"), page) == [
        "page.md: nowhere.md",
        "page.md: #three (no such heading)",
    ]


def shell_lines(text: str) -> Iterator[str]:
    """Commands in shell blocks (continuation lines joined, prompts and comments taken off) and
    those of ours that are named in a sentence."""
    yield from INLINE.findall(FENCE.sub("", text))
    for language, block in FENCE.findall(text):
        if language in {"sh", "bash", "shell", "console"}:
            for line in block.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ").split(" #")[0].strip()
                if command and not command.startswith("#"):
                    yield command


def unknown_commands(text: str) -> list[str]:
    """Commands of ours in `text` that do not exist: make goals, subcommands, options."""
    unknown = []
    for command in shell_lines(text):
        words = command.split()
        if PurePosixPath(words[0]).name in {"make", "selfdraft"}:
            unknown += commands.unknown([PurePosixPath(words[0]).name, *words[1:]])
    return unknown


def test_documented_commands_exist() -> None:
    found = {str(path): unknown_commands(checkout.read(path)) for path in markdown()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_an_unknown_command_is_seen() -> None:
    page = """Run `make all`.
```sh
make demo
$ make nonsense  # no
.venv/bin/selfdraft serve --port=0 \\
    --nonsense 1
selfdraft nonsense --x
selfdraft token new --tenant x --nonsense
selfdraft admin --target x:1 nonsense
selfdraft admin --target x:1 drain
```
```python
make("nonsense")
```
"""
    assert unknown_commands(page) == [
        "make all",
        "make nonsense",
        "selfdraft serve --nonsense",
        "selfdraft nonsense",
        "selfdraft token --nonsense",
        "selfdraft admin --target",
    ]


def switches(source: str) -> list[int]:
    """Lines that read or write the environment."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for a in node.names if a.name in {"environ", "getenv", "putenv"}]
    return lines


def test_no_environment_switches() -> None:
    found = [
        f"{path}:{line}"
        for path in checkout.python_files()
        if path.parts[0] in NO_SWITCHES
        for line in switches(checkout.read(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['X']", "from os import getenv", "import os\nos.getenv('X')"]
)
def test_a_switch_is_seen(source: str) -> None:
    assert switches(source)


def test_functions_fit_a_screen() -> None:
    found = []
    for path in checkout.python_files():
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        for node in ast.walk(ast.parse(checkout.read(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LIMIT:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    assert found == []
