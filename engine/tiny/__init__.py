"""The bundled model: a small Qwen3.5-layout checkpoint with one MTP layer, and how it was made."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent
"""Folder that holds the checkpoint (config.json, tokenizer.json, model*.safetensors)."""
