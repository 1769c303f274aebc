"""What the demo prints."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.demo.sessions import Outcome, Session

LINE_EVERY_S: Final = 2.0
"""Without a terminal, how often a line of progress is printed."""


@dataclass
class Watch:
    """Live progress of one run: bars on a terminal, a line now and then elsewhere."""

    console: Console
    title: str
    _live: Live | None = None
    _phase: str = ""
    _started: float = 0.0
    _line_at: float = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        else:
            self.console.print(f"{self.title} …")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, phase: str, sessions: list[Session]) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._started, self._line_at = phase, now, 0.0
        tokens = sum(session.tokens for session in sessions)
        seconds = now - self._started
        if self._live is not None:
            self._live.update(self._bars(sessions, tokens))
        elif seconds >= self._line_at + LINE_EVERY_S:
            self._line_at = seconds
            wanted = sum(session.ask.max_tokens for session in sessions)
            self.console.print(f"  {phase}: {tokens}/{wanted} tokens after {seconds:.0f} s")

    def _bars(self, sessions: list[Session], tokens: int) -> Group:
        grid = Table.grid(padding=(0, 1))
        for session in sessions:
            bar = ProgressBar(session.ask.max_tokens, session.tokens, width=32)
            last = session.text.splitlines()[-1] if session.text else ""
            grid.add_row(
                session.ask.name,
                bar,
                f"{session.tokens}/{session.ask.max_tokens}",
                Text(last[:48], style="dim"),
            )
        return Group(Text(f"{self.title}, {self._phase}: {tokens} tokens"), grid)


def show_sample(console: Console, session: Session) -> None:
    """One session's prompt and what the model made of it."""
    text = Text(session.ask.prompt, style="dim") + Text(session.text, style="bold")
    console.print(Panel(text, title=f"session '{session.ask.name}': prompt, then text"))


def show_sessions(console: Console, outcome: Outcome) -> None:
    """A line per session."""
    table = Table(title="Sessions, all at once", title_justify="left")
    for name in ("session", "prompt", "temperature", "tokens", "seconds", "tokens/s", "accepted"):
        table.add_column(name, justify="left" if name == "session" else "right")
    for session in outcome.sessions:
        done = session.complete
        assert done is not None
        drafted = done.spec_draft_tokens
        table.add_row(
            session.ask.name,
            str(done.prompt_tokens),
            f"{session.ask.temperature:g}",
            str(session.tokens),
            f"{session.seconds:.1f}",
            f"{session.tokens / session.seconds:.1f}",
            f"{done.spec_accepted_tokens / drafted:.2f}" if drafted else "–",
        )
    console.print(table)


def show_comparison(console: Console, runs: dict[str, Outcome]) -> None:
    """The runs side by side; the first is the one with drafts."""
    table = Table(title="The model drafts for itself", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    columns = [_figures(outcome) for outcome in runs.values()]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "–") for column in columns))
    console.print(table)
    drafting, *others = runs.values()
    if drafting.acceptance() is None:
        console.print("The server did not draft:", *drafting.notes, sep="\n  ", markup=False)
    elif others:
        rate, plain = (run.tokens / run.seconds for run in (drafting, others[0]))
        console.print(f"Drafts bring {rate / plain:.2f} times the tokens per second.")
        same, greedy = _same_texts(drafting, others[0])
        console.print(
            f"At temperature 0, {same} of {greedy} sessions wrote the same text with and without "
            "(a near-tie between two tokens may flip)."
        )


def _same_texts(left: Outcome, right: Outcome) -> tuple[int, int]:
    """Of the greedy sessions, how many wrote the same in both runs, and how many there are."""
    pairs = zip(left.sessions, right.sessions, strict=True)
    same = [a.text == b.text for a, b in pairs if a.ask.temperature == 0]
    return sum(same), len(same)


def _figures(outcome: Outcome) -> dict[str, str]:
    first = [session.first_token_s for session in outcome.sessions]
    gaps = [gap for session in outcome.sessions for gap in session.gaps]
    acceptance = outcome.acceptance()
    figures = {
        "tokens": str(outcome.tokens),
        "wall clock": f"{outcome.seconds:.1f} s",
        "tokens/s, all sessions": f"{outcome.tokens / outcome.seconds:.1f}",
        "tokens per verify pass": f"{outcome.tokens_per_pass():.2f}",
        "drafts accepted": "–" if acceptance is None else f"{acceptance:.2f}",
    }
    for number, rate in enumerate(outcome.acceptance_per_position(), 1):
        figures[f"  draft {number}"] = f"{rate:.2f}"
    figures |= {
        "KV cache, peak": f"{outcome.kv_peak:.1%}",
        "first token, p50 / p95": _percentiles(first),
        "between tokens, p50 / p95": _percentiles(gaps),
    }
    return figures


def _percentiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "–"
    p50, p95 = (ordered[min(int(len(ordered) * q), len(ordered) - 1)] for q in (0.5, 0.95))
    return f"{p50 * 1000:.0f} / {p95 * 1000:.0f} ms"


def _own_program() -> str:
    """This program as it can be typed from here: beside the interpreter, in the virtual
    environment."""
    program = Path(sys.executable).with_name("selfdraft")
    try:
        return str(program.relative_to(Path.cwd()))
    except ValueError:
        return str(program)


def show_commands(console: Console, model: str | None) -> None:
    """How to do it oneself."""
    option = f" --model {model}" if model else ""
    program = "selfdraft" if shutil.which("selfdraft") else _own_program()
    console.print("\nDo it yourself:")
    for line in (
        f"{program} serve{option}",
        f"{program} generate 'def fibonacci(n):' --target 127.0.0.1:50051 --max-tokens 64",
        "curl -s http://127.0.0.1:9464/metrics | grep selfdraft_",
    ):
        console.print(f"  {line}", markup=False, style="bold", soft_wrap=True)
