"""The .proto files keep buf's rules, and change without breaking what was released."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from selfdraft.v1 import admin_pb2, selfdraft_pb2

from tests.checkout import ROOT

PROTO = ROOT / "proto"
RELEASED = PROTO / "api.binpb"
BUF = Path(sysconfig.get_path("scripts")) / "buf"


def buf(command: str, folder: Path, *options: str) -> str:
    """What buf complains about; "" where it is content."""
    done = subprocess.run(
        [str(BUF), command, str(folder), *options], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr, done.stderr
    assert (done.returncode == 0) is not bool(done.stdout)
    return done.stdout


def breaks(folder: Path) -> str:
    return buf("breaking", folder, "--against", str(RELEASED))


def test_lint() -> None:
    assert buf("lint", PROTO) == ""


def test_nothing_released_is_broken() -> None:
    assert breaks(PROTO) == ""


def test_make_runs_the_same() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "bin/buf lint proto\n" in recipe
    assert "bin/buf breaking proto --against proto/api.binpb\n" in recipe


def test_the_image_holds_the_whole_api() -> None:
    image = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())
    services = {f"{file.package}.{s.name}" for file in image.file for s in file.service}
    assert services == {
        selfdraft_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
    }
    assert not any(file.HasField("source_code_info") for file in image.file)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The .proto files and buf's settings, to be changed."""
    ignored = shutil.ignore_patterns("*.py", "*.pyi", "__pycache__")
    return Path(shutil.copytree(PROTO, tmp_path / "proto", ignore=ignored))


def change(folder: Path, before: str, after: str) -> None:
    path = folder / "selfdraft" / "v1" / "selfdraft.proto"
    text, count = re.subn(before, after, path.read_text(encoding="utf-8"), flags=re.M)
    assert count == 1, before
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (r"rpc Abort\(.*\n", "", '"Abort"'),
        (r"optional string session_id = 7;", "optional string session_id = 77;", '"7"'),
        (r"optional string session_id = 7;", "optional bytes session_id = 7;", '"bytes"'),
        (r"optional string session_id = 7;", "optional string session = 7;", '"session"'),
        (r"^  PRIORITY_BATCH = 1;\n", "", '"1"'),
        (r"returns \(stream GenerateResponse\)", "returns (GenerateResponse)", "streaming"),
    ],
)
def test_a_change_that_breaks_is_seen(copy: Path, before: str, after: str, complaint: str) -> None:
    change(copy, before, after)
    assert complaint in breaks(copy)


def test_what_is_added_breaks_nothing(copy: Path) -> None:
    change(
        copy,
        r"^service Inference \{$",
        "message PingRequest {}\n\nmessage PingResponse {}\n\nservice Inference {\n"
        "  rpc Ping(PingRequest) returns (PingResponse);\n",
    )
    change(copy, "(optional string session_id = 7;)", r"\1\n  optional string added_later = 1000;")
    assert (buf("lint", copy), breaks(copy)) == ("", "")


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (r"optional string session_id = 7;", "optional string sessionId = 7;", "lower_snake_case"),
        (r"^  PRIORITY_BATCH = 1;", "  BATCH = 1;", "prefixed"),
        (r"^package selfdraft.v1;", "package selfdraft;", "directory"),
    ],
)
def test_lint_sees(copy: Path, before: str, after: str, complaint: str) -> None:
    change(copy, before, after)
    assert complaint in buf("lint", copy)
