"""`selfdraft simulate`: how a fleet would do under a load, and how many machines it takes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from scheduler.simulation import (
    Chat,
    Needed,
    Report,
    Scenario,
    Summary,
    find_machines,
    simulate,
)
from service import console
from service.config import SettingError
from service.plotting import check_plot, plot
from service.scenario import Plan, make_plan, read_files, set_value

MOST_MACHINES = 1024


def plan_of(scenarios: list[Path], options: dict[str, object]) -> Plan:
    """Files, then options over them (keys as in `service.scenario`). Raises SettingError and
    CostTableError."""
    table = read_files(scenarios)
    load = table.get("load")
    chat = isinstance(load, dict) and load.get("kind") == "chat"
    if options.get("load.users") is not None and not chat:
        table["load"] = {"kind": "chat"}
    for option in ("load.rate", "load.process", "load.trace"):
        if options.get(option) is not None and chat:
            name = option.partition(".")[2]
            raise SettingError(f"--{name}", "is of an open loop; the scenario's load is a chat")
    for key, value in options.items():
        set_value(table, key, value)
    if "machine" not in table:
        message = "name a file with a machine in it, or give --cost-table and --prefill-rate"
        raise SettingError("--scenario", message)
    return make_plan(table)


def run_simulate(plan: Plan, *, as_json: bool, image: Path | None, find: bool, most: int) -> Report:
    """Run, show, plot. Raises SettingError before anything is run, OSError."""
    if not 1 <= most <= MOST_MACHINES:
        raise SettingError("--most", f"must be in 1 … {MOST_MACHINES}, not {most}")
    if image is not None:
        check_plot(image)
    began = time.perf_counter()
    needed: Needed | None = None
    if find:
        needed = find_machines(plan.scenario, plan.objective, most=most, progress=_progress)
        report = needed.report
    else:
        report = simulate(plan.scenario)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(to_json(plan, report, needed), indent=1))
    else:
        show(plan, report, needed)
        note = f"{report.requests} requests measured, {seconds:.1f} s of computing"
        console.stderr.print(note)
    if image is not None:
        plot(report, plan.objective, plan.title, image)
        console.stderr.print(f"plotted to {image}", soft_wrap=True)
    return report


def _progress(machines: int, breaches: dict[str, float]) -> None:
    console.stderr.print(f"{_machines(machines)}: {verdict(breaches)}")


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def verdict(breaches: dict[str, float]) -> str:
    """What an objective misses, worst first."""
    if not breaches:
        return "meets the objective"
    return ", ".join(f"{name} {_times(ratio)} over" for name, ratio in breaches.items())


def _times(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.2f}×"


def to_json(plan: Plan, report: Report, needed: Needed | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "title": plan.title,
        "assumptions": list(plan.assumptions),
        "routing": plan.scenario.routing,
        "seed": plan.scenario.seed,
        "report": report.to_json(),
        "breaches": plan.objective.breaches(report),
    }
    if needed is not None:
        content["machines_needed"] = needed.machines
        content["tried"] = needed.tried
        content["fewer"] = None if needed.fewer is None else needed.fewer.to_json()
    return content


# --- tables --------------------------------------------------------------------------------------


def show(plan: Plan, report: Report, needed: Needed | None) -> None:
    """Print to standard output."""
    out = console.stdout
    out.print(f"[bold]{plan.title}[/bold]: {_about(plan.scenario, report)}")
    for assumption in plan.assumptions:
        out.print(f"  assumed: {assumption}", markup=False)
    out.print(_latencies(report))
    out.print(_numbers(plan, report))
    if len(report.per_machine) > 1:
        out.print(_balance(report))
    out.print(f"objective: {verdict(plan.objective.breaches(report))}")
    if needed is not None:
        out.print(_answer(plan, needed))


def _about(scenario: Scenario, report: Report) -> str:
    load = scenario.load
    if isinstance(load, Chat):
        what = f"{load.users} users"
    elif load.trace is not None:
        what = f"a trace of {len(load.trace)} requests"
    else:
        what = f"{load.process} arrivals, {load.rate:g}/s"
    machines = f"{_machines(report.machines)} ({scenario.machine.name})"
    return f"{machines}, {scenario.routing}, {what}, {report.window_s:.0f} s measured"


def _latencies(report: Report) -> Table:
    table = Table(title="latencies, seconds", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p95", "p99", "highest", "n"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    rows: dict[str, Summary] = {
        "first token": report.ttft,
        "burst gap": report.gap,
        "gap per token": report.per_token,
        "queue": report.queue,
        "end to end": report.end_to_end,
    }
    for name, summary in rows.items():
        values = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99)
        numbers = [f"{value:.3f}" for value in (*values, summary.highest)]
        table.add_row(name, *numbers, str(summary.count))
    return table


def _numbers(plan: Plan, report: Report) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(report.outcomes.items()))
    refusals = ", ".join(f"{name} {count}" for name, count in sorted(report.refusals.items()))
    tenants = len(plan.scenario.scheduler.tenants) > 1 or (
        isinstance(plan.scenario.load, Chat) and plan.scenario.load.tenants > 1
    )
    acceptance = " ".join(f"{share:.2f}" for share in report.acceptance) or "no drafts"
    cycles = max(1, sum(report.depths))
    depths = ", ".join(f"{k}: {n / cycles:.0%}" for k, n in enumerate(report.depths) if n)
    rows = {
        "throughput": f"{report.tokens_per_s:.1f} tokens/s, {report.requests_per_s:.2f} requests/s",
        "prompts": f"{report.prompt_tokens_per_s:.0f} tokens/s, {report.cached_share:.0%} of them "
        "from kept prefixes",
        "outcomes": outcomes or "none",
        "refused offers": refusals or "none",
        "refused for good": f"{report.refused_share:.2%}",
        "fairness (Jain)": f"{report.fairness:.3f} over {'tenants' if tenants else 'users'}",
        "KV pages in use": f"{report.kv_used_mean:.0%} on average, {report.kv_used_peak:.0%} at "
        f"most, {report.kv_cached_mean:.0%} of kept prefixes",
        "rows per cycle": f"{report.rows_per_cycle:.1f}",
        "drafts accepted": f"{acceptance} by position; {report.tokens_per_cycle:.2f} tokens per "
        "row and cycle",
        "cycles by depth": depths or "none",
        "preemptions": str(report.preemptions),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _balance(report: Report) -> str:
    busy = sorted(machine.busy_share for machine in report.per_machine)
    return (
        f"devices busy: {busy[0]:.0%} … {busy[-1]:.0%}, the busiest {report.balance:.2f}× the mean"
    )


def _answer(plan: Plan, needed: Needed) -> str:
    if needed.machines is None:
        tried = max(needed.tried)
        return (
            f"[bold]not even {_machines(tried)} are enough[/bold]: {verdict(needed.tried[tried])}"
        )
    answer = f"[bold]{_machines(needed.machines)} needed[/bold]"
    if needed.fewer is None:
        return answer
    count = needed.fewer.machines
    return f"{answer}; with {count}: {verdict(needed.tried[count])}"
