"""A machine whose steps take made-up time, and a core that runs on it by virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.plan import PrefillChunk, StepPlan, StepResult
from scheduler.config import SchedulerConfig
from tests.scheduler.bench import Bench, decoding, make_request
from tests.scheduler.fake_engine import FakeEngine


def cycle(rows: int, depth: int) -> float:
    """The bundled model on two cores, about."""
    return 0.035 + 0.005 * rows * (depth + 1) + 0.003 * depth if rows else 0.0


def chunk(tokens: int, start: int) -> float:
    """The same: 450 tokens a second, slower with length."""
    return 0.005 + 0.0022 * tokens + 0.0001 * tokens * start / 1024


@dataclass(kw_only=True)
class Costs:
    """What steps take."""

    cycle: Callable[[int, int], float] = cycle
    chunk: Callable[[int, int], float] = chunk
    noise: float = 0.0
    """Standard deviation of log seconds."""
    compile_s: float = 0.0
    """What the first step of a chunk length or cohort shape takes on top."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    seen: set[Any] = field(default_factory=set)

    def seconds(self, plan: StepPlan) -> float:
        batches = [batch for batch in (plan.decode, plan.guided) if batch]
        spent = sum(self.cycle(len(batch.rows), batch.depth) for batch in batches)
        spent += sum(self.chunk(len(piece.tokens), piece.start) for piece in plan.prefill)
        spent *= self.rng.lognormvariate(0.0, self.noise)
        shapes = {(len(batch.rows), batch.depth) for batch in batches}
        shapes |= {len(piece.tokens) for piece in plan.prefill}  # type: ignore[misc]
        spent += self.compile_s * len(shapes - self.seen)
        self.seen |= shapes
        return spent


class Machine(FakeEngine):
    """A `FakeEngine` whose steps take what `costs` say, without sleeping."""

    def __init__(self, costs: Costs, **options: Any) -> None:
        super().__init__(**options)
        self.costs = costs

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self._results[-1] = replace(self._results[-1], device_s=self.costs.seconds(plan))

    @property
    def next_result(self) -> StepResult:
        return self._results[0]


@dataclass(frozen=True)
class Ran:
    """A step that has come back."""

    plan: StepPlan
    seconds: float
    at: float
    """When it was done."""

    @property
    def chunks(self) -> tuple[PrefillChunk, ...]:
        return self.plan.prefill

    @property
    def tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.chunks)

    @property
    def decoded(self) -> bool:
        return bool(decoding(self.plan))


class Paced(Bench):
    """A bench whose clock runs with the machine."""

    engine: Machine

    def __init__(
        self,
        costs: Costs | None = None,
        *,
        in_flight: int = 2,
        boundaries: int = 0,
        max_rows: int = 16,
        **config: Any,
    ) -> None:
        options: dict[str, Any] = {"depth": 0, "prefill_chunk": 64, "max_queue": 500, **config}
        machine = Machine(
            costs or Costs(),
            max_rows=max_rows,
            pages=2048,
            context_length=4096,
            boundaries=boundaries,
        )
        super().__init__(engine=machine, config=SchedulerConfig(**options), in_flight=in_flight)
        self.ran: list[Ran] = []

    def commit(self) -> None:
        plan, seconds = self.outstanding[0], self.engine.next_result.device_s
        self.now += seconds
        super().commit()
        self.ran.append(Ran(plan, seconds, self.now))

    def step(self) -> bool:
        if len(self.outstanding) >= self.in_flight:
            self.commit()
        plan = self.plan()
        if plan.is_empty and not self.outstanding:
            return False
        if plan.is_empty or len(self.outstanding) >= self.in_flight:
            self.commit()
        for name, stream in self.live.items():
            self.core.acknowledge(name, stream.unread, self.now)
            stream.unread = 0
        return True

    def load(self, *, streams: int = 4, books: int = 0, pages: int = 800, **options: Any) -> None:
        """Streams that decode for long, warm; then prompts of so many tokens."""
        for number in range(streams):
            name = f"stream{number}"
            self.submit(make_request(name, prompt=20 + number, max_tokens=3000, **options))
        self.until(lambda: all(stream.tokens for stream in self.streams.values()))
        for number in range(books):
            self.book(f"book{number}", pages, number)

    def book(self, name: str, length: int, seed: int = 0, **options: Any) -> None:
        rng = random.Random(seed)
        prompt = [rng.randrange(1000) for _ in range(length)]
        self.submit(make_request(name, prompt=prompt, max_tokens=2, **options))

    def done(self, *names: str) -> bool:
        """These have ended; without names, all but the streams."""
        wanted = names or [name for name in self.streams if not name.startswith("stream")]
        return all(self.streams[name].finished is not None for name in wanted)

    def until(self, done: Callable[[], bool], steps: int = 20_000) -> None:
        for _ in range(steps):
            if done():
                return
            assert self.step(), "nothing left to do"
        raise AssertionError(f"not done after {steps} steps")

    def first_token_after(self, name: str) -> float:
        """Seconds from a request's arrival to its first token, once it has ended."""
        finished = self.streams[name].finished
        assert finished is not None
        usage = finished.usage
        assert usage.first_token_at is not None
        return usage.first_token_at - usage.submitted_at
