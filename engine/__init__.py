"""The model on the device: checkpoints, families, caches, draft, verify, accept.

Start at `engine.plan` for the contract and `engine.load` for the way in; `engine.load_model` is for
scripts and notebooks. Importing this package imports no MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.api import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> object:
    """Names of `engine.api`, on first use."""
    if name in __all__:
        from engine import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
