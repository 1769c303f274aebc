"""`selfdraft demo`: a real server, several sessions at once, and what its drafts brought."""

from __future__ import annotations

import anyio

from service import console
from service.demo import report
from service.demo.process import ServerProcessError, serving
from service.demo.prompts import Ask, asks
from service.demo.sessions import DemoError, Outcome, run_sessions


def run_demo(*, model: str | None, sessions: int, compare: bool) -> int:
    """Runs the demo; `compare` repeats it on a server that does not draft. Returns an exit code:
    0, or 1 when a server or a session failed, with one line that says why."""
    try:
        runs = anyio.run(_runs, model, asks(sessions), compare, backend="asyncio")
    except (ServerProcessError, DemoError) as error:
        console.fail(error)
        return 1
    out = console.stdout
    drafting = next(iter(runs.values()))
    report.show_sample(out, drafting.sessions[0])
    report.show_sessions(out, drafting)
    report.show_comparison(out, runs)
    report.show_commands(out, model)
    return 0


async def _runs(model: str | None, wanted: list[Ask], compare: bool) -> dict[str, Outcome]:
    modes = {"with drafts": "auto"} | ({"without (depth 0)": "0"} if compare else {})
    runs = {}
    for name, depth in modes.items():
        runs[name] = await _run(model, wanted, name, depth)
    return runs


async def _run(model: str | None, wanted: list[Ask], name: str, depth: str) -> Outcome:
    arguments = ["--depth", depth, "--max-rows", str(len(wanted)), "--cost-table", "off"]
    arguments += ["--model", model] if model is not None else []
    failure: Exception | None = None
    try:
        console.stderr.print(f"starting: selfdraft serve {' '.join(arguments)}", markup=False)
        async with serving(arguments) as server:
            with report.Watch(console.stderr, f"{len(wanted)} sessions, {name}") as watch:
                return await run_sessions(server, wanted, watch)
    except* (ServerProcessError, DemoError) as group:
        failure = _first(group)
    raise failure


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The cause: task groups wrap what is raised inside them."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
