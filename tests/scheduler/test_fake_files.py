"""The fake engine's boundary files: a round trip, and refusals as a real engine gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.plan import Engine, ForeignFileError, SavedPrefix, page_array
from tests.scheduler.fake_engine import FakeEngine, PlanError

SAVED = SavedPrefix(tokens=(5, 6, 7), mtp=True, metadata={"session": "a"})


def test_a_file_goes_from_one_engine_to_another(tmp_path: Path) -> None:
    one, two = FakeEngine(), FakeEngine()
    engine: Engine = one
    engine.export_boundary(1, SAVED, page_array([4]), tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert two.read_boundary(tmp_path / "x") == SAVED
    two.import_boundary(9, page_array([2]), tmp_path / "x")
    assert two.imported == {9: SAVED}


def test_foreign_files_and_short_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ForeignFileError):
        FakeEngine().read_boundary(path)
    FakeEngine(vocab_size=7).export_boundary(1, SAVED, page_array([4]), path)
    with pytest.raises(ForeignFileError, match="of another model"):
        FakeEngine().import_boundary(1, page_array([4]), path)
    path.write_text("[1]")
    with pytest.raises(ForeignFileError):
        FakeEngine().read_boundary(path)
    with pytest.raises(PlanError, match="pages"):
        FakeEngine(page_size=2).export_boundary(1, SAVED, page_array([4]), path)
