"""`selfdraft simulate`: options, scenario files, tables, JSON, plots, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from scheduler.costs import CostTable
from scheduler.simulation import Chat, Open
from service.cli import app
from service.config import SettingError
from service.costs import CostFile
from service.scenario import make_plan, read_files
from service.simulate import plan_of
from tests import checkout

DEPLOY = checkout.ROOT / "deploy" / "simulate"
MACHINE = """
assumptions = ["made up"]
[run]
duration_s = 20
[machine]
name = "small"
max_rows = 8
prefill_chunk = 64
[machine.costs]
widths = [[1, 0.01], [32, 0.03]]
token_s = 0.001
[load]
rate = 3.0
[[load.kinds]]
prompt_tokens = { median = 50, p95 = 200 }
output_tokens = 12
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MACHINE, encoding="utf-8")
    return path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


def numbers(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# --- runs ----------------------------------------------------------------------------------------


def test_tables(scenario: Path) -> None:
    result = run("--scenario", scenario)
    assert result.exit_code == 0, result.output
    for word in (
        "assumed: made up",
        "first token",
        "gap per token",
        "fairness (Jain)",
        "KV pages",
        "p99",
    ):
        assert word in result.stdout


def test_json_repeats_and_adds_up(scenario: Path) -> None:
    one = numbers(run("--scenario", scenario, "--json"))
    two = numbers(run("--scenario", scenario, "--json"))
    other = numbers(run("--scenario", scenario, "--json", "--seed", "3"))
    assert one == two != other
    report = one["report"]
    assert report["complete"] == report["requests"] == sum(report["outcomes"].values()) > 30
    assert report["ttft"]["p50"] > 0.05
    assert one["assumptions"] == ["made up"]


def test_options_go_over_files(scenario: Path) -> None:
    found = numbers(
        run("--scenario", scenario, "--json", "--machines", "3", "--routing", "round-robin")
    )
    served = [machine["requests"] for machine in found["report"]["per_machine"]]
    assert len(served) == 3
    assert max(served) - min(served) <= 1


def test_users_make_it_a_chat(scenario: Path) -> None:
    plan = plan_of([scenario], {"load.users": 7})
    assert isinstance(plan.scenario.load, Chat)
    assert plan.scenario.load.users == 7


def test_files_are_merged_and_assumptions_add_up(scenario: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text('assumptions = ["more"]\n[machine]\nmax_rows = 2\n', encoding="utf-8")
    plan = make_plan(read_files([scenario, over]))
    assert plan.scenario.machine.max_rows == 2
    assert plan.scenario.machine.name == "small"
    assert plan.assumptions == ("made up", "more")


def test_a_cost_table_of_tune(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table = CostTable(seconds={(1, 0): 0.02, (8, 0): 0.03, (1, 2): 0.03, (8, 2): 0.06})
    extra = {"acceptance": [0.9, 0.5]}
    CostFile(fingerprint={"machine": {}, "model": {}}, table=table, extra=extra).save(path)
    plan = plan_of([], {"machine.costs.cost_table": str(path), "machine.costs.token_s": 0.002})
    machine = plan.scenario.machine
    assert machine.costs.decode.seconds(8, 2) == pytest.approx(0.06)
    assert machine.acceptance.rates == (0.9, 0.5)
    found = numbers(
        run("--cost-table", path, "--prefill-rate", "500", "--duration", "10", "--json")
    )
    assert found["report"]["complete"] > 0


def test_a_trace(scenario: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": n, "prompt_tokens": 30, "output_tokens": 5 + n, "tenant": f"t{n % 2}"}
        for n in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    report = numbers(run("--scenario", scenario, "--trace", trace, "--json"))["report"]
    assert report["requests"] == 6
    assert report["per_machine"][0]["generated_tokens"] == sum(5 + n for n in range(6))


def test_the_fewest_machines(scenario: Path) -> None:
    found = numbers(
        run(
            "--scenario",
            scenario,
            "--rate",
            "25",
            "--find-machines",
            "--most",
            "6",
            "--json",
            "--duration",
            "10",
        )
    )
    needed = found["machines_needed"]
    assert 1 < needed <= 6
    assert found["breaches"] == {}
    assert found["fewer"]["machines"] == needed - 1
    assert found["tried"][str(needed - 1)]


# --- plots ---------------------------------------------------------------------------------------


def test_a_plot_is_drawn(scenario: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "new" / "run.png"
    result = run("--scenario", scenario, "--plot", path)
    assert result.exit_code == 0, result.output
    picture = imread(path)
    height, width, _ = picture.shape
    assert height > 500
    assert width > 800
    # Every one of the six panels has something drawn in colour: lines, not axes alone.
    colour = picture[..., :3].max(axis=2) - picture[..., :3].min(axis=2) > 0.2
    for top in (0, height // 2):
        for left in (0, width // 3, 2 * width // 3):
            panel = colour[top : top + height // 2, left : left + width // 3]
            assert panel.sum() > 100


def test_without_matplotlib_the_extra_is_named(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--scenario", scenario, "--plot", tmp_path / "run.png")
    assert isinstance(result.exception, SettingError)
    assert "'selfdraft[plot]'" in str(result.exception)
    assert run("--scenario", scenario).exit_code == 0, "it is needed for plots alone"


def test_a_plot_that_is_no_png(scenario: Path, tmp_path: Path) -> None:
    result = run("--scenario", scenario, "--plot", tmp_path / "run.svg")
    assert "--plot: must be a .png file" in str(result.exception)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--machines", "0"), "machines must be >= 1, not 0"),
        (("--routing", "nearest"), "routing must be one of round-robin"),
        (("--rate", "0"), "rate must be > 0"),
        (("--process", "tides"), "process must be poisson, bursts or diurnal"),
        (("--warmup", "20"), "warmup_s must be in 0 … duration_s"),
        (("--seed", "-1"), "seed must be >= 0"),
        (("--prefill-rate", "0"), "--prefill-rate: must be finite and > 0"),
        (("--most", "0", "--find-machines"), "--most: must be in 1 … 1024"),
        (("--users", "0"), "users must be >= 1"),
        (("--trace", "nowhere.jsonl"), "--trace: cannot read nowhere.jsonl"),
        (("--cost-table", "nowhere.json"), "cost table nowhere.json"),
    ],
)
def test_options_out_of_range(
    words: tuple[str, ...], message: str, scenario: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = scenario.read_text(encoding="utf-8")
    if words[0] == "--users":
        scenario.write_text(text.partition("[load]")[0], encoding="utf-8")
    result = run("--scenario", scenario, *words)
    assert result.exit_code != 0
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[run]\nhours = 3", "run.hours: no such key"),
        ("[machine]\nspeed = 3", "machine.speed: no such key; there are"),
        ("[machine]\nmax_rows = 0", "machine: max_rows must be >= 1"),
        ("[machine]\nmax_rows = 2.5", "machine.max_rows: must be of type int"),
        ("[machine.costs]\ntoken_s = -1", "machine.costs: token_s must be finite"),
        ("[machine.costs]\nwidths = [1, 2]", "machine.costs.widths: must be a list of"),
        ("[machine.costs]\nwidths = [[2, 0.1], [1, 0.1]]", "ascending"),
        ("[machine.acceptance]\nrates = [1.5]", "machine.acceptance: rates must be in"),
        ("[machine.memory]\nkv_gb = 1.0", "machine.memory: needs"),
        ("[load]\nkind = 'storm'", "load.kind: must be open or chat"),
        ("[load]\nusers = 3", "load.users: no such key"),
        ("[[load.kinds]]\nprompt_tokens = 3", "load.kinds[0]: needs 'output_tokens'"),
        ("[scheduler]\nmax_queue = 0", "scheduler: max_queue must be >= 1"),
        ("[scheduler]\ncolour = 0", "scheduler.colour: no such key"),
        ("[scheduler.tenants.a]\nweight = -1", "scheduler.tenants.a: weight"),
        ("[scheduler.tenants.a]\nmax_priority = 'top'", "must be one of batch"),
        ("[fleet]\nfailures = [{ machine = 3, at_s = 1.0 }]", "there is no machine 3"),
        ("[objective]\nttft = 1", "objective.ttft: no such key"),
        ("[nonsense]\nx = 1", "nonsense: no such key"),
    ],
)
def test_scenarios_out_of_range(line: str, message: str, scenario: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text(line, encoding="utf-8")
    with pytest.raises(SettingError) as caught:
        make_plan(read_files([scenario, over]))
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--scenario: cannot read .*nowhere.toml"):
        read_files([tmp_path / "nowhere.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run", encoding="utf-8")
    with pytest.raises(SettingError, match="not TOML"):
        read_files([broken])


def test_a_machine_is_needed() -> None:
    with pytest.raises(SettingError, match="--cost-table"):
        plan_of([], {"load.rate": 1.0})


def test_an_open_loops_options_do_not_fit_a_chat() -> None:
    with pytest.raises(SettingError, match="--rate: is of an open loop"):
        plan_of([DEPLOY / "chat-1000.toml"], {"load.rate": 1.0})


def test_memory_that_does_not_fit_says_by_how_much() -> None:
    table = read_files([DEPLOY / "mac-mini-m4-16gb.toml"])
    table["machine"]["memory"]["kv_gb"] = 9.0
    with pytest.raises(SettingError, match=r"need 16\.9 GB; working_set_gb is 11\.4"):
        make_plan(table)


# --- what is committed ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", sorted(p.name for p in DEPLOY.glob("mac-*.toml")))
def test_committed_scenarios(machine: str) -> None:
    plan = make_plan(read_files([DEPLOY / "chat-1000.toml", DEPLOY / machine]))
    assert isinstance(plan.scenario.load, Chat)
    assert plan.scenario.load.users == 1000
    assert "nothing measured on Apple hardware" in " ".join(plan.assumptions)
    alone = make_plan(read_files([DEPLOY / machine]))
    assert isinstance(alone.scenario.load, Open)
