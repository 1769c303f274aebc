"""What the commands show a person: progress, tables, one-line errors. All but results on stderr."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from engine.budget import size
from engine.inspect import Inspection

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


class LoadProgress:
    """Shows how far a model has loaded: a bar on a terminal, one line per stage elsewhere."""

    def __init__(self, console: Console = stderr) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._stage = ""
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` parts are done, and `stage` is next. Called on the engine's thread."""
        with self._lock:
            if self._console.is_terminal:
                self._bar(stage, done, total)
            elif stage != self._stage and done < total:
                self._console.print(f"{stage} …")
            self._stage = stage

    def _bar(self, stage: str, done: int, total: int) -> None:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(stage, total=total)
            self._progress.start()
        self._progress.update(self._task, description=stage, completed=done, total=total)

    def close(self) -> None:
        """Removes the bar; idempotent."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


def show_inspection(found: Inspection, console: Console = stdout) -> None:
    """Prints what a checkpoint holds and whether it can run."""
    table = Table(show_header=False, title=str(found.path), title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _inspection_rows(found).items():
        table.add_row(name, value)
    console.print(table)


def _inspection_rows(found: Inspection) -> Mapping[str, str]:
    layers = str(found.layers)
    if found.linear_layers:
        layers += f" ({found.linear_layers} linear, {found.full_attention_layers} full attention)"
    rows = {
        "runnable": "yes" if found.runnable else "NO",
        "reason": found.reason,
        "family": found.family or found.model_type,
        "layers": layers,
        "parameters": f"{found.parameters:,} (MTP {found.mtp_parameters:,})",
        "size": f"{found.bytes_on_disk / 2**20:,.1f} MiB ({', '.join(found.stored_dtypes)})",
        "quantization": found.quantization,
        "context length": f"{found.context_length:,}",
        "vocabulary": f"{found.vocab_size:,}",
        "drafts with": found.backend.drafts_with,
        "verified by": found.backend.verified_by,
        "max depth": str(found.max_depth),
        "memory": f"{size(found.token_bytes)} per token, {size(found.row_bytes)} per row, "
        f"{size(found.boundary_bytes)} per saved prefix (float32)",
        "MTP layers": f"{found.mtp_advertised} advertised",
        "MTP tensors found": _names(found.mtp_found),
        "MTP tensors missing": _names(found.mtp_missing),
        "norms": "; ".join(x for x in (found.trunk_norms, found.mtp_norms) if x),
        "tokenizer": "yes" if found.tokenizer else "NO",
        "chat template": "yes" if found.chat_template else "no",
    }
    rows |= {f"note {n}": note for n, note in enumerate(found.notes, 1)}
    return rows


def _names(names: tuple[str, ...]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "none"


def show_finding(verdict: str, what: str, text: str, console: Console = stdout) -> None:
    """Prints one line of a check's report."""
    style = {"error": "red", "warning": "yellow"}.get(verdict, "")
    line = f"{verdict:<8}{what:<16}{' '.join(text.split())}"
    console.print(line, markup=False, style=style, soft_wrap=True)


def show_rows(fields: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows in columns, without a frame: for eyes and for awk."""
    table = Table(box=None, pad_edge=False)
    for field in fields:
        table.add_column(field, no_wrap=True)
    for row in rows:
        cells = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row)
        table.add_row(*(Text(cell or "-") for cell in cells))
    stdout.print(table, soft_wrap=True)


def fail(error: BaseException) -> None:
    """Says in one line what went wrong; one more for each further field at fault."""
    text = " ".join(str(error).split()) or type(error).__name__
    stderr.print(f"selfdraft: {text}", markup=False, style="red", soft_wrap=True)
    for violation in getattr(error, "violations", ())[1:]:
        line = f"  {violation.field}: {violation.description}"
        stderr.print(line, markup=False, style="red", soft_wrap=True)
