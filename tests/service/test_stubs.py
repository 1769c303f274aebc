"""The committed stubs say what the .proto files say, and the package stands on its own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2
from selfdraft.v1 import admin_pb2, selfdraft_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
FOLDER = PROTO / "selfdraft" / "v1"
MODULES = {"selfdraft": selfdraft_pb2, "admin": admin_pb2}
"""By name of the .proto file."""
files = pytest.mark.parametrize("name", MODULES)


def stubs(name: str) -> tuple[str, str, str]:
    return (f"{name}_pb2.py", f"{name}_pb2.pyi", f"{name}_pb2_grpc.py")


def test_every_file_is_looked_at() -> None:
    assert {path.stem for path in FOLDER.glob("*.proto")} == MODULES.keys()


def _generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_stubs", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What today's tools make of the .proto files."""
    out = tmp_path_factory.mktemp("stubs")
    _generate().generate(out)
    return out / "selfdraft" / "v1"


def _descriptor(stub: Path) -> descriptor_pb2.FileDescriptorProto:
    """The file descriptor a generated module carries, whichever version generated it."""
    match = re.search(r"AddSerializedFile\((b'.*')\)", stub.read_text())
    assert match is not None
    data = eval(match[1])  # a bytes literal of our own stub
    return descriptor_pb2.FileDescriptorProto.FromString(data)


def _without_versions(stub: str) -> str:
    """A stub without comments, and without what names the version of the generator."""
    lines = [line for line in stub.splitlines() if not line.lstrip().startswith("#")]
    lines = [line for line in lines if "GENERATED_VERSION = " not in line]
    return "\n".join(re.sub(r"\s+\d+,?$", "", line) for line in lines if line.strip())


@files
def test_committed_descriptor_is_that_of_the_source(fresh: Path, name: str) -> None:
    committed = _descriptor(FOLDER / stubs(name)[0])
    assert committed == _descriptor(fresh / stubs(name)[0])
    loaded = descriptor_pb2.FileDescriptorProto()
    MODULES[name].DESCRIPTOR.CopyToProto(loaded)
    assert committed == loaded


@files
def test_committed_types_and_methods_are_those_of_the_source(fresh: Path, name: str) -> None:
    committed, made = ((folder / stubs(name)[2]).read_text() for folder in (FOLDER, fresh))
    calls = [re.findall(r"'(/selfdraft[^']+)'", text) for text in (committed, made)]
    assert calls[0] == calls[1] != []
    names = [
        re.findall(
            r"^(?:class|    def|    [A-Z_]+:) ?.*$", (folder / stubs(name)[1]).read_text(), re.M
        )
        for folder in (FOLDER, fresh)
    ]
    assert names[0] == names[1] != []


@files
def test_the_same_tools_make_the_same_bytes(fresh: Path, name: str) -> None:
    """With the version the committed stubs were made with, not one byte differs."""
    version = re.compile(r"GRPC_GENERATED_VERSION = '(.*)'")
    texts = {folder: (folder / stubs(name)[2]).read_text() for folder in (FOLDER, fresh)}
    found = [match[1] for text in texts.values() if (match := version.search(text))]
    same = len(set(found)) == 1
    for stub in stubs(name):
        committed, made = ((folder / stub).read_text() for folder in (FOLDER, fresh))
        if not same:
            committed, made = _without_versions(committed), _without_versions(made)
        if same or stub.endswith(".pyi"):
            assert committed == made, f"{stub}: run python proto/generate.py"


@files
def test_everything_is_documented(tmp_path: Path, name: str) -> None:
    """Every message, field, enum value and method has a comment of its own."""
    target = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", "--include_source_info"]
    subprocess.run(
        [*command, f"--descriptor_set_out={target}", str(FOLDER / f"{name}.proto")], check=True
    )
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    commented = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments}
    # Field numbers of FileDescriptorProto and its parts: how a location is addressed.
    wanted: dict[tuple[int, ...], str] = {(6, 0): "service"}
    for m, message in enumerate(file.message_type):
        wanted[4, m] = message.name
        for f, field in enumerate(message.field):
            wanted[4, m, 2, f] = f"{message.name}.{field.name}"
        assert all(nested.options.map_entry for nested in message.nested_type)
    for e, enum in enumerate(file.enum_type):
        wanted[5, e] = enum.name
        for v, value in enumerate(enum.value):
            wanted[5, e, 2, v] = value.name
    for m, method in enumerate(file.service[0].method):
        wanted[6, 0, 2, m] = method.name
    assert [what for path, what in wanted.items() if path not in commented] == []


def test_proto_is_no_package_and_the_client_needs_no_model() -> None:
    assert not (PROTO / "__init__.py").exists()
    assert (PROTO / "selfdraft" / "py.typed").exists()
    code = (
        "import sys; import selfdraft, selfdraft.v1.selfdraft_pb2_grpc;"
        "heavy = {'mlx', 'engine', 'scheduler', 'service', 'numpy'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_service_modules_never_import_mlx() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "service").rglob("*.py"))
    ]
    code = (
        f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}];"
        "sys.exit('mlx was imported' if 'mlx' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_line_is_light() -> None:
    code = (
        "import sys, service.cli;"
        "heavy = {'grpc', 'tokenizers', 'rich.console', 'numpy', 'anyio'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
