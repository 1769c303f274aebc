"""Cost tables on disk: fingerprints, damage, the cache, and what `tune` accepts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selfdraft import Client

from engine.config import EngineConfig
from scheduler.costs import CostTable
from service import launch
from service.config import ServerConfig, ServiceConfig, SettingError
from service.costs import CostFile, CostSource, CostTableError, cache_path, fingerprint
from service.logs import make_logger
from service.tune import _check_output, check_seconds, parse_numbers
from tests.scheduler.fake_engine import FakeEngine
from tests.service.harness import FIXTURES, VOCAB

INFO = FakeEngine().info


class Loaded(FakeEngine):
    """As `load_engine` returns them."""

    budget: None = None


TABLE = CostTable(seconds={(1, 0): 0.04, (1, 3): 0.06, (4, 0): 0.05}, deviation=0.08)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: folder / name)
    return folder


def saved(path: Path, info: Any = INFO) -> Path:
    CostFile(fingerprint=fingerprint(info), table=TABLE).save(path)
    return path


def source(choice: Any) -> tuple[CostSource, io.StringIO]:
    log = io.StringIO()
    return CostSource(choice, make_logger("json", log)), log


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    path = saved(tmp_path / "new folder" / "costs.json")
    assert CostFile.load(path).table == TABLE
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]
    found, log = source(path)
    found.check(INFO)
    assert found.table(INFO) == TABLE
    assert log.getvalue() == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "gpu: other"}, "machine.device is 'gpu: other' in the table"),
        ({"blas": "reference"}, "machine.blas"),
        ({"dtype": "bfloat16"}, "model.dtype"),
        ({"quantization": "affine 4-bit, group 64"}, "model.quantization"),
        ({"weight_bytes": 12345}, "model.weight_bytes is 12345"),
    ],
)
def test_a_foreign_table_is_refused_by_name_and_ignored_by_auto(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = saved(tmp_path / "foreign.json", replace(INFO, **change))
    named, _ = source(path)
    with pytest.raises(CostTableError, match=r"foreign\.json") as error:
        named.check(INFO)
    assert said in str(error.value)
    auto, log = source("auto")
    here = cache_path(fingerprint(INFO))
    here.parent.mkdir(parents=True)
    here.write_text(path.read_text())
    auto.check(INFO)
    assert auto.table(INFO) is None
    (line,) = log.getvalue().splitlines()
    assert said in json.loads(line)["reason"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format: must be 1, not 2"),
        ({"costs": {}}, "costs: must be a list"),
        ({"costs": [{"rows": 0, "depth": 0, "seconds": 1}]}, "rows must be >= 1"),
        ({"costs": [{"rows": 1, "depth": 9, "seconds": 1}]}, "depth must be in 0 … 8"),
        ({"costs": [{"rows": 1, "depth": 0, "seconds": 0}]}, "must be > 0 and finite"),
        ({"costs": [{"rows": 1, "depth": 0, "seconds": "1"}]}, r"costs\[0\].seconds"),
        ({"costs": [{"rows": True, "depth": 0, "seconds": 1}]}, r"costs\[0\].rows"),
        ({"deviation": -1}, "deviation must be > 0"),
        ({"fingerprint": []}, "fingerprint: must be"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = saved(tmp_path / "costs.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CostTableError, match=said):
        source(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match=r"costs\.json"):
        source(path)
    with pytest.raises(CostTableError, match="No such file"):
        source(tmp_path / "absent.json")


def test_what_was_learnt_is_kept_over_what_was_stored() -> None:
    saved(cache_path(fingerprint(INFO)))
    first, _ = source("auto")
    first.check(INFO)
    first.keep(INFO, {(1, 3): 0.07, (2, 1): 0.05})
    second, _ = source("auto")
    second.check(INFO)
    table = second.table(INFO)
    assert table is not None
    assert dict(table.seconds) == {(1, 0): 0.04, (1, 3): 0.07, (2, 1): 0.05, (4, 0): 0.05}


def test_only_auto_keeps(tmp_path: Path, cache: Path) -> None:
    path = saved(tmp_path / "mine.json")
    before = path.read_bytes()
    for choice in (path, "off"):
        found, _ = source(choice)
        found.check(INFO)
        found.keep(INFO, {(1, 0): 1.0})
    assert path.read_bytes() == before
    assert not cache.exists()


def test_a_full_disk_costs_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    found, log = source("auto")
    found.keep(INFO, {(1, 0): 1.0})
    assert "No space left" in log.getvalue()
    assert list(cache_path(fingerprint(INFO)).parent.iterdir()) == []


@pytest.mark.anyio
async def test_a_clean_stop_teaches_the_next_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one server's controller learnt is what the next one's begins with."""

    def load(config: EngineConfig, progress: object) -> FakeEngine:
        return Loaded(vocab_size=VOCAB, cost=lambda rows, depth: 0.01 * (1 + depth))

    monkeypatch.setattr("engine.load.load_engine", load)
    monkeypatch.setattr("engine.warmup.warm_up", lambda engine: None)
    config = ServiceConfig(
        engine=EngineConfig(model=FIXTURES / "byte_level"),
        server=ServerConfig(port=0, metrics_port=None),
        cost_table="auto",
    )
    logger = make_logger("json", io.StringIO())
    async with launch.running(launch.make_server(config, logger)) as server:
        assert server._scheduler is not None
        assert server._scheduler.statistics().step_times == {}
        assert server.addresses is not None
        async with Client(server.addresses.grpc) as client:
            ask = client.generate(text="x", max_tokens=60, ignore_eos=True)
            assert len([chunk async for chunk in ask]) > 5
    async with launch.running(launch.make_server(config, logger)) as server:
        assert server._scheduler is not None
        times = server._scheduler.statistics().step_times
        assert times[1, 0] == pytest.approx(0.01, rel=0.3)
        assert times[1, 1] == pytest.approx(0.02, rel=0.3)


@pytest.mark.anyio
async def test_a_foreign_table_keeps_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[FakeEngine] = []

    def load(config: EngineConfig, progress: object) -> FakeEngine:
        engines.append(Loaded(vocab_size=VOCAB))
        return engines[-1]

    monkeypatch.setattr("engine.load.load_engine", load)
    monkeypatch.setattr("engine.warmup.warm_up", lambda engine: None)
    config = ServiceConfig(
        engine=EngineConfig(model=FIXTURES / "byte_level"),
        server=ServerConfig(port=0, metrics_port=None),
        cost_table=saved(tmp_path / "foreign.json", replace(INFO, dtype="bfloat16")),
    )
    server = launch.make_server(config, make_logger("json", io.StringIO()))
    with pytest.raises(CostTableError, match=r"vocab_size|dtype"):
        await server.run()
    assert engines[0].closed


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1,2,4", (1, 2, 4)), ("0..3", (0, 1, 2, 3)), ("4, 1…2", (1, 2, 4)), ("7", (7,))],
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers("--rows", text, 0, 8) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "9", "3..1", "1..2..3", "1.5", "²"])
def test_bad_numbers_name_the_option(text: str) -> None:
    with pytest.raises(SettingError, match="--rows"):
        parse_numbers("--rows", text, 0, 8)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_bad_seconds_name_the_option(seconds: float) -> None:
    with pytest.raises(SettingError, match="--seconds"):
        check_seconds(seconds)


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--output: .* is a directory"):
        _check_output(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--output: cannot write"):
        _check_output(tmp_path / "file" / "costs.json")
    _check_output(tmp_path / "new" / "costs.json")
    assert list((tmp_path / "new").iterdir()) == []
