"""Does it fit? Pure arithmetic over bytes, done before anything large is allocated.

A Mac that over-commits wired memory panics, and a Linux host kills the process, so what an engine
will hold at its worst is summed up against the device's working set, and the KV pool gets what is
left or the engine refuses to start and names the number to change. Transients are upper estimates:
they assume attention without a fused kernel, and the head's logits in float32 in a few copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine import transients
from engine.errors import BudgetError
from engine.models.qwen3_5_config import Qwen35Config
from engine.plan import pages_needed

DEFAULT_ROW_TOKENS = 2048
"""Tokens per row the pool is sized for when `kv_memory` is not set."""
MIN_ROW_TOKENS = 256
"""A pool that could not hold one row of this length (or of the whole context) is no service."""
CPU_FRACTION = 0.75
"""Part of the host's memory an engine on the CPU may plan with; the rest is everybody else's."""
CUDA_FRACTION = 0.9
"""Part of a CUDA device's memory to plan with: context, libraries and fragments take the rest."""
RESERVE_FRACTION = 0.05
MIN_RESERVE = 256 * 1024**2
"""Held back for the allocator's slack, the runtime and what is not counted here."""
DEFAULT_BOUNDARIES = 64
BOUNDARY_FRACTION = 0.1
"""Part of the working set that boundaries may take unless told otherwise."""
LOGIT_COPIES = 8
"""Float32 arrays of the vocabulary alive per verified position, at most: logits, rules, shaped,
sorted, noise. Measured at the peak of a cycle: greedy 2.4, rejection 7.9, coupled 7.5."""
RULED_LOGIT_COPIES = 14
"""The same in a cohort where some row has a rule or a constraint (13.5; with log probabilities
13.8). The plan at load does not count on it; `engine.preflight` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes by what they are paid for."""

    weight_bytes: int
    page_bytes: int
    """One page over all attention layers, MTP included."""
    gather_bytes: int
    """One page of one layer, twice: attention gathers a layer's live pages, and where there is no
    fused kernel lays them out once more for its products."""
    row_bytes: int
    """Recurrent state and the like per row, resident."""
    verify_row_bytes: int
    """Transient per row of a verify at the full depth."""
    prefill_token_bytes: int
    """Transient per token of a prefill chunk in a recurrent layer."""
    attention_token_bytes: int
    """The same in an attention layer, scores aside. Layers run one after the other."""
    score_bytes: int
    """Attention scores per (query token, key token) pair."""
    prefill_row_bytes: int = 0
    """Transient per row of a prefill pass: its new state, and the recurrence's own."""
    logit_bytes: int = 0
    """The logits of one position, float32."""
    boundary_bytes: int = 0
    """One saved point of a sequence: recurrent states and a hidden; exact, not an estimate."""

    def prefill(self, tokens: int, keys: int) -> int:
        """Transient of so many prompt tokens that see so many keys each."""
        attending = self.attention_token_bytes + keys * self.score_bytes
        return tokens * max(self.prefill_token_bytes, attending)


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One line of the table."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What fits, line by line."""

    rows: tuple[BudgetRow, ...]
    working_set: int
    pages: int
    """Usable pages of the pool, the null page not counted."""
    boundaries: int = 0
    """Boundaries there is room for."""

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def free(self) -> int:
        return self.working_set - self.total

    @property
    def cache_limit(self) -> int:
        """For `mx.set_cache_limit`: freed buffers worth keeping are those the next step needs."""
        return sum(row.bytes for row in self.rows if row.name in ("transient", "padding"))

    def table(self) -> str:
        """The budget for people, one line per row."""
        rows = self.lines()
        return "\n".join(f"{r.name:<12}{size(r.bytes):>12}  {r.note}".rstrip() for r in rows)

    def lines(self) -> tuple[BudgetRow, ...]:
        """Its rows, and what is left over."""
        return *self.rows, BudgetRow("free", self.free, f"of {size(self.working_set)}")


def size(count: int) -> str:
    """Bytes for people, e.g. "1.50 GiB"."""
    value, sign = float(abs(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} GiB"


def device_working_set(info: Mapping[str, str | int], *, on_gpu: bool) -> int:
    """Bytes an engine may plan with, from `mx.device_info()`; on the CPU from the host.

    Raises BudgetError when a GPU does not say how much memory it has.
    """
    if not on_gpu:
        return int(host_memory() * CPU_FRACTION)
    recommended = info.get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended  # Metal: more than this may be paged or refused
    total = info.get("total_memory", info.get("memory_size"))
    if not isinstance(total, int) or total <= 0:
        raise BudgetError("the device does not report its memory", change="run on the CPU")
    free = info.get("free_memory")
    usable = int(total * CUDA_FRACTION)
    return min(usable, free) if isinstance(free, int) and free > 0 else usable


def host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this host, or of its container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def estimate(
    arch: Qwen35Config,
    *,
    weight_bytes: int,
    item_bytes: int,
    page_size: int,
    depth: int,
    mtp: bool,
    keep_states: bool = True,
    token_by_token: bool = False,
) -> Costs:
    """Costs of a model from its dimensions; `item_bytes` per activation and cached element.

    `keep_states`: a verify keeps the recurrent state after every token until the commit has chosen
    one, instead of replaying the block. `token_by_token`: recurrences never run in blocks.
    """
    layers = arch.full_attention_layers + (1 if mtp else 0)
    page_layer = 2 * page_size * arch.num_key_value_heads * arch.head_dim * item_bytes
    tail = (arch.linear_conv_kernel_dim - 1) * arch.conv_dim * item_bytes
    states = arch.linear_layers * (transients.memory(arch) + tail)
    hidden = arch.hidden_size * item_bytes
    # Pending MTP slots, and the last hidden once more for the row's boundary.
    row = states + (depth + 1 + (1 if mtp else 0)) * hidden
    return Costs(
        weight_bytes=weight_bytes,
        page_bytes=layers * page_layer,
        gather_bytes=2 * page_layer,
        row_bytes=row,
        verify_row_bytes=transients.verify_row(
            arch,
            item_bytes,
            row=row,
            depth=depth,
            logit_copies=LOGIT_COPIES,
            keep_states=keep_states,
            token_by_token=token_by_token,
        ),
        prefill_token_bytes=transients.recurrence_token(arch, item_bytes),
        attention_token_bytes=transients.attention_token(arch, item_bytes),
        prefill_row_bytes=transients.prefill_row(arch, row, token_by_token=token_by_token),
        score_bytes=transients.scores(arch, item_bytes),
        logit_bytes=arch.vocab_size * 4,
        boundary_bytes=states + (hidden if mtp else 0),
    )


def plan_budget(
    costs: Costs,
    *,
    working_set: int,
    page_size: int,
    max_rows: int,
    prefill_chunk: int,
    context: int,
    kv_memory: int | None = None,
    prefix_memory: int | None = 0,
    cycle_rows: int = 0,
) -> Budget:
    """Size the pool. `context` is the most positions a row may occupy.

    With `kv_memory` the pool is that large; without, it holds max_rows × min(context, 2048)
    tokens, or what fits. `prefix_memory` None is `DEFAULT_BOUNDARIES` or a share of the working
    set, or nothing where the rest would not fit then. With `cycle_rows` every decode cycle has that
    many rows and reads the whole context of each (`EngineConfig.deterministic`).

    Raises BudgetError naming the number to change: `kv_memory`, `prefix_memory`, `max_rows`,
    `context`, `prefill_chunk` or the model.
    """

    def plan(*, boundaries: int, context: int = context, cycle_rows: int = cycle_rows) -> Budget:
        fixed = _padding(costs, cycle_rows, max_rows, context, page_size)
        if boundaries:
            # Rows that have ended lie beside the cohort until they are kept or released.
            held = boundaries * costs.boundary_bytes + max_rows * costs.row_bytes
            note = f"{boundaries} boundaries, and the ends of {max_rows} rows"
            fixed = (*fixed, BudgetRow("boundaries", held, note))
        pool = _plan_pool(
            costs,
            working_set=working_set,
            page_size=page_size,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            context=context,
            kv_memory=kv_memory,
            fixed=fixed,
        )
        return replace(pool, boundaries=boundaries)

    def fits(boundaries: int, *, context: int = context, cycle_rows: int = cycle_rows) -> bool:
        try:
            plan(boundaries=boundaries, context=context, cycle_rows=cycle_rows)
        except BudgetError:
            return False
        return True

    count = _boundaries(costs, working_set, prefix_memory)
    if fits(count):
        return plan(boundaries=count)
    if count and fits(0):
        if prefix_memory is None:
            return plan(boundaries=0)
        most = _largest(1, count, fits) * costs.boundary_bytes
        raise BudgetError(
            f"prefix_memory of {size(prefix_memory)} does not fit {size(working_set)} beside the "
            "rest",
            change=f"lower prefix_memory to at most {most} bytes",
        )
    if cycle_rows and fits(0, cycle_rows=0):
        row = _padding(costs, cycle_rows, max_rows, context, page_size)[0]
        most = _largest(2, context, lambda n: fits(0, context=n))
        raise BudgetError(
            f"deterministic {row.note} do not fit {size(working_set)}: {size(row.bytes)}",
            change=f"lower context to at most {most}" if most else "lower max_rows or max_depth",
        )
    return plan(boundaries=0)


def _boundaries(costs: Costs, working_set: int, prefix_memory: int | None) -> int:
    """Boundaries to plan for."""
    if costs.boundary_bytes == 0:
        return 0
    if prefix_memory is None:
        share = int(working_set * BOUNDARY_FRACTION)
        return min(DEFAULT_BOUNDARIES, share // costs.boundary_bytes)
    return prefix_memory // costs.boundary_bytes


def _padding(
    costs: Costs, cycle_rows: int, max_rows: int, context: int, page_size: int
) -> tuple[BudgetRow, ...]:
    """What cycles of one shape take beyond those of max_rows rows."""
    if cycle_rows == 0:
        return ()
    more = (cycle_rows - max_rows) * (costs.row_bytes + costs.verify_row_bytes)
    reads = cycle_rows * pages_needed(context, page_size) * costs.gather_bytes
    note = f"cycles of {cycle_rows} rows × {context} positions"
    return (BudgetRow("padding", more + reads, note),)


def _plan_pool(
    costs: Costs,
    *,
    working_set: int,
    page_size: int,
    max_rows: int,
    prefill_chunk: int,
    context: int,
    kv_memory: int | None,
    fixed: tuple[BudgetRow, ...] = (),
) -> Budget:
    """The pool beside `fixed` rows of the table."""
    reserve = max(MIN_RESERVE, int(working_set * RESERVE_FRACTION))
    # A row of one token more than the context never exists, but its last page may be part-filled.
    least = pages_needed(min(context, MIN_ROW_TOKENS), page_size)

    def rows_for(
        pages: int, rows: int = max_rows, chunk: int = prefill_chunk
    ) -> tuple[BudgetRow, ...]:
        keys = min(context, pages * page_size)
        # A row is in a prefill pass or in a verify.
        row = max(costs.verify_row_bytes, costs.prefill_row_bytes)
        transient = rows * row + pages * costs.gather_bytes
        transient += costs.prefill(chunk, keys)
        kv = (pages + 1) * costs.page_bytes
        tokens = pages * page_size
        return (
            BudgetRow("weights", costs.weight_bytes, ""),
            BudgetRow("kv pool", kv, f"{pages} pages of {page_size}: {tokens} tokens"),
            BudgetRow("rows", rows * costs.row_bytes, f"{rows} rows"),
            *fixed,
            BudgetRow(
                "transient", transient, f"prefill of {chunk} tokens and a verify of {rows} rows"
            ),
            BudgetRow("reserve", reserve, ""),
        )

    def fits(pages: int, rows: int = max_rows, chunk: int = prefill_chunk) -> bool:
        return sum(row.bytes for row in rows_for(pages, rows, chunk)) <= working_set

    if not fits(least):
        rows = _largest(1, max_rows, lambda n: fits(least, rows=n))
        chunk = _largest(1, prefill_chunk, lambda n: fits(least, chunk=n))
        raise _too_small(rows_for(least), working_set, rows=rows, chunk=chunk)
    if kv_memory is None:
        wanted = max(least, pages_needed(max_rows * min(context, DEFAULT_ROW_TOKENS), page_size))
        pages = _largest(least, wanted, fits)
    else:
        pages = kv_memory // costs.page_bytes - 1
        if pages < least:
            need = (least + 1) * costs.page_bytes
            raise BudgetError(
                f"kv_memory of {size(kv_memory)} cannot hold one row of {least * page_size} tokens",
                change=f"raise kv_memory to at least {need} bytes",
            )
        if not fits(pages):
            most = (_largest(least, pages, fits) + 1) * costs.page_bytes
            raise BudgetError(
                f"kv_memory of {size(kv_memory)} does not fit {size(working_set)} beside the rest",
                change=f"lower kv_memory to at most {most} bytes",
            )
    return Budget(rows=rows_for(pages), working_set=working_set, pages=pages)


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Largest n in low…high for which a condition that only ever turns false holds; 0 if none."""
    if not holds(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _too_small(
    table: tuple[BudgetRow, ...], working_set: int, *, rows: int, chunk: int
) -> BudgetError:
    """`rows` and `chunk` are the largest values that would fit, 0 where none would."""
    if rows:
        change = f"lower max_rows to {rows}"
    elif chunk:
        change = f"lower prefill_chunk to {chunk}"
    else:
        change = "take a smaller or more strongly quantised model, or a device with more memory"
    largest = max(table, key=lambda row: row.bytes)
    need = sum(row.bytes for row in table)
    what = f"needs {size(need)}, the device offers {size(working_set)}"
    return BudgetError(
        f"{what} (largest part: {largest.name}, {size(largest.bytes)})", change=change
    )
