"""Drives a `SchedulerCore` against a `FakeEngine` by hand, one step at a time, checking as it goes.

What is checked after every move: the core's books, the order and kinds of events, bounds on unread
tokens, and that no row that could decode was left out. `finish` checks that nothing is left, and
that each stream is what the request would have got alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.plan import SamplingParams, StepPlan
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.prefix import Yield
from scheduler.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Priority,
    QueueFullError,
    Refusal,
    Tokens,
)
from tests.scheduler.fake_engine import FakeEngine, expected_tokens, fake_logprobs

TICK_S = 0.01
"""Seconds per step on the bench's clock."""


def make_request(
    request_id: str = "r",
    *,
    prompt: Iterable[int] | int = 5,
    max_tokens: int = 10,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    **others: Any,
) -> GenerationRequest:
    """A request; an int `prompt` is its length, `others` are fields of `GenerationRequest`."""
    ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=ids,
        sampling=SamplingParams(seed=seed),
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        **others,
    )


class Multiples:
    """A constraint: token ids are multiples of `step`. Checks how it is used."""

    def __init__(self, step: int, vocab_size: int) -> None:
        self.step = step
        self.advanced: list[int] = []
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        bits[:vocab_size:step] = 1
        self._mask = np.packbits(bits, bitorder="little").view(np.uint32)
        self._vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"Multiples({self.step})"

    def fresh(self) -> Multiples:
        return Multiples(self.step, self._vocab_size)

    def mask(self, drafted: Values[int]) -> NDArray[np.uint32] | None:
        return None if any(token % self.step for token in drafted) else self._mask

    def advance(self, tokens: Values[int]) -> None:
        assert not any(token % self.step for token in tokens)
        self.advanced += tokens


def tokens_alone(request: GenerationRequest, vocab_size: int) -> list[int]:
    """What a request gets from a default `FakeEngine` when nothing interferes."""
    form = request.constraint
    assert form is None or isinstance(form, Multiples)
    return expected_tokens(
        request.prompt_ids,
        seed=request.sampling.seed,
        max_tokens=request.max_tokens,
        stop_ids=request.stop_ids,
        vocab_size=vocab_size,
        min_tokens=request.min_tokens,
        constraint=form and form.fresh(),
    )


class Stream:
    """What one client has received."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.unread = 0
        self.finished: Finished | None = None
        self.reads = True

    def push(self, event: Event) -> None:
        assert self.finished is None, f"{self.request.request_id}: {event} after Finished"
        if isinstance(event, Finished):
            self.finished = event
            return
        cap = self.request.depth_cap
        assert event.ids, "an empty burst"
        assert cap is None or event.drafted <= cap, f"drafted {event.drafted}, cap {cap}"
        self._check_logprobs(event)
        self.tokens += event.ids
        self.unread += len(event.ids)

    def _check_logprobs(self, event: Tokens) -> None:
        asked = self.request.logprobs
        assert event.logprobs == (None if asked is None else fake_logprobs(event.ids, asked))
        asked, prompt = self.request.prompt_logprobs, self.request.prompt_ids[1:]
        first = asked is not None and not self.tokens
        assert event.prompt_logprobs == (fake_logprobs(prompt, asked or 0) if first else None)

    def check(self, vocab_size: int) -> None:
        """The end of a stream agrees with the request alone."""
        assert self.finished is not None, f"{self.request.request_id} never ended"
        alone = tokens_alone(self.request, vocab_size)
        usage = self.finished.usage
        assert self.tokens == alone[: len(self.tokens)]
        assert usage.completion_tokens == len(self.tokens)
        assert usage.prompt_tokens == len(self.request.prompt_ids)
        assert usage.accepted_tokens <= usage.draft_tokens
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        assert usage.cycles <= max(0, len(self.tokens) - 1)
        form = self.request.constraint
        if isinstance(form, Multiples):
            assert form.advanced[: len(self.tokens)] == self.tokens
        assert usage.finished_at is not None
        if self.finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.tokens == alone
            stopped = self.tokens[-1] in self.request.stop_ids
            assert (self.finished.reason is FinishReason.STOP) == stopped


def decoding(plan: StepPlan) -> set[int]:
    """Rows that decode in a step, in either cohort."""
    return {row for batch in (plan.decode, plan.guided) if batch for row in batch.rows}


class Bench:
    """A core, an engine, a clock and the clients' streams."""

    def __init__(
        self, *, engine: FakeEngine, config: SchedulerConfig | None = None, in_flight: int = 2
    ) -> None:
        self.engine = engine
        self.config = config or SchedulerConfig()
        self.in_flight = in_flight
        self.core = SchedulerCore(info=engine.info, config=self.config, max_in_flight=in_flight)
        self.now = 0.0
        self.streams: dict[str, Stream] = {}
        self.live: dict[str, Stream] = {}
        self.outstanding: list[StepPlan] = []

    @property
    def displaced(self) -> int:
        """Rows that were freed for the sake of a higher class."""
        return self.core.statistics(self.now).preemptions["priority"]

    # --- moves -----------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> Stream:
        self.core.submit(request, self.now)
        stream = Stream(request)
        self.streams[request.request_id] = self.live[request.request_id] = stream
        self.core.integrity()
        return stream

    def submit_together(self, requests: Values[GenerationRequest]) -> list[Stream]:
        self.core.submit_together(requests, self.now)
        streams = [Stream(request) for request in requests]
        for stream in streams:
            self.streams[stream.request.request_id] = stream
            self.live[stream.request.request_id] = stream
        self.core.integrity()
        return streams

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        found = self.core.cancel(request_id, reason, self.now)
        self._deliver(self.core.take_events())
        self.core.integrity()
        return found

    def read(self, stream: Stream) -> None:
        if stream.unread and stream.finished is None:
            self.core.acknowledge(stream.request.request_id, stream.unread, self.now)
        stream.unread = 0
        self.core.integrity()

    def plan(self) -> StepPlan:
        """Plan, and submit unless it is empty."""
        ready = self._must_decode()
        displaced = self.displaced
        leaving = {row for row, s in self.core._rows.items() if s.leaving is not None}
        plan = self.core.plan(self.now)
        again = leaving & (decoding(plan) | {chunk.row for chunk in plan.prefill})
        assert not again, f"rows {again} are preempted and planned again"
        self._deliver(self.core.take_events())
        for stream in self.live.values():
            due = stream.request.deadline
            assert due is None or due > self.now, f"{stream.request.request_id} is past due"
        left_out = {row for row, stream in ready.items() if stream.finished is None}
        if self.displaced == displaced:
            self._check_left_out(left_out - decoding(plan), plan)
        if not plan.is_empty:
            self.engine.submit(plan)
            self.outstanding.append(plan)
        self.core.integrity()
        return plan

    def commit(self) -> None:
        result = self.engine.collect()
        self._deliver(self.core.commit(result, self.now))
        self.outstanding.pop(0)
        self.core.integrity()
        burst = self.in_flight * (self.engine.info.max_depth + 1)
        for stream in self.live.values():
            assert stream.unread < self.config.stream_buffer + burst, "the buffer ran over"

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        if len(self.outstanding) >= self.in_flight:
            self.commit()
        plan = self.plan()
        if plan.is_empty and not self.outstanding:
            self.core.integrity(idle=True)
            return False
        if plan.is_empty or len(self.outstanding) >= self.in_flight:
            self.commit()
        for stream in list(self.live.values()):
            if stream.reads:
                self.read(stream)
        self.now += TICK_S
        return True

    def run(self, steps: int = 100_000) -> int:
        """Step until idle; the number of steps."""
        for count in range(steps):
            if not self.step():
                return count
        raise AssertionError(f"still busy after {steps} steps")

    def finish(self) -> None:
        """Read everything, run to the end, and check that nothing is left."""
        for stream in self.live.values():
            stream.reads = True
            self.read(stream)
        self.run()
        assert self.core.is_empty, "something is left in the core"
        assert self.engine.rows == 0, "a row is left in the engine"
        statistics = self.core.statistics(self.now)
        kept = statistics.pages_cached
        assert (statistics.pages_used, statistics.preempted_waiting) == (kept, 0)
        assert set(self.engine.cache.boundaries) == {e.boundary for e in self.core.keeping.cache}
        assert sum(statistics.finished.values()) == statistics.submitted == len(self.streams)
        for stream in self.streams.values():
            stream.check(self.engine.info.vocab_size)
        self.flush()

    def flush(self) -> None:
        """Give up every prefix: nothing may be left then."""
        self.core.keeping.cache.clear("flush")
        self.run()
        statistics = self.core.statistics(self.now)
        assert statistics.pages_used == 0
        assert (statistics.entries, statistics.sessions) == (0, 0)
        assert not self.engine.cache.boundaries

    # --- checks ----------------------------------------------------------------------------------

    def _check_left_out(self, rows: set[int], plan: StepPlan) -> None:
        """A row that could decode does, unless it leaves or there are no pages for it and those
        before it; then nobody starts."""
        core = self.core
        left_out = [core._rows[row] for row in rows if row in core._rows]
        short = [s for s in left_out if s.leaving is None]
        for sequence in short:
            lack = core._memory.missing(sequence, sequence.reach(0))
            assert lack, f"row {sequence.row} could decode and was left out"
        if short:
            room = core.keeping.cache.can_make_room(core._memory.owed, most=Yield.AWAITED)
            assert not room, f"rows {rows} are owed pages that could be had"
            started = [chunk.row for chunk in plan.prefill if chunk.spec is not None]
            assert not started, f"rows {started} start while others have no page to grow into"

    def _must_decode(self) -> dict[int, Stream]:
        """Rows that have begun to stream, may go on, and whose reader keeps up."""
        ready = {}
        for request_id, stream in self.live.items():
            sequence = self.core._live[request_id]
            row = sequence.row
            if sequence.is_gone or sequence.prefilling or not sequence.started:
                continue  # it is computed again
            named = sum(row in decoding(plan) for plan in self.outstanding)
            named += sum(c.row == row and c.last for p in self.outstanding for c in p.prefill)
            more = len(stream.tokens) + named < stream.request.max_tokens
            more = more and not (stream.request.constraint and named)
            if stream.tokens and more and stream.unread < self.config.stream_buffer:
                ready[row] = stream
        return ready

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            self.streams[request_id].push(event)
            if isinstance(event, Finished):
                del self.live[request_id]


def small_engine(**options: int) -> FakeEngine:
    """Little of everything, so that bounds are met often."""
    defaults = {
        "boundaries": 10,
        "vocab_size": 60,
        "context_length": 96,
        "max_rows": 6,
        "pages": 60,
        "page_size": 4,
        "max_depth": 4,
    }
    return FakeEngine(**{**defaults, **options})  # type: ignore[arg-type]


SMALL = SchedulerConfig(
    max_queue=8,
    max_queued_tokens=150,
    prefill_chunk=16,
    stream_buffer=10,
    slow_reader_timeout_s=15 * TICK_S,
    session_ttl_s=60 * TICK_S,
    max_sessions=4,
)


TINY = replace(SMALL, page_watermark=0.0)
"""For pools that one request can fill: rows are preempted all the time."""


def random_prompt(rng: random.Random, streams: Iterable[Stream]) -> list[int]:
    """Fresh tokens; or one of a few beginnings, or what some stream has had so far (the next turn
    of a conversation), and fresh tokens after it."""
    fresh = [rng.randrange(60) for _ in range(rng.randint(1, 60 if rng.random() < 0.3 else 12))]
    kind, old = rng.random(), list(streams)
    if kind < 0.3:
        beginning = random.Random(rng.randrange(4))
        shared = [beginning.randrange(60) for _ in range(40)]
        return shared[: rng.choice([7, 16, 21, 35, 40])] + fresh[:12]
    if kind < 0.6 and old:
        stream = rng.choice(old[-8:])
        return [*stream.request.prompt_ids, *stream.tokens, *fresh[:6]][:60]
    return fresh


def random_request(
    rng: random.Random, number: int, now: float, streams: Iterable[Stream] = ()
) -> GenerationRequest:
    return make_request(
        f"r{number}",
        prompt=random_prompt(rng, streams),
        constraint=Multiples(rng.choice([2, 3]), 60) if rng.random() < 0.15 else None,
        session_id=f"s{rng.randrange(5)}" if rng.random() < 0.3 else None,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None] * 9 + [2]),
        max_tokens=rng.randint(1, rng.choice([2, 12, 36, 36])),
        seed=rng.randrange(2**64),
        stop_ids=tuple(rng.randrange(60) for _ in range(rng.choice([0, 0, 2]))),
        depth_cap=rng.choice([None, None, 0, 2]),
        deadline=now + rng.uniform(0, 0.6) if rng.random() < 0.15 else None,
    )


def samples(rng: random.Random, request: GenerationRequest) -> list[GenerationRequest]:
    """Some requests as groups of parallel samples."""
    count = rng.choice([1, 1, 1, 1, 1, 2, 4])
    if count == 1 or request.session_id:
        return [request]
    form = request.constraint
    assert form is None or isinstance(form, Multiples)
    name = request.request_id
    return [
        replace(
            request,
            request_id=f"{name}.{index}",
            group=name,
            constraint=form and form.fresh(),
            sampling=SamplingParams(seed=rng.randrange(2**64)),
        )
        for index in range(count)
    ]


def fuzz(
    *,
    seed: int,
    requests: int,
    in_flight: int,
    config: SchedulerConfig = SMALL,
    dress: Callable[[GenerationRequest], GenerationRequest] = lambda request: request,
    priorities: bool = False,
    **engine: int,
) -> Bench:
    """Random requests, cancels, deadlines and readers; raises when a check fails. `dress` may
    change each request. `priorities`: of random classes."""
    rng, classes = random.Random(seed), random.Random(seed)
    bench = Bench(engine=small_engine(**engine), config=config, in_flight=in_flight)
    waiting = [random_request(rng, 0, 0.0)]
    made = 1
    while made < requests or waiting:
        while made < requests and len(waiting) < 3:
            request = dress(random_request(rng, made, bench.now, bench.streams.values()))
            if priorities:
                request = replace(request, priority=classes.choice(list(Priority)))
            several = samples(rng, request)[: requests - made]
            waiting += several
            made += len(several)
        for request in list(waiting):
            if rng.random() < 0.5:
                try:
                    bench.submit(request).reads = rng.random() > 0.25
                    waiting.remove(request)
                except QueueFullError as refusal:
                    if refusal.reason is not Refusal.DEADLINE:
                        break
        if bench.live and rng.random() < 0.08:
            bench.cancel(rng.choice(list(bench.live)))
        if bench.live and rng.random() < 0.05:
            bench.read(rng.choice(list(bench.live.values())))
        if rng.random() < 0.03:
            bench.core.keeping.sessions.release(f"s{rng.randrange(5)}")
        if not bench.step():
            bench.now += TICK_S
    bench.finish()
    return bench
