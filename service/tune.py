"""`selfdraft tune`: measure what a decode cycle costs on this machine, and keep it for `serve`."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from engine.config import EngineConfig
from engine.plan import EngineInfo
from engine.tune import Measured, check, expected_tokens, measure
from scheduler.costs import CostTable
from service import console
from service.config import SettingError
from service.costs import CostFile, cache_path, fingerprint
from service.text.tokenizer import Tokenizer, TokenizerError

PROMPT = "# The first twenty prime numbers.\ndef primes("
"""What the model continues when its acceptance is measured."""


MAX_SECONDS = 86_400.0
NOISY = 0.1


def parse_numbers(option: str, text: str, low: int, high: int) -> tuple[int, ...]:
    """'1,2,4' or '0..8' (both ends) or '0…8', sorted. Raises SettingError naming the option."""
    found: set[int] = set()
    for part in text.replace("…", "..").split(","):
        ends = [end.strip() for end in part.split("..")]
        if len(ends) > 2 or not all(end.isascii() and end.isdecimal() for end in ends):
            raise SettingError(option, f"must be numbers such as 1,2,4 or 0..8, not {text!r}")
        first, last = int(ends[0]), int(ends[-1])
        if not low <= first <= last <= high:
            raise SettingError(option, f"must be in {low} … {high}, not {part.strip()!r}")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def check_seconds(seconds: float) -> None:
    """Raises SettingError unless that is a time to measure for."""
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise SettingError("--seconds", f"must be > 0 and at most {MAX_SECONDS:g}")


def run_tune(
    config: EngineConfig,
    *,
    rows: tuple[int, ...],
    depths: tuple[int, ...],
    seconds: float,
    context: int,
    output: Path | None,
) -> Path:
    """Measure, show and save; returns where it was saved.

    Raises SettingError when the engine has no room for what is asked, what loading raises, and
    OSError when the file cannot be written.
    """
    from engine.load import load_engine

    _check_output(output)
    progress = console.LoadProgress()
    try:
        engine = load_engine(config, progress)
        try:
            info = engine.info
            kept = tuple(depth for depth in depths if depth <= info.max_depth)
            if kept != depths:
                note = f"no drafts beyond depth {info.max_depth} with this model"
                console.stderr.print(note, style="yellow")
            try:
                check(engine, rows=rows, depths=kept, context=context)
            except ValueError as error:
                raise SettingError("tune", str(error)) from error
            found = measure(
                engine,
                rows=rows,
                depths=kept,
                seconds=seconds,
                clock=time.monotonic,
                context=context,
                prompt=_prompt(config.model),
                progress=progress,
            )
        finally:
            engine.close()
    finally:
        progress.close()
    show(found, info)
    path = output or cache_path(fingerprint(info))
    to_file(found, info).save(path)
    console.stderr.print(f"saved to {path}", soft_wrap=True)
    return path


def _check_output(output: Path | None) -> None:
    """Raises SettingError when the file could not be written, before minutes of measuring."""
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise SettingError("--output", f"{output} is a directory")
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise SettingError("--output", f"cannot write {output}: {error.strerror}") from error


def _prompt(model: Path) -> list[int]:
    try:
        return list(Tokenizer.load(model).encode(PROMPT)) or [0]
    except TokenizerError:
        return [0]


def to_file(found: Measured, info: EngineInfo) -> CostFile:
    """The cost file of a measurement."""
    return CostFile(
        fingerprint=fingerprint(info),
        table=CostTable(
            seconds={(p.rows, p.depth): p.seconds for p in found.points},
            deviation=standard_error(found),
        ),
        extra={
            "source": "tune",
            "model_name": info.model,
            "context": found.context,
            "rounds": found.rounds,
            "acceptance": list(found.acceptance),
            "points": [asdict(point) for point in found.points],
        },
    )


def standard_error(found: Measured) -> float:
    """Of a typical point's median, as a share of it: that of a normal law with the same quartiles
    (its deviation is their distance / 1.349, a median's standard error 1.253 / √n of that)."""
    errors = [p.spread / 1.349 * 1.253 / math.sqrt(p.samples) for p in found.points]
    return max(0.01, statistics.median(errors))


def best_depths(found: Measured) -> dict[int, int]:
    """Rows → the depth with the most tokens per second at the measured acceptance."""
    best: dict[int, tuple[float, int]] = {}
    for point in found.points:
        rate = expected_tokens(found.acceptance, point.depth) / point.seconds
        best[point.rows] = max(best.get(point.rows, (0.0, 0)), (rate, point.depth))
    return {rows: depth for rows, (_, depth) in best.items()}


def show(found: Measured, info: EngineInfo) -> None:
    """Print the table to standard output."""
    best = best_depths(found)
    title = f"{info.model} on {info.device}, BLAS {info.blas}, {found.context} tokens of context"
    table = Table(title=title, title_justify="left")
    for column in ("rows", "depth", "ms", "quartiles", "tokens/s", "× depth 0", ""):
        table.add_column(column, justify="right")
    base = {p.rows: p.seconds for p in found.points if p.depth == 0}
    rows = 0
    for point in found.points:
        if rows and point.rows != rows:
            table.add_section()
        rows = point.rows
        tokens = expected_tokens(found.acceptance, point.depth)
        gain = f"{tokens * base[rows] / point.seconds:.2f}" if rows in base else ""
        table.add_row(
            str(rows),
            str(point.depth),
            f"{point.seconds * 1e3:.2f}",
            f"{point.low * 1e3:.2f} … {point.high * 1e3:.2f}",
            f"{rows * tokens / point.seconds:.1f}",
            gain,
            "best" if best[rows] == point.depth else "",
        )
    console.stdout.print(table)
    chances = " ".join(f"{chance:.2f}" for chance in found.acceptance) or "no drafts"
    spread = max(point.spread for point in found.points)
    console.stdout.print(
        f"acceptance per position, given the ones before: {chances}\n"
        f"best depth per rows: {', '.join(f'{r}: {d}' for r, d in best.items())}\n"
        f"{found.rounds} rounds, widest spread of quartiles {spread:.0%}"
    )
    if standard_error(found) > NOISY:
        note = f"the machine is noisy: medians are good to about {standard_error(found):.0%} only"
        console.stderr.print(f"{note}; measure longer, or when it is quiet", style="yellow")
