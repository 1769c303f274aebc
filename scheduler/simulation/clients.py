"""Who sends requests: an open loop that does not wait, or users who read, think and go on.

Open loop: requests come when the trace says so, whatever the service does. Closed loop: `users` of
a chat each send a turn, wait for its end, think for a while and send the next turn, with the whole
conversation before it, so a slow service gets fewer requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from scheduler.simulation.events import Timeline
from scheduler.simulation.fleet import Fleet
from scheduler.simulation.traces import Amount, Arrival, priority_of
from scheduler.simulation.work import Content, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A closed loop of chat users. ValueError names the field that is out of range."""

    users: int
    think_s: Amount = field(default_factory=lambda: Amount(median=45.0, p95=150.0))
    """From the end of an answer to the user's next message: reading, thinking, typing."""
    system_tokens: int = 400
    """System prompt, the same for everybody."""
    message_tokens: Amount = field(default_factory=lambda: Amount(median=40.0, p95=300.0))
    output_tokens: Amount = field(default_factory=lambda: Amount(median=200.0, p95=600.0))
    turns: Amount = field(default_factory=lambda: Amount(median=6.0, p95=20.0))
    """Of a conversation; then the user begins a new one."""
    most_context: int = 8192
    """Tokens of a conversation beyond which the user begins a new one."""
    max_tokens: int = 1024
    """Longest answer that is asked for."""
    sessions: bool = True
    """Requests name their conversation as `session_id`, so that its end is kept for the next."""
    tenants: int = 1
    """Users are spread over this many."""
    priority: str = "interactive"
    ramp_s: float = 60.0
    """Users come one by one in this time."""

    def __post_init__(self) -> None:
        for name in ("users", "tenants", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.system_tokens < 0:
            raise ValueError(f"system_tokens must be >= 0, not {self.system_tokens}")
        if not self.most_context > self.system_tokens:
            raise ValueError("most_context must be > system_tokens")
        if not self.ramp_s >= 0:
            raise ValueError(f"ramp_s must be >= 0, not {self.ramp_s}")
        priority_of(self.priority)


class Clients:
    """What every kind of load shares: works are made here and counted."""

    def __init__(
        self, *, fleet: Fleet, timeline: Timeline, rng: random.Random, reads_per_s: float | None
    ) -> None:
        self.works: list[Work] = []
        self.content = Content(rng)
        self.rng = rng
        self.timeline = timeline
        self._fleet = fleet
        self._reads_per_s = reads_per_s

    def send(self, work: Work) -> None:
        work.reads_per_s = self._reads_per_s
        self.works.append(work)
        self._fleet.submit(work)


class OpenLoop:
    """Sends what a trace says. A session's prompts go on from its conversation so far."""

    def __init__(
        self, clients: Clients, arrivals: Iterator[Arrival], *, shared_tokens: int = 0
    ) -> None:
        """`shared_tokens`: the beginning that all prompts share."""
        self._clients = clients
        self._arrivals = arrivals
        self._shared = clients.content.shared("system", shared_tokens) if shared_tokens else ()
        self._conversations: dict[str, tuple[int, ...]] = {}
        self._next()

    def _next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._clients.timeline.at(arrival.arrival_s, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._next()
        clients = self._clients
        now = clients.timeline.now
        before = self._shared
        if arrival.session is not None:
            before = self._conversations.get(arrival.session, before)
        before = before[: arrival.prompt_tokens - 1]
        prompt = before + clients.content.fresh(arrival.prompt_tokens - len(before))
        due = arrival.deadline_s
        clients.send(
            Work(
                serial=clients.content.serial(),
                arrived_at=now,
                prompt=prompt,
                output_tokens=arrival.output_tokens,
                max_tokens=arrival.output_tokens,
                session=arrival.session,
                priority=priority_of(arrival.priority),
                tenant=arrival.tenant,
                user=arrival.session or "",
                deadline=None if due is None else now + due,
                on_end=self._ended if arrival.session is not None else None,
            )
        )

    def _ended(self, work: Work) -> None:
        assert work.session is not None
        self._conversations[work.session] = work.prompt + tuple(work.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class _User:
    name: str
    tenant: str
    conversation: int = 0
    turns_left: int = 0
    text: tuple[int, ...] = ()


class ChatUsers:
    """The closed loop. Users who begin are spread over a conversation's turns, so that contexts of
    all ages are there soon; all of them begin with an empty one."""

    def __init__(self, clients: Clients, chat: Chat, *, until: float) -> None:
        """`until`: no new turns from this time on."""
        self._clients = clients
        self._chat = chat
        self._until = until
        rng = clients.rng
        for index in range(chat.users):
            user = _User(name=f"user-{index}", tenant=f"tenant-{index % chat.tenants}")
            self._begin(user)
            user.turns_left = rng.randint(1, user.turns_left)
            clients.timeline.at(rng.uniform(0, chat.ramp_s), partial(self._turn, user))

    def _begin(self, user: _User) -> None:
        user.conversation += 1
        user.turns_left = self._chat.turns.tokens(self._clients.rng)
        user.text = ()
        if self._chat.system_tokens:
            user.text = self._clients.content.shared("system", self._chat.system_tokens)

    def _turn(self, user: _User) -> None:
        chat, clients = self._chat, self._clients
        now = clients.timeline.now
        if now >= self._until:
            return
        rng = clients.rng
        user.text += clients.content.fresh(chat.message_tokens.tokens(rng))
        user.turns_left -= 1
        clients.send(
            Work(
                serial=clients.content.serial(),
                arrived_at=now,
                prompt=user.text,
                output_tokens=chat.output_tokens.tokens(rng),
                max_tokens=chat.max_tokens,
                session=f"{user.name}.{user.conversation}" if chat.sessions else None,
                priority=priority_of(chat.priority),
                tenant=user.tenant,
                user=user.name,
                on_end=partial(self._ended, user),
            )
        )

    def _ended(self, user: _User, work: Work) -> None:
        chat, clients = self._chat, self._clients
        user.text = work.prompt + tuple(work.tokens)
        if user.turns_left <= 0 or len(user.text) > chat.most_context:
            self._begin(user)
        pause = chat.think_s.sample(clients.rng)
        clients.timeline.at(clients.timeline.now + pause, partial(self._turn, user))
