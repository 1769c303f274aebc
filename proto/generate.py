"""Regenerates the committed stubs: `python proto/generate.py [--out DIR]`.

The result depends on the version of grpcio-tools; `tests/service/test_stubs.py` checks that what is
committed says the same as the .proto files, whichever version made it.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every .proto file under `out`.

    Raises RuntimeError when protoc refuses.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("selfdraft/**/*.proto"))
    common = str(files("grpc_tools") / "_proto")
    flags = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    code = protoc.main(["protoc", f"-I{ROOT}", f"-I{common}", *flags, *sources])
    if code:
        raise RuntimeError(f"protoc failed with code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT, help="folder to write below")
    generate(parser.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
