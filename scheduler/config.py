"""What an operator may set. Frozen, keyword-only; each field says its unit and why it exists.

What is bounded (defaults in parentheses; None follows the engine):

    what                    limit                     beyond it
    ----------------------  ------------------------  -------------------------------------------
    waiting requests        max_queue (64)            QueueFullError with a measured retry delay;
                                                      InvalidRequestError for more samples of one
                                                      request than that, here and below
    waiting prompt tokens   max_queued_tokens (256k)  the same
    the same of a tenant    its max_queued_tokens     the same; InvalidRequestError when the prompt
                            (None)                    alone exceeds it
    time until it starts    the request's deadline    the same, once enough was measured
                            (None)
    time in a lower class   ageing_s (30) per class   its tenant's first one counts as the next
                            after a higher one went   higher class
    rows of a tenant        its max_rows (None)       wait in the queue; other tenants pass
    rows at once            max_rows (256), engine's  wait in the queue
    KV pages                engine's pool             kept prefixes go (LRU); then new rows wait
                                                      in the queue, and the most junior ones are
                                                      preempted; InvalidRequestError when the
                                                      worst case exceeds the whole pool
    kept prefixes           engine's boundaries       one goes of the tenant most above its share
    sessions                max_sessions (256),       the same is unpinned
                            session_ttl_s (600)
    sessions of a tenant    its max_sessions (None)   its least recently used one is unpinned
    prompt length           max_prompt_tokens (None)  InvalidRequestError
    max_tokens              max_completion_tokens     InvalidRequestError
                            (None); context
    prompt tokens per step  prefill_chunk (engine's)  the next step
    seconds per step        max_token_gap_s (None)    the next step, but prefill_share (0.25) of the
                                                      time is the prompts'
    unread tokens           stream_buffer (256)       the row pauses; SLOW_READER after
                                                      slow_reader_timeout_s (30)
    steps in flight         engine.max_in_flight (2)  IntegrityError: the caller's mistake
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.plan import MAX_DEPTH, EngineInfo
from scheduler.costs import CostTable
from scheduler.request import Priority

Depth = Literal["auto"] | int
"""`"auto"`, or a fixed number of drafts per cycle in 0 … 8."""

LoopKind = Literal["plain", "pipelined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """What one tenant may have. ValueError names the field that is out of range."""

    weight: float = 1.0
    """Share of the served tokens, relative to other tenants that have work; and of the memory for
    kept prefixes, relative to others that keep some (`scheduler.shares`). In the latter all tenants
    without a policy count as one, with the default policy's weight."""

    max_rows: int | None = None
    """Rows at once; None leaves it to the machine. Its further requests wait."""

    max_queued_tokens: int | None = None
    """Prompt tokens that may wait; None leaves it to the queue. More are refused."""

    max_priority: Priority = Priority.INTERACTIVE
    """Requests of a higher class count as this one."""

    max_sessions: int | None = None
    """Sessions that it keeps at once; None leaves it to the server's limit. One more unpins its own
    that was unused the longest. In the default policy: of all tenants without one together."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError("weight must be finite and > 0")
        for name in ("max_rows", "max_queued_tokens", "max_sessions"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds and policies of one scheduler. ValueError names the field that is out of range."""

    max_queue: int = 64
    """Requests that may wait for a row. A client told "not now" can go elsewhere; one that waits
    unseen cannot."""

    max_queued_tokens: int = 262_144
    """Prompt tokens that may wait in total: 64 short prompts and 64 books are different queues.
    Also the longest prompt ever accepted, since it has to fit the queue once."""

    max_rows: int = 256
    """Rows that run at once; the engine's own `max_rows` is the harder limit."""

    page_watermark: float = 0.05
    """Share of the KV pages, in [0, 1), that must be free, or held by kept prefixes only, after a
    row has started beside others. Rows take pages as they grow; without something left to grow
    into, a row that starts on the last pages is preempted a moment later, and its prefill was for
    nothing."""

    max_displacements: int = 2
    """Times, >= 0, that a request gives up its row to one of a higher class; then it keeps it,
    unless rows run out of pages. Each time costs the prefill of all it had; this bounds the waste,
    and the starvation. 0: a class decides who starts, and nothing after that."""

    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; None leaves it to the context length."""

    max_completion_tokens: int | None = None
    """Largest `max_tokens` of a request; None leaves it to the context length."""

    prefill_chunk: int | None = None
    """Prompt tokens per step over all rows, and where prompts are cut. It bounds how long a decode
    cycle can be held up by somebody's prompt. None takes the engine's own."""

    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    """Policies by tenant; others get `default_tenant`."""

    default_tenant: TenantPolicy = TenantPolicy()

    ageing_s: float = 30.0
    """Seconds after a request of a higher class went before it that lift the first a tenant has
    waiting in a class by one, up to the highest: what bounds starvation."""

    max_token_gap_s: float | None = None
    """Most seconds that a step with prefill may take, as estimated, while some row decodes: how
    long a running stream may wait for its next tokens because of somebody's prompt. Prompts are
    then cut in smaller pieces, by time; a stream with a constraint needs two steps of the pipelined
    loop, so half of it is the bound while one runs. Prefill keeps `prefill_share` of the time even
    where that is longer: where both cannot hold, the share does (`scheduler.pace` says what is
    guaranteed). None: chunks are as long as `prefill_chunk` allows."""

    prefill_share: float = 0.25
    """Share of the device's time, in [0, 1], that prompts get at least while rows decode and
    prompts wait, under `max_token_gap_s`. With 0 they wait for as long as cycles alone exceed the
    gap; with 1 the gap bounds nothing."""

    depth: Depth = "auto"
    """Drafts per cycle; capped by what the engine offers and by each request's `depth_cap`."""

    cost_table: Callable[[EngineInfo], CostTable | None] | None = None
    """Gives what cycles of this engine cost when they were measured before, or None; asked once,
    when the engine has loaded. `auto` then chooses well from its first cycle on."""

    stream_buffer: int = 256
    """Unread tokens per stream at which its row is paused. It can be overshot by what is in
    flight when the limit is reached, at most two bursts."""

    slow_reader_timeout_s: float = 30.0
    """Seconds a paused stream may go unread before it is ended: a paused row holds pages that
    others wait for."""

    prefix_cache: bool = True
    """Keep prefixes that later requests can start from, in memory the engine has set aside
    (`EngineInfo.boundaries`) and in pages that no row needs. Never changes a token beyond what the
    engine promises of equal prefixes."""

    session_ttl_s: float = 600.0
    """Seconds after its last use for which a session's end is pinned."""

    max_sessions: int = 256
    """Sessions that are pinned at once; one more unpins one of the tenant most above its share, the
    one unused the longest. A pin is kept from ordinary eviction only: when a queued request or
    another session's end could not have room otherwise, pinned ends go too, least recently used
    first."""

    share_kept: bool = False
    """Keep prefixes and sessions of all tenants as if they were one's: the least recently used one
    goes, whoever left it. For tenants that start from each other's prefixes."""

    loop: LoopKind = "pipelined"
    """`pipelined` submits step n + 1 before it reads step n; `plain` waits for each step. Same
    tokens; plain is there to be read, and to compare with."""

    close_timeout_s: float = 30.0
    """Seconds `aclose` waits for the step that is running before it abandons the engine thread."""

    rate_window_s: float = 10.0
    """Seconds over which tokens per second are measured."""

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_queued_tokens", "max_rows", "max_sessions"):
            _at_least_one(name, getattr(self, name))
        _at_least_one("stream_buffer", self.stream_buffer)
        for name in ("max_prompt_tokens", "max_completion_tokens", "prefill_chunk"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        seconds = ("slow_reader_timeout_s", "session_ttl_s", "close_timeout_s", "rate_window_s")
        for name in (*seconds, "ageing_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0 seconds")
        if "other" in self.tenants:
            raise ValueError("tenants: 'other' is what statistics call those without a policy")
        if self.max_token_gap_s is not None and not self.max_token_gap_s > 0:
            raise ValueError("max_token_gap_s must be > 0 seconds")
        if not 0 <= self.prefill_share <= 1:
            raise ValueError("prefill_share must be in [0, 1]")
        if not 0 <= self.page_watermark < 1:
            raise ValueError("page_watermark must be in [0, 1)")
        if self.max_displacements < 0:
            raise ValueError("max_displacements must be >= 0")
        if self.depth != "auto" and not (
            isinstance(self.depth, int) and 0 <= self.depth <= MAX_DEPTH
        ):
            raise ValueError(f"depth must be 'auto' or 0 … {MAX_DEPTH}")
        if self.loop not in ("plain", "pipelined"):
            raise ValueError("loop must be 'plain' or 'pipelined'")

    def costs_of(self, info: EngineInfo) -> CostTable | None:
        """The cost table for this engine, if there is one."""
        return self.cost_table(info) if self.cost_table is not None else None


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be >= 1")
