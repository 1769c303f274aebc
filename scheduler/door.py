"""The door: may this request, or these samples of one, wait here; if not, when is it worth asking
again?

Where tenants have policies, the last eighth of the queue, in requests and in tokens, is kept for
those that have less waiting than their share of it by weight (all others are one, as in
`scheduler.shares`, whether or not they have anything): one tenant's flood does not shut the door on
everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values
from math import ceil, fsum, inf
from typing import Final

from scheduler.config import SchedulerConfig
from scheduler.pages import PageTables
from scheduler.queue import WaitingQueue
from scheduler.request import GenerationRequest, InvalidRequestError, QueueFullError, Refusal
from scheduler.sequence import Sequence
from scheduler.statistics import Meter
from scheduler.throughput import Estimate, Throughput, Waits, own_turn

RETRY_BOUNDS_S: Final = (0.1, 60.0)
"""Retry delays are clamped to this."""


class Door:
    """Keeps the queue's bounds, over state that `SchedulerCore` owns."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        chunk: int,
        queue: WaitingQueue,
        rows: Mapping[int, Sequence],
        tables: PageTables,
        meter: Meter,
        throughput: Throughput,
    ) -> None:
        self._config = config
        self._chunk = chunk
        self._queue = queue
        self._rows = rows
        self._tables = tables
        self._meter = meter
        self._throughput = throughput
        policies = (*config.tenants.values(), config.default_tenant)
        self._weights = fsum(policy.weight for policy in policies)

    def fits(self, request: GenerationRequest, prompt_tokens: int, count: int) -> None:
        """Raises InvalidRequestError when its tenant may never have such a prompt, or `count` of
        them at once."""
        config, policy = self._config, self._queue.tenants.policy(request.tenant)
        most, where = config.max_queued_tokens, "max_queued_tokens"
        if policy.max_queued_tokens is not None and policy.max_queued_tokens < most:
            most, where = policy.max_queued_tokens, "max_queued_tokens of the tenant"
        if prompt_tokens > most:
            message = f"{prompt_tokens} tokens; the limit is {most} ({where})"
            raise InvalidRequestError("prompt_ids", message)
        if count * prompt_tokens > most:
            tokens = f"{count} times {prompt_tokens} prompt tokens"
            raise InvalidRequestError("n", f"{tokens}; the limit is {most} ({where})")
        if count > config.max_queue:
            message = f"{count} sequences; the limit is {config.max_queue} (max_queue)"
            raise InvalidRequestError("n", message)

    def refusal(
        self, requests: Values[GenerationRequest], prompt_tokens: int, now: float
    ) -> QueueFullError | None:
        """Why these, of one tenant and prompt, may not wait, with a delay from measured throughput;
        None if they may. They are let in or refused together: what holds is what the last of them
        would meet."""
        last, before = requests[-1], requests[:-1]
        return (
            self._requests(last.tenant, now, len(before))
            or self._tokens(last.tenant, prompt_tokens, now, len(before))
            or self._tenant(last.tenant, prompt_tokens * len(requests), now)
            or self._deadline(before, last, prompt_tokens, now)
        )

    def _kept(self, name: str, waiting: Mapping[str, int], most: int, more: int) -> int:
        """How much of the queue is not for this tenant now, which has `more` before the one that
        counts. Who has nothing there yet is let in, or samples of many tokens would never be."""
        tenants = self._queue.tenants
        share = most * tenants.policy(name).weight / self._weights
        own = waiting.get(tenants.label(name), 0)
        beyond = bool(self._config.tenants) and bool(own) and own + more >= share
        return most // 8 if beyond else 0

    def _requests(self, name: str, now: float, before: int) -> QueueFullError | None:
        most = self._config.max_queue
        kept = self._kept(name, self._queue.requests_of, most, before)
        leaving = len(self._queue) + before + 1 - (most - kept)
        if leaving <= 0:
            return None
        text = f"max_queue ({most} requests{_for_others(kept)})"
        return self._refuse(Refusal.MAX_QUEUE, text, leaving if kept or before else 1, now)

    def _tokens(
        self, name: str, prompt_tokens: int, now: float, before: int
    ) -> QueueFullError | None:
        most, more = self._config.max_queued_tokens, before * prompt_tokens
        kept = self._kept(name, self._queue.tokens_of, most, more)
        excess = self._queue.tokens + more + prompt_tokens - (most - kept)
        if excess <= 0:
            return None
        leaving = ceil(excess / self._queue.tokens * len(self._queue))
        text = f"max_queued_tokens ({most} prompt tokens{_for_others(kept)})"
        return self._refuse(Refusal.MAX_QUEUED_TOKENS, text, leaving, now)

    def _tenant(self, name: str, prompt_tokens: int, now: float) -> QueueFullError | None:
        """`prompt_tokens`: of all that ask."""
        most = self._queue.tenants.policy(name).max_queued_tokens
        tenant = self._queue.tenants.find(name)
        waiting = tenant.tokens if tenant is not None else 0
        if most is None or waiting + prompt_tokens <= most:
            return None
        # Its requests leave among everybody's, and no faster than its rows end.
        part = (waiting + prompt_tokens - most) / waiting
        own = ceil(part * tenant.queued) if tenant is not None else 0
        text = f"max_queued_tokens of the tenant ({most} prompt tokens)"
        refusal = self._refuse(
            Refusal.TENANT_QUEUED_TOKENS, text, ceil(part * len(self._queue)), now
        )
        own_s = self._own_turn(name, own - 1, now).likely
        refusal.retry_after_s = _clamped(max(refusal.retry_after_s, own_s))
        return refusal

    def _deadline(
        self,
        before: Values[GenerationRequest],
        request: GenerationRequest,
        prompt_tokens: int,
        now: float,
    ) -> QueueFullError | None:
        if request.deadline is None or request.deadline <= now:
            return None  # the latter ends with DEADLINE, as promised
        # Of samples the first one prefills for those that may start from what it leaves.
        shared = [n > 0 and _restores(other) for n, other in enumerate(before)]
        work = sum(1 if follows else prompt_tokens for follows in shared)
        left = request.deadline - now
        starts_in = self.starts_in(request, now, before=len(before), work=work)
        if starts_in.least <= left:
            return None
        likely = starts_in.likely
        text = f"deadline ({left:.1f} s are left; it would start in about {likely:.1f} s)"
        return QueueFullError(Refusal.DEADLINE, text, _clamped(likely - left))

    def starts_in(
        self, request: GenerationRequest, now: float, *, before: int = 0, work: int = 0
    ) -> Estimate:
        """When this request would start if it came now, after `before` more of its tenant's, with
        `work` tokens to prefill in all. 0 when at the next plan, or when too little was measured.
        Its tenant's own `max_rows` is reckoned with; that those of others keep them from going
        before it is not."""
        own = self._own_turn(
            request.tenant, before + self._queue.own_ahead(request.tenant, request.priority), now
        )
        everybody = self._turn(request, before, work)
        return Estimate(
            max(own.likely, everybody.likely),
            max(own.least, everybody.least),
        )

    def _own_turn(self, name: str, ahead: int, now: float) -> Estimate:
        """When a tenant's request would start if only its own rows counted."""
        tenant = self._queue.tenants.find(name)
        if tenant is None or tenant.policy.max_rows is None:
            return Estimate(0.0, 0.0)
        rows = [s for s in self._rows.values() if s.request.tenant == name]
        held = [inf if s.is_gone else now - (s.started_at or now) for s in rows]
        return own_turn(tenant.row_times, held, most=tenant.policy.max_rows, ahead=max(ahead, 0))

    def _turn(self, request: GenerationRequest, before: int, work: int) -> Estimate:
        """When it would start as far as everybody's share goes."""
        ahead, tokens = self._queue.ahead(
            request.tenant, request.priority, generated=self._meter.tokens_per_request
        )
        ahead, tokens = ahead + before, tokens + work
        free = self._tables.free_slots
        if self._throughput.waits is Waits.ROOM and len(self._queue):
            free = 0  # slots that pages do not suffice for
        free += sum(self._yields(s, request) for s in self._rows.values())
        begun = sum(len(s.prompt) - s.cursor for s in self._rows.values() if s.cause is None)
        if begun + tokens < self._chunk:
            begun = tokens = 0  # one step takes them, and begins with this one
        starts = max(0.0, ahead + 1 - free)
        return self._throughput.seconds(tokens=tokens, starts=starts, begun=begun)

    def _yields(self, sequence: Sequence, request: GenerationRequest) -> bool:
        """Its row is given back in a moment, or would be for this request."""
        mine = self._queue.priority_of(request.tenant, request.priority)
        may = sequence.displaced < self._config.max_displacements
        return sequence.is_gone or (may and sequence.priority < mine)

    def _refuse(self, reason: Refusal, limit: str, leaving: int, now: float) -> QueueFullError:
        """`leaving` requests must leave the queue first."""
        return QueueFullError(
            reason, limit, _clamped(leaving * self._meter.seconds_per_request(now))
        )


def _restores(request: GenerationRequest) -> bool:
    """It may start from a saved prefix."""
    return request.reuse_prefix and request.prompt_logprobs is None


def _for_others(kept: int) -> str:
    return f", the last {kept} for tenants below their share" if kept else ""


def _clamped(seconds: float) -> float:
    low, high = RETRY_BOUNDS_S
    return min(max(seconds, low), high)
