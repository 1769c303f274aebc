# torch, transformers and mlx-lm are no dependencies of this project, so there is nothing to check.
# mypy: ignore-errors
"""Make `fixtures/*.npz`: reference outputs of the tiny checkpoints, from other people's code.

Not part of the tests. Needs torch, transformers and mlx-lm beside mlx and numpy; the committed
files were made with torch 2.13.0, transformers 5.24.0, mlx-lm 0.32.2, mlx 0.32.4 on CPU:

    python -m tests.engine.make_fixtures

Trunk: transformers' Qwen3_5ForCausalLM in float32 (its reference kernels); for `mlx_4bit` mlx-lm
on the packed files. MTP: transformers' decoder layer, norm and rotary classes, wired as vLLM's
qwen3_5_mtp.py does: fc(norm(embedding) ‖ norm(trunk hidden)), one full-attention layer with
position = slot, `mtp.norm`, the trunk's head; the normed output is the next depth's hidden.

Each result is checked before it is written: mlx-lm must agree with transformers (not for `hf_tied`,
whose `layer_types` mlx-lm does not read), and the greedy drafts must not hang on a near-tie.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
)

from tests.engine.tiny_checkpoints import (
    FIXTURES,
    Array,
    Tensors,
    base_weights,
    digest,
    is_delta,
    prompt,
    quantize,
    text_config,
    to_mlx,
    unpack,
    write_checkpoint,
)

AGREEMENT = 2e-4
"""Largest logit difference allowed between mlx-lm and transformers."""
MARGIN = 0.05
"""Smallest gap between the two best logits where the next input is an argmax."""


def main() -> None:
    torch.set_num_threads(1)
    FIXTURES.mkdir(exist_ok=True)
    for variant in ("hf", "hf_tied", "mlx_4bit"):
        arrays = make(variant)
        np.savez_compressed(FIXTURES / f"{variant}.npz", **arrays)
        print(variant, arrays["drafts"], (FIXTURES / f"{variant}.npz").stat().st_size, "bytes")


def make(variant: str) -> dict[str, Array]:
    """All arrays of one fixture."""
    config = Qwen3_5TextConfig(**text_config(variant), attn_implementation="eager")
    weights = dense_weights(variant)
    tokens = prompt(variant)
    model = trunk_model(config, weights)
    hidden, logits = run_trunk(model, tokens)
    print(f"{variant}: standard deviation of the logits {logits.std():.1f}")
    for layout in {"hf": ("hf", "hf_sharded", "mlx"), "mlx_4bit": ("mlx_4bit",)}.get(variant, ()):
        theirs_hidden, theirs_logits = run_mlx_lm(layout, tokens)
        worst = float(np.abs(theirs_logits - logits).max())
        print(f"{layout}: mlx-lm and transformers differ by {worst:.1e}")
        assert worst < AGREEMENT
        if variant == "mlx_4bit":
            hidden, logits = theirs_hidden, theirs_logits
    arrays = {"prompt": tokens, "trunk_hidden": hidden, "trunk_logits": logits}
    arrays |= run_mtp(config, model, weights, tokens, hidden, pick(logits[-1]))
    arrays["digest"] = np.array(digest(variant))
    return arrays


def dense_weights(variant: str) -> Tensors:
    """Hugging Face layout; for `mlx_4bit` what its packed weights stand for."""
    weights = base_weights(variant)
    if variant != "mlx_4bit":
        return weights
    packed, _ = quantize(to_mlx(weights))
    for name in weights:
        module = name.removesuffix(".weight")
        if f"{module}.scales" in packed:
            bits = 8 if module.endswith("embed_tokens") else 4
            parts = (packed[name], packed[f"{module}.scales"], packed[f"{module}.biases"])
            weights[name] = unpack(*parts, bits=bits)
    return weights


def trunk_model(config: Any, weights: Tensors) -> Any:
    model = Qwen3_5ForCausalLM(config).eval()
    state = {n: torch.from_numpy(v) for n, v in weights.items() if not n.startswith("mtp.")}
    result = model.load_state_dict(state, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert result.missing_keys == tied, result
    assert not result.unexpected_keys, result
    model.tie_weights()
    return model


@torch.no_grad()
def run_trunk(model: Any, tokens: Array) -> tuple[Array, Array]:
    """(hiddens after the final norm [T, H], logits [T, V])."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0].numpy(), model.lm_head(hidden)[0].numpy()


def run_mlx_lm(variant: str, tokens: Array) -> tuple[Array, Array]:
    """The same by mlx-lm, from the files a user would have."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    with tempfile.TemporaryDirectory() as directory:
        folder = write_checkpoint(Path(directory), variant)
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = "qwen3_5"  # it knows the wrapper's name only, with either form
        (folder / "config.json").write_text(json.dumps(config))
        model, _ = load_model(folder)
        ids = mx.array(tokens)[None]
        text = model.language_model
        hidden = text.model(ids)
        logits = model(ids)
        mx.eval(hidden, logits)
    return np.array(hidden[0]), np.array(logits[0])


class Mtp(torch.nn.Module):
    """The MTP head from transformers' classes. Norm weights stay deltas: its norms add the 1."""

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        full = config.layer_types.index("full_attention")
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, full)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)
        self.trunk = [model]  # in a list: shared, not owned

    def forward(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """[S, H] hiddens and [S] next tokens of slots 0…S-1 → [S, H] after the last norm."""
        model = self.trunk[0].model
        slots = hidden.shape[0]
        embedded = self.pre_fc_norm_embedding(model.embed_tokens(following))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], dim=-1))[None]
        positions = torch.arange(slots)[None]
        rotary = model.rotary_emb(x, positions[None].expand(3, -1, -1))
        mask = torch.full((slots, slots), float("-inf")).triu(1)[None, None]
        x = self.layers[0](
            x, position_embeddings=rotary, attention_mask=mask, position_ids=positions
        )
        return self.norm(x)[0]


@torch.no_grad()
def run_mtp(
    config: Any, model: Any, weights: Tensors, tokens: Array, hidden: Array, next_token: int
) -> dict[str, Array]:
    """Depth 1 over all slots, then depths 2 and 3 from the last one. No cache is used: every depth
    runs all slots again, the earlier ones on the hiddens they had."""
    head = Mtp(config, model).eval()
    state = {n[4:]: torch.from_numpy(v) for n, v in weights.items() if n.startswith("mtp.")}
    assert all(is_delta("mtp." + n) == ("norm" in n) for n in state)
    head.load_state_dict(state)
    following = torch.from_numpy(np.append(tokens[1:], next_token).astype(np.int64))
    inputs = torch.from_numpy(hidden)
    arrays: dict[str, Array] = {"next_token": np.array(next_token, np.int32)}
    drafts = []
    for depth in (1, 2, 3):
        out = head(inputs, following)
        logits = model.lm_head(out)
        if depth == 1:
            arrays["mtp1_hidden"], arrays["mtp1_logits"] = out.numpy(), logits.numpy()
        else:
            arrays[f"mtp{depth}_hidden"] = out[-1].numpy()
            arrays[f"mtp{depth}_logits"] = logits[-1].numpy()
        drafts.append(pick(logits[-1].numpy()))
        inputs = torch.cat([inputs, out[-1:]])
        following = torch.cat([following, torch.tensor([drafts[-1]])])
    arrays["drafts"] = np.array(drafts, np.int32)
    return arrays


def pick(logits: Array) -> int:
    """Argmax, refusing near-ties: another machine would then feed another token."""
    second, best = np.sort(logits)[-2:]
    assert best - second > MARGIN, (best, second)
    return int(logits.argmax())


if __name__ == "__main__":
    main()
