"""Which room may import what: `service → scheduler → engine → metal`, never upward.

The table is design.md's. Every import counts, also one inside a function or under TYPE_CHECKING: a
lazy import is a dependency all the same. What a room may use is listed, so a new dependency is a
decision made here and not a slip.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from tests import checkout

STDLIB = frozenset(sys.stdlib_module_names)

GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google")
# What the wall clock hides behind. The scheduler is handed a clock; a pure step is handed a time.
CLOCKS = ("time", "datetime", "sched", "timeit")


@dataclass(frozen=True)
class Room:
    """What one folder may import. Names are dotted prefixes; the standard library is allowed."""

    allowed: tuple[str, ...]
    never: tuple[str, ...] = ()
    """Taken out again, standard library included."""


ROOMS: dict[str, Room] = {
    "metal": Room(("metal", "mlx", "numpy")),
    "engine": Room(("engine", "metal", "mlx", "numpy"), never=("engine.tiny",)),
    # Where the bundled model lies; and its recipe: scripts run by hand, never by the service.
    "engine/tiny/__init__.py": Room(()),
    "engine/tiny": Room(("engine.plan", "mlx", "numpy", "tokenizers", "torch", "safetensors")),
    # numpy: page tables in a plan are int32 arrays on the host.
    "scheduler": Room(
        ("scheduler", "engine.plan", "engine.sampling_limits", "anyio", "numpy"), never=CLOCKS
    ),
    "service": Room(
        (
            *("service", "scheduler", "engine", "selfdraft", *GRPC, "anyio"),
            *("tokenizers", "llguidance", "jinja2", "huggingface_hub", "typer", "click", "rich"),
            *("structlog", "prometheus_client", "numpy", "platformdirs", "cryptography"),
            *("matplotlib", "smg_grpc_proto", "opentelemetry"),
        )
    ),
    # Other people's code imports this one; it brings nothing of the server along.
    # opentelemetry: where it is installed a call carries the current span along.
    "proto": Room(("selfdraft", *GRPC, "opentelemetry")),
    "proto/generate.py": Room(("grpc_tools",)),
}

# These modules of the scheduler meet the world: tasks, streams, errands, the engine's thread. The
# others are pure steps on explicit state, and neither wait nor ask what time it is.
SCHEDULER_SHELL = {"loop", "handle", "errands", "thread"}

TOP_LEVEL_FOLDERS = {".ci", "proto", "service", "scheduler", "engine", "metal", "deploy", "tests"}
TOP_LEVEL_FILES = {"pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md"}
# tests/ mirrors the rooms; integration/ joins several of them.
TEST_FOLDERS = TOP_LEVEL_FOLDERS - {".ci", "tests"} | {"benchmarks", "integration"}


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    """Dotted, absolute, with the imported name (`from engine import plan` is `engine.plan`)."""


def room_of(path: PurePosixPath) -> Room | None:
    """The most particular room that holds `path`, or None for tests and loose files."""
    for name in (path.as_posix(), *(parent.as_posix() for parent in path.parents)):
        if name in ROOMS:
            return ROOMS[name]
    return None


def imports_of(path: PurePosixPath, source: str) -> Iterator[Import]:
    """Every import in `source`, wherever it stands, `importlib` and `__import__` calls included."""
    package = path.parent.parts[1:] if path.parts[0] == "proto" else path.parent.parts
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:
                yield Import(node.lineno, module if alias.name == "*" else f"{module}.{alias.name}")
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            match node.args:
                case [ast.Constant(value=str() as name), *_]:
                    yield Import(node.lineno, name)
                case _:
                    # What cannot be read from the source must not be: no room is called that.
                    yield Import(node.lineno, "<computed>")


def called_name(call: ast.Call) -> str:
    func = call.func
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def violations(path: PurePosixPath, source: str) -> list[str]:
    """What in `source`, were it at `path`, breaks the table."""
    room = room_of(path)
    if room is None:
        return []
    # engine/tiny's scripts are run in place and import each other by bare name.
    siblings = {
        other.stem
        for other in checkout.python_files()
        if other.parent == path.parent and path.parts[:2] == ("engine", "tiny")
    }
    found = []
    for item in imports_of(path, source):
        root = item.module.split(".")[0]
        fine = root in STDLIB or root in siblings or within(item.module, room.allowed)
        if not fine or within(item.module, room.never):
            found.append(f"{path}:{item.line}: imports {item.module}")
    if path.parts[0] == "scheduler":
        found += impure_lines(path, source)
    return found


def impure_lines(path: PurePosixPath, source: str) -> Iterator[str]:
    """Clocks and waiting that hide in libraries the scheduler may otherwise use.

    The loop may name anyio's clock as the default of a parameter; nobody may call it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and called_name(node) == "current_time":
            yield f"{path}:{node.lineno}: reads a clock it was not given"
    if path.stem not in SCHEDULER_SHELL:
        for item in imports_of(path, source):
            if within(item.module, ("anyio", "asyncio", "threading", "queue", "socket")):
                yield f"{path}:{item.line}: {item.module} in a pure module"


def stray_entries(paths: tuple[PurePosixPath, ...]) -> list[str]:
    """Top-level entries, and folders of tests, that the architecture does not name."""
    found = set()
    for path in paths:
        top = path.parts[0]
        if len(path.parts) == 1:
            if top not in TOP_LEVEL_FILES and not top.startswith("."):
                found.add(top)
        elif top not in TOP_LEVEL_FOLDERS:
            found.add(top + "/")
        elif top == "tests" and len(path.parts) > 2 and path.parts[1] not in TEST_FOLDERS:
            found.add(f"tests/{path.parts[1]}/")
    return sorted(found)


def test_every_room_was_read() -> None:
    rooms = {path.parts[0] for path in checkout.python_files()}
    assert {"metal", "engine", "scheduler", "service", "proto"} <= rooms


def test_imports_run_downward() -> None:
    found = [
        line
        for path in checkout.python_files()
        for line in violations(path, checkout.read(path))
        # Generated code imports what protoc wants; the .proto files decide that.
        if "_pb2" not in path.name
    ]
    assert not found, "\n" + "\n".join(found)


def test_top_level_is_the_architecture() -> None:
    assert stray_entries(checkout.files()) == []


PLANTED = [
    ("scheduler/core.py", "import mlx.core as mx"),
    ("scheduler/core.py", "from mlx import core"),
    ("scheduler/core.py", "def f():\n    import grpc"),
    ("scheduler/core.py", "from engine.models import qwen"),
    ("scheduler/core.py", "from engine import plan, cycle"),
    ("scheduler/core.py", "import engine"),
    ("scheduler/core.py", "from ..engine import cycle"),
    ("scheduler/core.py", "from service import text"),
    ("scheduler/core.py", "import time"),
    ("scheduler/pages.py", "from time import monotonic"),
    ("scheduler/loop.py", "import time"),
    ("scheduler/depth.py", "from datetime import datetime"),
    ("scheduler/loop.py", "import anyio\nnow = anyio.current_time()"),
    ("scheduler/core.py", "import anyio"),
    ("scheduler/core.py", "from asyncio import sleep"),
    ("service/text.py", "import mlx.core"),
    ("service/text.py", "def f():\n    from mlx.utils import tree_flatten"),
    ("service/text.py", "import importlib\nimportlib.import_module('mlx.core')"),
    ("service/text.py", "import importlib\nname = 'm' + 'lx'\nimportlib.import_module(name)"),
    ("service/text.py", "__import__('mlx')"),
    ("service/text.py", "from metal import kernels"),
    ("service/text.py", "import tests.scheduler.fake_engine"),
    ("service/cli.py", "import requests"),
    ("engine/cycle.py", "import anyio"),
    ("engine/cycle.py", "import grpc"),
    ("engine/models/qwen.py", "from scheduler.request import Usage"),
    ("engine/models/qwen.py", "from ...scheduler import request"),
    ("engine/cycle.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import service"),
    ("engine/cycle.py", "try:\n    import structlog\nexcept ImportError:\n    pass"),
    ("engine/cycle.py", "from engine.tiny import train"),
    ("engine/tiny/train.py", "from service.text import Tokenizer"),
    ("metal/gemm.py", "from engine.plan import StepPlan"),
    ("metal/gemm.py", "import scheduler"),
    ("proto/selfdraft/client.py", "import mlx"),
    ("proto/selfdraft/client.py", "from service.client import Client"),
    ("proto/selfdraft/client.py", "from ...engine import plan"),
    ("proto/selfdraft/client.py", "import structlog"),
]


@pytest.mark.parametrize(("where", "source"), PLANTED)
def test_a_planted_import_is_seen(where: str, source: str) -> None:
    assert violations(PurePosixPath(where), source)


FINE = [
    (
        "scheduler/core.py",
        "from engine.plan import StepPlan\nfrom .pages import Pages\nimport heapq",
    ),
    ("scheduler/loop.py", "import anyio\nfrom engine import plan\nclock = anyio.current_time"),
    ("service/server.py", "import grpc.aio\nfrom scheduler.loop import Loop\nimport time"),
    ("service/server.py", "from google.rpc import error_details_pb2\nfrom engine import build"),
    ("engine/cycle.py", "import mlx.core as mx\nfrom metal import gemm\nimport time"),
    ("engine/models/qwen.py", "from . import layers\nfrom ..plan import StepPlan"),
    ("metal/gemm.py", "import mlx.core as mx"),
    ("proto/selfdraft/client.py", "import grpc\nfrom .v1 import selfdraft_pb2"),
    ("tests/engine/test_cycle.py", "import mlx, grpc, scheduler, service"),
]


@pytest.mark.parametrize(("where", "source"), FINE)
def test_what_the_table_allows_passes(where: str, source: str) -> None:
    assert violations(PurePosixPath(where), source) == []


@pytest.mark.parametrize("stray", ["utils/x.py", "notes.md", "src/engine/x.py", "tests/misc/x.py"])
def test_a_stray_entry_is_seen(stray: str) -> None:
    assert stray_entries((PurePosixPath("engine/plan.py"), PurePosixPath(stray)))


# The same rule at run time, where a re-export in an __init__ would show: what a room loads when it
# is imported, through everything it imports in turn.
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("selfdraft", ("mlx", "engine", "scheduler", "service", "metal", "numpy")),
        ("selfdraft.v1.selfdraft_pb2_grpc", ("mlx", "engine", "scheduler", "service", "metal")),
        ("scheduler", ("mlx", "grpc", "service")),
        ("scheduler.request", ("mlx", "grpc", "service")),
        ("engine.plan", ("mlx", "grpc", "scheduler", "service")),
        ("engine.sampling_limits", ("mlx", "grpc", "scheduler", "service")),
    ],
)
def test_importing_a_room_loads_nothing_above_it(module: str, absent: tuple[str, ...]) -> None:
    probe = f"import sys, {module}; print(*sorted(set(sys.modules) & set({absent!r})))"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=checkout.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
