"""Trunk and MTP against transformers and mlx-lm, on tiny checkpoints in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.cache import PagePool, page_table, slot_window, window
from engine.checkpoint import load_weights, read_checkpoint
from engine.models import qwen3_5
from engine.models.delta import keep_all
from engine.models.qwen3_5 import DraftPast, Qwen35Model
from tests.engine.tiny_checkpoints import Array, reference, write_checkpoint

TOLERANCE = 1e-4
PAGE_SIZE = 8
VARIANTS = ("hf", "hf_tied", "hf_sharded", "mlx", "mlx_4bit")


class Run:
    """One loaded checkpoint, its pools, and the outputs the references name."""

    def __init__(self, folder: Path, variant: str, *, dequantize: bool, fuse: bool = True) -> None:
        checkpoint = read_checkpoint(folder)
        self.model = Qwen35Model(checkpoint.arch, with_mtp=checkpoint.has_mtp)
        load_weights(self.model, checkpoint, dtype=mx.float32, dequantize=dequantize)
        if fuse:
            self.model.fuse()
        else:
            for layer in self.model.model.layers:
                if "linear_attn" in layer:
                    layer.linear_attn.prepare()
        self.expected = reference(variant)
        self.prompt = [int(t) for t in self.expected["prompt"]]
        pages = -(-(len(self.prompt) + 4) // PAGE_SIZE)
        arch = checkpoint.arch
        self.pools = [
            PagePool(
                pages=pages,
                page_size=PAGE_SIZE,
                heads=arch.num_key_value_heads,
                head_dim=arch.head_dim,
                dtype=mx.float32,
            )
            for _ in range(self.model.attention_layers + 1)
        ]
        # Pages in reverse, so that nothing works by lying in order.
        self.table = page_table(np.arange(pages, 0, -1, dtype=np.int32)[None])

    def trunk(self, chunk: int, *, blocks: bool = False) -> tuple[mx.array, mx.array]:
        """Hidden states and logits of the prompt, fed in chunks; `blocks`: prefill's recurrence."""
        states, parts = self.model.zero_states(1), []
        for start in range(0, len(self.prompt), chunk):
            piece = self.prompt[start : start + chunk]
            where = window(mx.array([start]), len(piece), self.table, PAGE_SIZE)
            hidden, trails = self.model.trunk(
                mx.array([piece]), where, self.pools[:-1], states, chunked=blocks
            )
            states = [keep_all(trail) for trail in trails]
            parts.append(hidden)
        hidden = mx.concatenate(parts, axis=1)
        return hidden, self.model.head(hidden)

    def mtp(self, hidden: mx.array, chunk: int) -> dict[str, mx.array]:
        """MTP outputs at depth 1 over all slots, then 2 and 3 recursively."""
        after = [*self.prompt[1:], int(self.expected["next_token"])]
        parts = []
        for start in range(0, len(after), chunk):
            tokens = mx.array([after[start : start + chunk]])
            where = slot_window(mx.array([start]), tokens.shape[1], self.table, PAGE_SIZE)
            true = hidden[:, start : start + chunk]
            parts.append(self.model.mtp_exact(true, tokens, where, self.pools[-1]))
        first = mx.concatenate(parts, axis=1)
        out = {"mtp1_hidden": first[0], "mtp1_logits": self.model.head(first)[0]}
        past = DraftPast(self.pools[-1], self.table, mx.array([len(after)]))
        state = first[:, -1:]
        drafts = [mx.argmax(self.model.head(state)[:, 0], axis=-1)]
        for depth in (2, 3):
            state = self.model.mtp_draft(state, drafts[-1][:, None], past)
            logits = self.model.head(state)[:, 0]
            out |= {f"mtp{depth}_hidden": state[0, 0], f"mtp{depth}_logits": logits[0]}
            drafts.append(mx.argmax(logits, axis=-1))
        out["drafts"] = mx.concatenate(drafts)
        return out

    def errors(self, chunk: int = 24) -> dict[str, float]:
        """Largest difference from the reference, by output."""
        hidden, logits = self.trunk(chunk)
        found = {"trunk_hidden": hidden[0], "trunk_logits": logits[0]} | self.mtp(hidden, chunk)
        return {name: _gap(np.array(value), self.expected[name]) for name, value in found.items()}


def _gap(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max())


@pytest.mark.parametrize("chunk", [24, 7, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_trunk_and_mtp_equal_the_reference(tmp_path: Path, variant: str, chunk: int) -> None:
    run = Run(write_checkpoint(tmp_path, variant), variant, dequantize=True)
    errors = run.errors(chunk)
    assert len(errors) == 9
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("chunk", [24, 17])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_blocks_equals_the_reference(tmp_path: Path, variant: str, chunk: int) -> None:
    run = Run(write_checkpoint(tmp_path, variant), variant, dequantize=True)
    hidden, logits = run.trunk(chunk, blocks=True)
    assert _gap(np.array(hidden[0]), run.expected["trunk_hidden"]) <= TOLERANCE
    assert _gap(np.array(logits[0]), run.expected["trunk_logits"]) <= TOLERANCE


@pytest.mark.parametrize("fuse", [True, False])
def test_packed_weights_equal_the_reference_too(tmp_path: Path, fuse: bool) -> None:
    folder = write_checkpoint(tmp_path, "mlx_4bit")
    errors = Run(folder, "mlx_4bit", dequantize=False, fuse=fuse).errors()
    assert max(errors.values()) <= TOLERANCE, errors


def _swapped_concat(run: Run, patch: pytest.MonkeyPatch) -> None:
    def combine(self: qwen3_5.MtpHead, embedding: mx.array, hidden: mx.array) -> mx.array:
        parts = [self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embedding)]
        out: mx.array = self.fc(mx.concatenate(parts, axis=-1))
        return out

    patch.setattr(qwen3_5.MtpHead, "combine", combine)


def _mtp_norm_off_by_one(run: Run, patch: pytest.MonkeyPatch) -> None:
    run.model.mtp.norm.weight = run.model.mtp.norm.weight - 1


def _no_output_gate(run: Run, patch: pytest.MonkeyPatch) -> None:
    attend = qwen3_5.Attention.attend
    patch.setattr(
        qwen3_5.Attention,
        "attend",
        lambda self, q, k, v, mask, gate, block, rows: attend(
            self, q, k, v, mask, mx.full(gate.shape, 20.0), block, rows
        ),
    )


def _key_heads_tiled(run: Run, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mx, "repeat", lambda x, n, axis: mx.concatenate([x] * n, axis=axis))


def _no_decay(run: Run, patch: pytest.MonkeyPatch) -> None:
    for layer in run.model.model.layers:
        if "linear_attn" in layer:
            layer.linear_attn._decay_rate = mx.zeros_like(layer.linear_attn._decay_rate)


def _conv_reversed(run: Run, patch: pytest.MonkeyPatch) -> None:
    for layer in run.model.model.layers:
        if "linear_attn" in layer:
            layer.linear_attn._taps = layer.linear_attn._taps[::-1]


@pytest.mark.parametrize(
    "fault",
    [
        _swapped_concat,
        _mtp_norm_off_by_one,
        _no_output_gate,
        _key_heads_tiled,
        _no_decay,
        _conv_reversed,
    ],
)
def test_planted_faults_are_far_outside_the_tolerance(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Run, pytest.MonkeyPatch], None],
) -> None:
    run = Run(write_checkpoint(tmp_path, "hf"), "hf", dequantize=True)
    fault(run, monkeypatch)
    assert max(run.errors().values()) > 100 * TOLERANCE
