"""What a checkpoint folder holds and what this engine would do with it, from headers alone.

Reads config, safetensors headers and the small norm vectors; no weights, no MLX, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine import quant
from engine.budget import estimate
from engine.contract import CONTRACTS, NO_DRAFTS, DraftBackend, mtp_backend, validate_structure
from engine.errors import CheckpointError, EngineError
from engine.layouts import Schema, family_of, mtp_schema, trunk_schema
from engine.manifest import Folder, check_folder, open_folder, read_json
from engine.models.qwen3_5_config import Qwen35Config
from engine.plan import MAX_DEPTH

TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Facts about a folder. With `runnable` false, `reason` says why and what could not be read
    has its default."""

    path: Path
    runnable: bool = False
    reason: str = ""
    """One line: why it cannot run, or why it runs as `backend` says."""
    family: str = ""
    model_type: str = ""
    layers: int = 0
    linear_layers: int = 0
    full_attention_layers: int = 0
    context_length: int = 0
    vocab_size: int = 0
    tied: bool = False
    parameters: int = 0
    """Logical parameters of trunk and MTP head."""
    mtp_parameters: int = 0
    bytes_on_disk: int = 0
    """Bytes of the language model's tensors, packed as they are stored."""
    stored_dtypes: tuple[str, ...] = ()
    quantization: str = "none"
    mtp_advertised: int = 0
    """MTP layers the config speaks of."""
    mtp_found: tuple[str, ...] = ()
    mtp_missing: tuple[str, ...] = ()
    trunk_norms: str = ""
    mtp_norms: str = ""
    tokenizer: bool = False
    chat_template: bool = False
    backend: DraftBackend = NO_DRAFTS
    max_depth: int = 0
    token_bytes: int = 0
    """Keys and values per token of a row, all layers, as float32."""
    row_bytes: int = 0
    """Recurrent state and pending drafts per row, as float32 (the memory is float32 always)."""
    boundary_bytes: int = 0
    """One saved prefix, its keys and values aside, as float32."""
    notes: tuple[str, ...] = ()


def inspect_model(path: Path) -> Inspection:
    """Inspect a checkpoint folder. Never raises for what is wrong with the checkpoint."""
    try:
        folder = open_folder(path)
    except EngineError as error:
        return Inspection(path=path, reason=str(error))
    facts = _Facts(folder)
    try:
        facts.shape()
        facts.verdict()
    except EngineError as error:
        facts.values["reason"] = str(error)
    return facts.result()


class _Facts:
    """Collects an inspection step by step, so that a late fault keeps the early facts."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.values: dict[str, object] = {
            "path": folder.path,
            "model_type": str(folder.config.get("model_type", "")),
            "bytes_on_disk": sum(t.nbytes for t in folder.stored.values()),
            "stored_dtypes": tuple(sorted({t.dtype for t in folder.stored.values()})),
            "tokenizer": (folder.path / "tokenizer.json").exists(),
            "chat_template": _has_template(folder.path),
            "notes": folder.notes,
        }

    def shape(self) -> None:
        """What the config says, and which of the head's tensors are there."""
        self.values["family"] = family_of(self.folder.config, self.folder.path)
        arch = Qwen35Config.from_dict(self.folder.config)
        head = validate_structure(self.folder.stored, arch)
        trunk, mtp = _parameters(trunk_schema(arch)), _parameters(mtp_schema(arch))
        self.values |= {
            "layers": arch.num_hidden_layers,
            "linear_layers": arch.linear_layers,
            "full_attention_layers": arch.full_attention_layers,
            "context_length": arch.max_position_embeddings,
            "vocab_size": arch.vocab_size,
            "tied": arch.tie_word_embeddings,
            "parameters": trunk + (0 if head.absent else mtp),
            "mtp_parameters": 0 if head.absent else mtp,
            "mtp_advertised": arch.mtp_layers,
            "mtp_found": head.found,
            "mtp_missing": () if head.absent else head.missing,
        }

    def verdict(self) -> None:
        """Whether the set is exactly right, and what then runs."""
        manifest = check_folder(self.folder)
        norms = {part: f"{v.convention}, by {v.why}" for part, v in manifest.verdicts.items()}
        depth = MAX_DEPTH if manifest.has_mtp else 0
        costs = estimate(
            manifest.arch,
            weight_bytes=0,
            item_bytes=4,
            page_size=1,
            depth=depth,
            mtp=manifest.has_mtp,
        )
        reason = "complete checkpoint with an MTP head" if depth else manifest.notes[-1]
        self.values |= {
            "runnable": True,
            "reason": reason,
            "quantization": quant.summary(manifest.quantization),
            "trunk_norms": norms["trunk"],
            "mtp_norms": norms.get("mtp", ""),
            "backend": mtp_backend(CONTRACTS[manifest.family], depth),
            "max_depth": depth,
            "token_bytes": costs.page_bytes,
            "row_bytes": costs.row_bytes,
            "boundary_bytes": costs.boundary_bytes,
            "notes": manifest.notes,
        }

    def result(self) -> Inspection:
        return Inspection(**self.values)  # type: ignore[arg-type]  # keys are its own fields


def _parameters(schema: Schema) -> int:
    return sum(spec.size for spec in schema.values())


def _has_template(path: Path) -> bool:
    if (path / TEMPLATE_FILE).exists():
        return True
    try:
        return bool(read_json(path / "tokenizer_config.json").get("chat_template"))
    except CheckpointError:
        return False
