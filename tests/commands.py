"""What a person can type: the subcommands of `selfdraft` and the goals of the Makefile."""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import typer.main

from service.cli import app
from tests import checkout


@cache
def make_goals() -> frozenset[str]:
    makefile = checkout.read(PurePosixPath("Makefile"))
    return frozenset(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))


@cache
def options() -> dict[str, frozenset[str]]:
    """Subcommand -> its options, `--no-…` forms included. Under "" those of `selfdraft` itself."""
    group: Any = typer.main.get_command(app)
    commands = {"": group, **group.commands}
    for name, command in group.commands.items():
        nested = getattr(command, "commands", {})
        commands |= {f"{name} {inner}": found for inner, found in nested.items()}
    return {
        name: frozenset(
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        )
        | {"--help"}
        for name, command in commands.items()
    }


def unknown(words: list[str]) -> list[str]:
    """What does not exist of a command line, split into words: the first is make or selfdraft."""
    if words[0] == "make":
        goals = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
        return [f"make {goal}" for goal in goals if goal not in make_goals()]
    named = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
    if named not in options():
        return [f"selfdraft {named}"]
    if "--" in words:  # what follows is somebody else's
        words = words[: words.index("--")]
    known = options()[named]
    if any(name.startswith(f"{named} ") for name in options()):  # a group; its options come first
        inner = next((word for word in words[2:] if f"{named} {word}" in options()), None)
        if inner is not None:
            known |= options()[f"{named} {inner}"]
        elif len(words) > 2:
            return [f"selfdraft {' '.join(words[1:3])}"]
    given = [word.split("=")[0] for word in words[1:] if word.startswith("-") and word != "-"]
    return [f"selfdraft {named} {option}" for option in given if option not in known]
