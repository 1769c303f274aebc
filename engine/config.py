"""What a person can set about an engine: one frozen dataclass, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from engine.errors import ConfigError
from engine.plan import MAX_DEPTH

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
BlasChoice = Literal["auto", "reference"]
WeightsChoice = Literal["auto", "keep", "dequantize"]
GateChoice = Literal["auto", "off"]

MAX_ROWS = 256
MAX_PAGE_SIZE = 256
MAX_PREFILL_CHUNK = 8192
MIN_CONTEXT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Call `validate` before use; the engine's builder does."""

    model: Path
    """Checkpoint folder: `config.json` and safetensors."""
    dtype: DtypeChoice = "auto"
    """Type of activations and of weights that are not quantised. `auto` is float32 on CPU, where
    half precision is emulated and slower, and the checkpoint's own type on a GPU."""
    blas: BlasChoice = "auto"
    """Linux CPU only. `auto` loads an OpenBLAS before MLX when there is one (a matmul's cost is
    then nearly flat in its rows); `reference` keeps MLX's own, whose results do not depend on the
    number of rows, bit for bit, and prefills token by token to keep it so."""
    weights: WeightsChoice = "auto"
    """Quantised weights: `keep` them packed, `dequantize` them at load (memory × 16/bits or more),
    or `auto`: dequantise on CPU, keep on GPU. MLX's CPU quantized matmul costs linearly in rows
    (256→4096, 8 bit: 1.1 ms at 1 row, 5.6 ms at 5; dense with OpenBLAS: 0.37 and 0.70 ms), which
    would eat what verifying several drafts at once is meant to gain."""
    mtp_gate: GateChoice = "auto"
    """Numeric check of the MTP head at load. `auto` measures agreement with the trunk and turns
    drafting off below the floor; `off` trusts the head unmeasured. Output is exact either way."""
    max_rows: int = 16
    """Rows that may hold device state at once, 1…256: bounds recurrent state and verify batch."""
    page_size: int = 16
    """Tokens per KV page, a power of two up to 256: a row wastes up to page_size - 1 positions."""
    kv_memory: int | None = None
    """Bytes for the KV page pool. None: room for max_rows × min(context, 2048) tokens, or what
    fits."""
    prefix_memory: int | None = None
    """Bytes for boundaries: saved recurrent states from which requests with the same beginning, or
    a session's next turn, go on. None: a tenth of the working set or 64 boundaries, whichever is
    less, and none where `deterministic` would be broken by them. 0 turns reuse off."""
    deterministic: bool = False
    """Run every decode cycle at one shape: max_rows rows and a few more (filled up with rows that
    are done), `max_depth` drafts whatever depth is planned, page tables of the whole context. Then
    a row's logits depend on neither its neighbours nor the depth, bit for bit, on any BLAS and any
    device; nor do its tokens, if they are greedy or coupled (rejection sampling draws its noise by
    what was drafted). Its prompt must come in the same chunks. Where a BLAS treats the places of a
    batch differently (tried at load), rows decode one by one instead, each at full depth.

    The price: one row costs as much as a full house at full depth, or a house as much as its rows
    one after the other; attention reads the whole context. Cap `context`, `max_rows` and
    `max_depth` accordingly. On a CPU, `blas = reference` gives the same without it."""
    max_depth: int = 8
    """Most tokens drafted per cycle, 0…8. 0 turns drafting off."""
    prefill_chunk: int | None = None
    """Prompt tokens per prefill call, 1…8192: bounds the transient activations, and how long a
    running stream waits behind someone's prompt. None: 64 on a CPU, 256 on a GPU."""
    context: int | None = None
    """Cap on positions per row (prompt plus output), >= 2. None: the model's own limit. A cap above
    the model's limit has no effect."""

    def validate(self) -> None:
        """Raise ConfigError, naming the field and its limit, unless every field is in range."""
        if not isinstance(self.model, Path):
            raise ConfigError("model", f"must be a Path, not {type(self.model).__name__}")
        for name, hint in get_type_hints(EngineConfig).items():
            choices = get_args(hint)
            if choices and all(isinstance(c, str) for c in choices):
                value = getattr(self, name)
                if value not in choices:
                    raise ConfigError(name, f"must be one of {', '.join(choices)}, not {value!r}")
        self._check_int("max_rows", 1, MAX_ROWS)
        self._check_int("page_size", 1, MAX_PAGE_SIZE)
        if self.page_size & (self.page_size - 1):
            raise ConfigError("page_size", f"must be a power of two, not {self.page_size}")
        self._check_int("max_depth", 0, MAX_DEPTH)
        if self.prefill_chunk is not None:
            self._check_int("prefill_chunk", 1, MAX_PREFILL_CHUNK)
        if self.kv_memory is not None:
            self._check_int("kv_memory", 1, None)
        if self.prefix_memory is not None:
            self._check_int("prefix_memory", 0, None)
        if not isinstance(self.deterministic, bool):
            raise ConfigError("deterministic", f"must be true or false, not {self.deterministic!r}")
        if self.context is not None:
            self._check_int("context", MIN_CONTEXT, None)

    def _check_int(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(name, f"must be an integer, not {value!r}")
        if value < low or (high is not None and value > high):
            span = f"at least {low}" if high is None else f"in {low}…{high}"
            raise ConfigError(name, f"must be {span}, not {value}")
