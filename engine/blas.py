"""Give MLX a fast BLAS on Linux CPU, and say which one it got.

MLX's Linux wheel links a bundled reference BLAS. A dynamic symbol is looked up in the global scope
first, so an OpenBLAS loaded with RTLD_GLOBAL *before* libmlx.so serves its `cblas_*` calls.
Checked with LD_DEBUG=bindings: libmlx.so's `cblas_sgemm` binds to libopenblas.so.0; on the 2 cores
at hand a 5-row float32 matmul against 4096² falls from about 95 ms to 25 ms.

Must not import mlx, not even indirectly: call `prepare_blas` before anything does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from dataclasses import dataclass

from engine.config import BlasChoice

_CANDIDATES = (
    "libopenblas.so.0",  # Debian, Ubuntu, Fedora (serial or pthread), Arch
    "libopenblasp.so.0",  # Fedora, RHEL: the pthread build
    "libopenblas.so",  # development links; conda
)
_REFERENCE = "mlx reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """Which BLAS serves MLX's CPU matmuls. `name` is for `EngineInfo.blas`, `note` says why it is
    not the fast one (None when it is, or when the config asked for the reference)."""

    name: str
    note: str | None = None


_loaded: Blas | None = None
"""Set once an OpenBLAS is in the process's global scope: it cannot be taken out again."""
_library: ctypes.CDLL | None = None
"""The OpenBLAS behind `_loaded`."""


def prepare_blas(choice: BlasChoice) -> Blas:
    """Load an OpenBLAS for MLX if `choice` is `auto` and one is there. Never raises.

    Repeatable; only a call before the first import of mlx can have an effect. On macOS MLX uses
    Accelerate and nothing is loaded.
    """
    global _loaded
    if sys.platform == "darwin":
        return Blas(name="accelerate")
    if _loaded is not None:
        asked_otherwise = choice == "reference"
        note = "blas=reference has no effect: this process has loaded OpenBLAS already"
        return Blas(name=_loaded.name, note=note if asked_otherwise else None)
    if choice == "reference" or not sys.platform.startswith("linux"):
        return Blas(name=_REFERENCE)
    if "mlx.core" in sys.modules:
        return Blas(name=_REFERENCE, note="mlx was imported before OpenBLAS could be loaded")
    found = _load_openblas()
    if found is None:
        hint = "no OpenBLAS found (Debian: libopenblas0): CPU matmuls cost linearly in their rows"
        # A CUDA build rarely multiplies on the CPU, so the missing library is no news there.
        return Blas(name=_REFERENCE, note=None if _has_cuda_build() else hint)
    _loaded = Blas(name=found)
    return _loaded


def describe_blas(blas: Blas, *, on_gpu: bool) -> Blas:
    """What to report for an engine on that device: on a GPU no BLAS takes part."""
    return Blas(name="none: GPU") if on_gpu else blas


def thread_choices() -> tuple[int, ...]:
    """Numbers of BLAS threads worth trying, fewest first; empty when there is no choice."""
    if _library is None or not hasattr(_library, "openblas_set_num_threads"):
        return ()
    return tuple(sorted({1, max(1, (cores() + 1) // 2), cores()}))


def set_threads(count: int) -> None:
    """Let OpenBLAS use `count` threads, process-wide. No effect without one."""
    if _library is not None:
        _library.openblas_set_num_threads(count)


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_openblas() -> str | None:
    """Load the first OpenBLAS that offers `cblas_sgemm`, globally: its version and name."""
    global _library
    for name in _CANDIDATES:
        try:
            # Local first: a library that lacks the C interface must not reach the global scope.
            probe = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
            if not (hasattr(probe, "cblas_sgemm") and hasattr(probe, "openblas_get_config")):
                continue
            library = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
            _library = library
            return f"openblas {_version(library)} ({name})"
        except OSError:
            continue
    return None


def _version(library: ctypes.CDLL) -> str:
    """Version from OpenBLAS's build description, or "unknown" where its form is not as expected."""
    describe = library.openblas_get_config
    describe.argtypes = []
    describe.restype = ctypes.c_char_p
    text = (describe() or b"").decode("ascii", "replace")
    match = re.search(r"\d+(\.\d+)+", text)
    return match.group(0) if match else "unknown"


def _has_cuda_build() -> bool:
    """Whether an MLX CUDA wheel is installed (it brings its shared library in this package)."""
    try:
        from importlib.metadata import distributions

        names = {(d.metadata["Name"] or "").lower() for d in distributions()}
    except Exception:  # a broken dist-info elsewhere is no reason not to serve
        return importlib.util.find_spec("mlx_cuda") is not None
    return any(name.startswith("mlx-cuda") for name in names)
