"""The version of the installed application."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _installed() -> str:
    try:
        return version("selfdraft")
    except PackageNotFoundError:  # run from a checkout without installing
        return "0+unknown"


VERSION: Final = _installed()
