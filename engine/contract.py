"""How a family's MTP head is wired, stated as data, and what drafts in a loaded engine.

A wrong wiring choice still loads and still speaks fluently; it only costs acceptance. So the
choices are written down here with their sources, the structure is checked from tensor names, and
the numbers are checked on the loaded model by `engine.gate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.layouts import MTP_PREFIX, mtp_schema
from engine.models.qwen3_5_config import Qwen35Config

HiddenVariant = Literal["post_norm", "pre_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpContract:
    """Wiring of one family's head. Slot p takes (h_p, token p+1) and predicts token p+2."""

    family: str
    trunk_hidden: HiddenVariant
    """h_p: the trunk's state after its final norm (what its head sees), or before it."""
    recycled_hidden: HiddenVariant
    """What one depth hands to the next: its output after or before the head's own last norm."""
    concat: Literal["embedding_first", "hidden_first"]
    """Order of the two normed halves that `fc` joins."""
    norms: tuple[str, ...]
    """Every norm of the head outside its decoder layer."""
    zero_centred_norms: bool
    """Whether Hugging Face stores all of the head's norms as γ - 1."""
    layers: int
    """Trained layers, all of one kind."""
    layer_kind: Literal["full_attention", "linear_attention"]
    depth_reuse: Literal["same_layer", "layer_per_depth"]
    """How depths beyond the trained ones are drafted."""
    position: Literal["slot", "slot_plus_one"]
    """Rotary position of slot p. A constant offset would not change the result, mixing does."""
    shares: tuple[str, ...]
    """Trunk modules the head uses by reference."""
    sources: tuple[str, ...]


QWEN3_5 = MtpContract(
    family="qwen3_5",
    trunk_hidden="post_norm",
    recycled_hidden="post_norm",
    concat="embedding_first",
    norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    zero_centred_norms=True,
    layers=1,
    layer_kind="full_attention",
    depth_reuse="same_layer",
    position="slot",
    shares=("model.embed_tokens", "lm_head"),
    sources=(
        "vLLM qwen3_5_mtp.py",
        "SGLang models/qwen3_5_mtp.py",
        "mlx-vlm speculative/drafters/qwen3_5_mtp",
        "exllamav3 architecture/qwen3_5_mtp.py",
    ),
)

CONTRACTS = {contract.family: contract for contract in (QWEN3_5,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpStructure:
    """Which of a head's tensors a checkpoint has, by canonical name."""

    found: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    """`mtp.` tensors the contract has no place for: further layers, an embedding of its own, …"""

    @property
    def absent(self) -> bool:
        """No head at all, as opposed to a broken one."""
        return not self.found and not self.unknown

    @property
    def complete(self) -> bool:
        return not self.missing and not self.unknown


def validate_structure(names: Iterable[str], arch: Qwen35Config) -> MtpStructure:
    """Compare a checkpoint's canonical tensor names with what its head must have.

    Companions of packed weights (`.scales`, `.biases`) belong to their weight. Shapes are the
    loader's to check.
    """
    wanted = mtp_schema(arch)
    present = {name for name in names if name.startswith(MTP_PREFIX)}
    companions = {
        f"{name.removesuffix('.weight')}.{part}" for name in wanted for part in ("scales", "biases")
    }
    return MtpStructure(
        found=tuple(name for name in wanted if name in present),
        missing=tuple(name for name in wanted if name not in present),
        unknown=tuple(sorted(present - wanted.keys() - companions)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBackend:
    """What drafts, how its drafts are verified, what it shares with the trunk."""

    name: str
    drafts_with: str
    verified_by: str
    shares: tuple[str, ...]
    max_depth: int


NO_DRAFTS = DraftBackend(
    name="none", drafts_with="nothing", verified_by="nothing", shares=(), max_depth=0
)
"""Plain autoregression: the same cycle at depth 0."""


def mtp_backend(contract: MtpContract, max_depth: int) -> DraftBackend:
    """The model's own head as a draft backend; `NO_DRAFTS` at depth 0."""
    if max_depth == 0:
        return NO_DRAFTS
    return DraftBackend(
        name="mtp",
        drafts_with=f"the model's own MTP head ({contract.depth_reuse.replace('_', ' ')})",
        verified_by="one trunk forward over all drafts, rejection sampling",
        shares=(*contract.shares, "KV pages", "page tables"),
        max_depth=max_depth,
    )
