"""`engine.load_model`: generation without a server, and what the head shares with the trunk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import engine
from engine.api import FastestDepth, LoadedModel
from engine.config import EngineConfig
from engine.contract import QWEN3_5
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import EngineFailedError, Finish, StepPlan
from engine.solo import generate
from tests.engine.small import greedy
from tests.engine.tiny_checkpoints import write_checkpoint

CONFIG = EngineConfig(
    model=Path("unused"),
    blas="reference",
    max_rows=3,
    page_size=8,
    kv_memory=1 << 20,
    mtp_gate="off",
)


@pytest.fixture(scope="module", params=["hf", "hf_tied"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), request.param)
    with engine.load_model(folder, config=CONFIG) as loaded:
        yield loaded


def test_importing_the_package_imports_no_mlx() -> None:
    code = "import sys, engine\nassert 'mlx' not in sys.modules\nprint(engine.load_model.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "load_model\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = engine.nothing


def address(array: mx.array) -> int:
    """Where an array's bytes lie."""
    view = np.array(array, copy=False)
    return int(view.__array_interface__["data"][0])


def weights(module: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def test_the_head_borrows_embedding_and_lm_head(model: LoadedModel) -> None:
    (head,) = model.mtp
    trunk = model._engine.model
    assert head.contract is QWEN3_5
    assert head.embedding is trunk.model.embed_tokens
    tied = trunk.config.tie_word_embeddings
    assert head.lm_head is (trunk.model.embed_tokens if tied else trunk.lm_head)
    own = weights(head.head)
    assert own.keys() == {n.removeprefix("mtp.") for n in weights(trunk) if n.startswith("mtp.")}
    borrowed = {address(a) for m in (head.embedding, head.lm_head) for a in weights(m).values()}
    assert borrowed.isdisjoint(address(array) for array in own.values())


def test_a_changed_embedding_is_the_heads_too(model: LoadedModel) -> None:
    """Shared means used: both passes look up and project with the very arrays."""
    trunk = model._engine.model
    weight = trunk.model.embed_tokens.weight
    before = trunk.embed(mx.array([[3]]))
    trunk.model.embed_tokens.weight = weight * 2
    try:
        (head,) = model.mtp
        assert mx.array_equal(trunk.embed(mx.array([[3]])), 2 * before)
        assert head.embedding.weight is trunk.model.embed_tokens.weight
    finally:
        trunk.model.embed_tokens.weight = weight


def check_bytes(model: LoadedModel) -> None:
    arrays = weights(model._engine.model)
    distinct = {address(array): array.nbytes for array in arrays.values()}
    assert len(distinct) == len(arrays)
    assert sum(distinct.values()) == model.info.weight_bytes


def test_weight_bytes_are_the_distinct_buffers(model: LoadedModel) -> None:
    check_bytes(model)


def test_a_second_head_is_seen(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """An LM head of the MTP's own, as a copy would be."""
    trunk = model._engine.model
    parameters = Qwen35Model.parameters

    def twice(self: Qwen35Model) -> Any:
        return parameters(self) | {"copy": trunk.model.embed_tokens.weight + 0}

    monkeypatch.setattr(Qwen35Model, "parameters", twice)
    with pytest.raises(AssertionError):
        check_bytes(model)


def test_without_a_head_there_is_none(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mlx")
    (folder / "mtp.safetensors").unlink()
    with engine.load_model(folder, config=CONFIG) as loaded:
        assert loaded.mtp == []
        assert len(loaded.generate([1, 2], max_tokens=4).tokens) == 4


def test_a_head_that_fails_its_gate_is_not_there(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "hf")
    config = EngineConfig(model=folder, blas="reference", max_rows=2, kv_memory=1 << 20)
    with engine.load_model(folder, config=config) as loaded:
        assert loaded.mtp == []
        assert any("gate failed" in note for note in loaded.info.notes)


@pytest.mark.parametrize("depth", ["auto", 0, 3])
def test_generation_is_the_engines(model: LoadedModel, depth: Any) -> None:
    prompts = [[1, 2, 3], [9], [4, 4, 4, 4], [7, 8]]
    found = model.generate(prompts, max_tokens=30, temperature=0, depth=depth)
    for prompt, result in zip(prompts, found, strict=True):
        true = generate(model._engine, [(prompt, greedy(30))])[0]
        assert list(result.tokens) == true.tokens
        assert result.finish is Finish.LENGTH
        assert result.fault is None
    if depth == 3:
        assert all(len(result.drafted) == 3 for result in found)
        assert found[0].acceptance is not None
    if depth == 0:
        assert found[0].acceptance is None


def test_seeds_differ_by_prompt_and_repeat(model: LoadedModel) -> None:
    one = model.generate([5, 6], max_tokens=20, seed=3, depth=2)
    two = model.generate([[5, 6], [5, 6]], max_tokens=20, seed=3, depth=2)
    assert one.tokens == two[0].tokens != two[1].tokens
    assert two[1].tokens == model.generate([5, 6], max_tokens=20, seed=4, depth=2).tokens


def test_stop_ids_end_a_text(model: LoadedModel) -> None:
    whole = model.generate([5, 6], max_tokens=20, temperature=0).tokens
    result = model.generate([5, 6], max_tokens=20, temperature=0, stop_ids=[whole[4]])
    assert result.finish is Finish.STOP
    assert result.tokens == whole[: whole.index(whole[4]) + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": [[1], []]}, r"prompt_ids\[1\]: must not be empty"),
        ({"prompt_ids": [160]}, r"prompt_ids\[0\]: tokens must be in 0…159"),
        ({"max_tokens": 0}, "max_tokens: must be >= 1, not 0"),
        ({"max_tokens": 5000}, r"prompt_ids\[0\]: 1 tokens and max_tokens 5000 exceed"),
        ({"temperature": -1.0}, "temperature: must be finite and >= 0, is -1"),
        ({"top_k": -1}, "top_k: must be >= 1, or 0 for all, is -1"),
        ({"top_p": 0.0}, r"top_p: must be in \(0, 1\]"),
        ({"min_p": 1.0}, r"min_p: must be in \[0, 1\)"),
        ({"seed": -1}, "seed: must be in"),
        ({"depth": 9}, "depth: must be auto or 0…8, not 9"),
        ({"stop_ids": range(65)}, "stop_ids: at most 64, not 65"),
    ],
)
def test_arguments_are_checked_by_name(
    model: LoadedModel, arguments: dict[str, Any], message: str
) -> None:
    call: Any = model.generate
    with pytest.raises(ValueError, match=message):
        call(**({"prompt_ids": [1], "max_tokens": 3} | arguments))


def test_a_closed_model_refuses(tmp_path: Path) -> None:
    loaded = engine.load_model(write_checkpoint(tmp_path, "hf"), config=CONFIG)
    loaded.close()
    loaded.close()
    with pytest.raises(EngineFailedError):
        loaded._engine.submit(StepPlan(step=0))


def test_the_fastest_depth_is_taken_and_first_cycles_do_not_count() -> None:
    now = 0.0
    depths = FastestDepth(8, clock=lambda: now)
    seen: list[int] = []
    for cycle in range(60):
        depth = depths(cycle)
        first = depth not in seen
        seen.append(depth)
        # Tokens per second: 1 at depth 0, best at depth 2, worse beyond.
        now += 100.0 if first else 1.0 + 0.2 * depth
        depths.emitted((1, 1, 3, 3, 3)[depth])
    assert seen[:30] == [d for d in range(5) for _ in range(6)]
    assert set(seen[30:]) == {2}
