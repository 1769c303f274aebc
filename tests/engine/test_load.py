"""`load_engine`, start to end, on tiny checkpoints: what it builds, refuses and says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import BudgetError, CheckpointError, ConfigError
from engine.gate import FLOOR
from engine.load import load_engine
from engine.plan import EngineFailedError, StepPlan
from engine.solo import generate
from tests.engine.host import Host
from tests.engine.small import greedy
from tests.engine.tiny_checkpoints import write_checkpoint


def config(folder: Path, **changes: object) -> EngineConfig:
    """Small enough for any machine; random heads agree with nothing, so the gate is off."""
    base = EngineConfig(
        model=folder, blas="reference", max_rows=4, page_size=8, kv_memory=1 << 22, mtp_gate="off"
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "hf")


def test_an_engine_tells_what_it_is(folder: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    engine = load_engine(config(folder), lambda *stage: stages.append(stage))
    info = engine.info
    assert (info.family, info.vocab_size, info.layers, info.mtp_layers) == ("qwen3_5", 160, 4, 1)
    assert (info.max_depth, info.max_rows, info.page_size) == (8, 4, 8)
    assert info.pages * info.page_bytes <= 1 << 22
    assert info.weight_bytes == info.parameters * 4
    assert info.blas == "mlx reference"
    assert info.dtype == "float32"
    assert stages[-1][0] == "ready"
    assert [done for _, done, _ in stages] == sorted(done for _, done, _ in stages)


@pytest.mark.parametrize("weights", ["keep", "dequantize"])
def test_packed_and_dequantised_weights_decode_alike(tmp_path: Path, weights: str) -> None:
    folder = write_checkpoint(tmp_path, "mlx_4bit")
    engine = load_engine(config(folder, weights=weights))
    dense = load_engine(config(folder, weights="dequantize"))
    assert ("dequantized" in engine.info.quantization) == (weights == "dequantize")
    prompt = [5, 9, 100, 3]
    found = generate(engine, [(prompt, greedy(12))], depth=2)[0]
    assert found.tokens == generate(dense, [(prompt, greedy(12))])[0].tokens


def test_depth_zero_without_mtp_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    (folder / "mtp.safetensors").unlink()
    engine = load_engine(config(folder, mtp_gate="auto"))
    assert engine.info.max_depth == 0
    assert engine.info.mtp_layers == 0
    assert sum("MTP" in note for note in engine.info.notes) == 1
    assert len(generate(engine, [([1, 2, 3], greedy(5))])[0].tokens) == 5


def test_max_depth_zero_leaves_the_head_on_disk(folder: Path) -> None:
    off = load_engine(config(folder, max_depth=0))
    on = load_engine(config(folder))
    assert off.info.max_depth == 0
    assert off.info.weight_bytes < on.info.weight_bytes
    assert off.info.page_bytes < on.info.page_bytes


def test_the_gate_turns_a_head_off_that_agrees_with_nothing(folder: Path) -> None:
    engine = load_engine(config(folder, mtp_gate="auto"))
    assert engine.info.max_depth == 0
    assert any("gate failed" in note and f"{FLOOR:.0%}" in note for note in engine.info.notes)
    assert len(generate(engine, [([1, 2, 3], greedy(5))])[0].tokens) == 5


def test_replaying_engines_decode_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import load

    picking = load_engine(config(folder))
    monkeypatch.setattr(load, "STATES_SHARE", 1 << 60)
    replaying = load_engine(config(folder))
    assert picking._cycle._keep_states
    assert not replaying._cycle._keep_states
    requests = [([7, 8, 9], greedy(20)), ([4], greedy(20))]
    one, two = (generate(engine, requests, depth=3) for engine in (picking, replaying))
    assert [r.tokens for r in one] == [r.tokens for r in two]


def test_the_prefill_chunk_follows_the_device_unless_set(folder: Path) -> None:
    assert load_engine(config(folder)).info.prefill_chunk == 64
    assert load_engine(config(folder, prefill_chunk=32)).info.prefill_chunk == 32


def test_only_the_reference_blas_prefills_token_by_token(folder: Path) -> None:
    assert not load_engine(config(folder))._prefill._chunked
    engine = load_engine(config(folder, blas="auto"))
    assert engine._prefill._chunked
    prompt = list(range(40))
    found = generate(engine, [(prompt, greedy(8))], chunk=17)[0].tokens
    assert found == generate(load_engine(config(folder)), [(prompt, greedy(8))])[0].tokens


def test_a_context_cap_is_obeyed(folder: Path) -> None:
    assert load_engine(config(folder, context=64)).info.context_length == 64


def test_the_budget_is_told_and_mlx_with_it(folder: Path) -> None:
    engine = load_engine(config(folder, prefix_memory=1 << 20))
    budget, info = engine.budget, engine.info
    assert budget is not None
    rows = {row.name: row for row in budget.rows}
    assert rows["weights"].bytes == info.weight_bytes
    assert rows["kv pool"].bytes == (info.pages + 1) * info.page_bytes
    assert rows["boundaries"].bytes > info.boundaries * info.boundary_bytes
    assert mx.set_cache_limit(0) == rows["transient"].bytes
    assert mx.set_memory_limit(1 << 40) == budget.working_set
    assert "boundaries" in budget.table()
    assert engine._preflight is not None
    assert engine._preflight.limit == budget.working_set


def test_boundaries_cost_what_the_budget_says(folder: Path) -> None:
    """To the byte, from a prefill and from a turn's end; with drafts and without."""
    for changes in ({}, {"max_depth": 0}):
        engine = load_engine(config(folder, prefix_memory=1 << 20, **changes))
        host = Host(engine)
        host.start(1, [1, 2, 3, 4], greedy(4), saves={3: 1})
        host.finish(1, depth=engine.info.max_depth)
        host.keep(1, 2)
        assert engine.info.boundaries == (1 << 20) // engine.info.boundary_bytes
        for key in (1, 2):
            assert engine._boundaries[key].nbytes == engine.info.boundary_bytes


def test_a_model_without_drafts_reuses_prefixes_too(folder: Path) -> None:
    engine = load_engine(config(folder, max_depth=0), trace=True)
    host = Host(engine)
    host.start(1, [1, 2, 3, 4, 5], greedy(6), saves={3: 1})
    host.finish(1, depth=0)
    host.decode(1, depth=0, even_finished=True)
    host.keep(1, 2)
    whole = [*host.tokens[1], 9]
    for row, boundary in ((2, 1), (3, 2)):
        host.start(row, whole, greedy(12), restore=boundary)
        host.finish(row, depth=0)
    host.start(4, whole, greedy(12))
    host.finish(4, depth=0)
    logits = [np.concatenate([t.logits for t in engine.traces if t.row == r]) for r in (2, 3, 4)]
    assert np.array_equal(logits[0], logits[2])
    assert np.array_equal(logits[1], logits[2])


def test_how_many_boundaries_there_are(folder: Path) -> None:
    assert load_engine(config(folder)).info.boundaries == 64
    off = load_engine(config(folder, prefix_memory=0)).info
    assert (off.boundaries, off.boundary_bytes) == (0, 0)


def test_a_head_that_fails_its_gate_leaves_smaller_boundaries(folder: Path) -> None:
    on = load_engine(config(folder)).info
    off = load_engine(config(folder, mtp_gate="auto")).info
    assert off.max_depth == 0
    assert on.boundary_bytes - off.boundary_bytes == 64 * 4


def test_a_deterministic_engine_says_what_it_costs(folder: Path) -> None:
    small = {"deterministic": True, "context": 64, "max_depth": 3}
    engine = load_engine(config(folder, **small))
    assert engine.budget is not None
    assert engine.budget.boundaries == 64, "with the reference BLAS, reuse changes no bits"
    (row,) = [row for row in engine.budget.rows if row.name == "padding"]
    assert row.note == "cycles of 16 rows × 64 positions"
    prompts = [([1, 2, 3], greedy(9)), ([4], greedy(9))]
    plain = load_engine(config(folder))
    one, two = (generate(each, prompts, depth=2) for each in (engine, plain))
    assert [r.tokens for r in one] == [r.tokens for r in two]
    assert load_engine(config(folder, blas="auto", **small)).info.boundaries == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_memory": 1000}, "raise kv_memory to at least"),
        ({"kv_memory": 1 << 50}, "lower kv_memory to at most"),
        ({"prefix_memory": 1 << 50}, "lower prefix_memory to at most"),
    ],
)
def test_budget_errors_name_the_number(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BudgetError, match=message):
        load_engine(config(folder, **changes))


def test_config_and_checkpoint_errors_pass_through(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_rows"):
        load_engine(config(folder, max_rows=0))
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_engine(config(folder))


def test_a_closed_engine_refuses(folder: Path) -> None:
    engine = load_engine(config(folder))
    engine.close()
    engine.close()
    with pytest.raises(EngineFailedError):
        engine.submit(StepPlan(step=0))


def test_one_block_verifies_are_not_charged_for_states(folder: Path) -> None:
    """Where a verify makes no intermediate states, none are planned for."""
    plain, blocks = load_engine(config(folder)), load_engine(config(folder, blas="auto"))
    assert plain.budget is not None
    assert blocks.budget is not None
    sizes = [
        next(row.bytes for row in budget.rows if row.name == "transient")
        for budget in (plain.budget, blocks.budget)
    ]
    assert plain._cycle._keep_states
    assert not blocks._cycle._keep_states
    assert sizes[1] < sizes[0]
