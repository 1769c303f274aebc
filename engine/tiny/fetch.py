"""Fetch the pinned packages of ``corpus.toml`` and turn their Python files into clean documents.

``python fetch.py download --to WHEELS`` asks the package index for each pinned version once.
``python fetch.py clean --wheels WHEELS --to WORK`` writes ``WORK/train.jsonl`` and
``WORK/heldout.jsonl``, one ``{"package", "path", "text"}`` object a line. Packages are split whole:
no file of a held-out package is ever trained on.
"""

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_FILE = 100_000
MAX_PACKAGE = 14_000_000
SKIPPED_PARTS = re.compile(
    r"^(_?tests?|test_.*|testing|.*_tests?|unittests?|functional|_?vendor|_?vendored|vendored_.*"
    r"|externals?|extern|_?extern|third_party|migrations|locale|enterprise|typeshed)$"
)
SKIPPED_NAMES = re.compile(r"^(test_.*|.*_tests?|conftest|.*_pb2(_grpc)?|_version|versioneer)\.py$")
GENERATED = re.compile(r"do not edit|auto-?generated|generated (by|from|automatically)", re.I)
HEADER = re.compile(r"\A(?:#!.*\n)?(?:[ \t]*(?:#.*)?\n)+")


@dataclass(frozen=True)
class Package:
    """One pinned entry of ``corpus.toml``."""

    name: str
    version: str
    licence: str
    split: str


def read_corpus(path: Path = HERE / "corpus.toml") -> list[Package]:
    """Return the packages named in ``corpus.toml``, in file order."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Package(**entry) for entry in data["package"]]


def download(target: Path) -> None:
    """Download every pinned package into ``target``, one request each, dependencies left out."""
    target.mkdir(parents=True, exist_ok=True)
    base = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--prefer-binary"]
    for package in read_corpus():
        pin = f"{package.name}=={package.version}"
        subprocess.run([*base, "-d", str(target), pin], check=True)


def archive_of(package: Package, wheels: Path) -> Path:
    """Return the downloaded archive of ``package``; exactly one must exist."""
    stem = re.sub(r"[-_.]+", "[-_.]", package.name)
    pattern = re.compile(rf"{stem}-{re.escape(package.version)}(-.*\.whl|\.tar\.gz)$", re.I)
    found = [path for path in wheels.iterdir() if pattern.match(path.name)]
    if len(found) != 1:
        raise FileNotFoundError(f"{package.name} {package.version}: {len(found)} archives")
    return found[0]


def python_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield ``(path inside the archive, content)`` of every ``.py`` file, in path order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(n for n in wheel.namelist() if n.endswith(".py")):
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        members = sorted((m for m in source if m.name.endswith(".py")), key=lambda m: m.name)
        for member in members:
            handle = source.extractfile(member)
            if handle is not None:
                yield member.name.split("/", 1)[-1], handle.read()


def wanted(path: str) -> bool:
    """Say whether a path is ordinary library code: no tests, vendored copies or generated files."""
    *folders, name = path.split("/")
    return not (any(map(SKIPPED_PARTS.match, folders)) or SKIPPED_NAMES.match(name))


def clean_text(raw: bytes) -> str | None:
    """Return the normalised text of a file, or None when it is not useful to learn from.

    Leading comment blocks (licence headers, coding cookies) are cut, trailing blanks removed.
    Refused: too small or large, undecodable, generated, data tables, unusually long lines.
    """
    if not 300 <= len(raw) <= MAX_FILE:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\t", "    ")
    except UnicodeDecodeError:
        return None
    if GENERATED.search(text[:1500]):
        return None
    header = HEADER.match(text)
    text = text[header.end() :] if header else text
    text = "\n".join(line.rstrip() for line in text.split("\n")).strip("\n") + "\n"
    lines = text.split("\n")
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    too_odd = max(map(len, lines)) > 400 or letters < 0.4 * len(text) or digits > 0.12 * len(text)
    not_ascii = len(text.encode()) - len(text) > 0.02 * len(text)
    return None if too_odd or not_ascii or len(text) < 300 else text


class NearDuplicates:
    """Remembers hashes of long lines and refuses texts that mostly repeat earlier ones."""

    def __init__(self, limit: float = 0.5) -> None:
        self._limit = limit
        self._seen: set[bytes] = set()

    def admit(self, text: str) -> bool:
        """Return False if over ``limit`` of the text's long lines were seen; else remember them."""
        lines = {line.strip() for line in text.split("\n") if len(line.strip()) > 24}
        keys = {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines}
        if not keys or len(keys & self._seen) > self._limit * len(keys):
            return False
        self._seen |= keys
        return True


def documents(package: Package, wheels: Path, seen: NearDuplicates) -> Iterator[dict[str, str]]:
    """Yield the cleaned documents of one package, in a fixed random order, up to the size cap."""
    members = [m for m in python_members(archive_of(package, wheels)) if wanted(m[0])]
    random.Random(package.name).shuffle(members)
    total = 0
    for path, raw in members:
        text = clean_text(raw)
        if text is None or not seen.admit(text):
            continue
        total += len(text)
        if total > MAX_PACKAGE:
            return
        yield {"package": package.name, "path": path, "text": text}


def clean(wheels: Path, target: Path) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``; held-out packages are read first.

    Reading them first makes the duplicate filter drop training files that copy held-out ones.
    """
    target.mkdir(parents=True, exist_ok=True)
    seen = NearDuplicates()
    packages = sorted(read_corpus(), key=lambda p: p.split != "heldout")
    for split in ("heldout", "train"):
        with (target / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            for package in packages:
                if package.split != split:
                    continue
                size = 0
                for document in documents(package, wheels, seen):
                    size += len(document["text"])
                    out.write(json.dumps(document) + "\n")
                print(f"{split:8} {package.name:24} {size / 1e6:7.2f} MB", flush=True)


def main() -> None:
    """Parse the command line and run one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["download", "clean"])
    parser.add_argument("--wheels", type=Path, default=Path("wheels"))
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    if options.step == "download":
        download(options.to)
    else:
        clean(options.wheels, options.to)


if __name__ == "__main__":
    main()
