"""The service definitions: well-formed, and in step with what the service defaults to."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scheduler.config import SchedulerConfig
from service.config import ServerConfig
from tests import commands
from tests.checkout import ROOT
from tests.deploy import queries

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "selfdraft.service"
PLIST = DEPLOY / "launchd" / "dev.selfdraft.serve.plist"
PROMETHEUS = DEPLOY / "prometheus"

# What a stop may take: running requests drain, then the engine's step in flight comes home.
STOP_S = ServerConfig().drain_s + SchedulerConfig().close_timeout_s


def test_launchd() -> None:
    with PLIST.open("rb") as file:
        job = plistlib.load(file)
    assert job["Label"] == PLIST.stem, "launchctl expects the file to be called after its label"
    assert job["ProgramArguments"][1] == "serve"
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ProcessType"] == "Interactive"
    assert job["ExitTimeOut"] > STOP_S
    assert job["SoftResourceLimits"]["NumberOfFiles"] > 2 * ServerConfig().max_concurrent_rpcs
    assert job["StandardErrorPath"]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_systemd_unit() -> None:
    service = unit()["Service"]
    assert service["ExecStart"].split()[1] == "serve"
    assert service["Restart"] == "on-failure"
    assert service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > STOP_S
    assert int(service["LimitNOFILE"]) > 2 * ServerConfig().max_concurrent_rpcs
    # Each would take a GPU's device nodes or run-time compiled kernels away.
    for key in ("PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "DeviceAllow"):
        assert key not in service


def test_services_start_what_exists() -> None:
    """Also in the examples of the comments."""
    lines = re.findall(r"^#? *ExecStart=(\S.*)$", UNIT.read_text(encoding="utf-8"), re.M)
    assert len(lines) == 2
    with PLIST.open("rb") as file:
        lines.append(" ".join(plistlib.load(file)["ProgramArguments"]))
    for line in lines:
        program, *arguments = line.split()
        assert program == "/opt/selfdraft/.venv/bin/selfdraft"
        assert commands.unknown(["selfdraft", *arguments]) == []


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    # The program and its folder exist on the machine it is for.
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M)
    copy.write_text(re.sub(r"^WorkingDirectory=.*\n", "", text, flags=re.M), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    # Unknown keys are only warned about.
    assert copy.name not in done.stderr


def test_scrape_targets_use_the_metrics_port() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "selfdraft", "alerts and dashboard select this job"
    (pattern,) = job["file_sd_configs"][0]["files"]
    (targets,) = PROMETHEUS.glob(pattern)
    for group in yaml.safe_load(targets.read_text(encoding="utf-8")):
        for target in group["targets"]:
            assert target.rpartition(":")[2] == str(ServerConfig().metrics_port)


def test_rules_are_told_apart_and_explained() -> None:
    names = [rule.get("record") or rule["alert"] for rule in queries.rules()]
    assert len(names) == len(set(names))
    for rule in queries.rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on PATH (Debian: apt-get install prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs_prometheus
def test_promtool_accepts_the_configuration() -> None:
    assert "SUCCESS" in promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


@pytest.mark.needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    cases = ROOT / "tests" / "deploy" / "rules_test.yml"
    assert "SUCCESS" in promtool("test", "rules", str(cases))


def test_every_rule_has_a_unit_test() -> None:
    text = (ROOT / "tests" / "deploy" / "rules_test.yml").read_text(encoding="utf-8")
    asked = re.findall(r"expr: (.*)|alertname: (\w+)", text)
    tested = " ".join(name for pair in asked for name in pair)
    for rule in queries.rules():
        assert (rule.get("record") or rule["alert"]) in tested
