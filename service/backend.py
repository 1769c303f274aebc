"""What requests are served with, and whether they may come in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scheduler.loop import Scheduler
from service.errors import Reason, ServiceError
from service.text.grammar import Grammars
from service.text.tokenizer import Tokenizer


class State(StrEnum):
    """Phases of a server, in order; FAILED can follow any of them."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A loaded model: its scheduler, tokenizer and grammars, and the name it is served under."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    grammars: Grammars
    name: str


class Door:
    """The one place that knows whether requests may come in. Used on the event loop only."""

    def __init__(self, *, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._backend: Backend | None = None
        self._failure = ""
        self.state = State.LOADING

    def open(self, backend: Backend) -> None:
        """The model is loaded."""
        self._backend = backend
        self.state = State.SERVING

    def drain(self) -> None:
        """No new generations from here on."""
        if self.state is not State.FAILED:
            self.state = State.DRAINING

    def fail(self, why: str) -> None:
        """The engine is beyond use."""
        self._failure = why
        self.state = State.FAILED

    def enter(self) -> Backend:
        """The backend, for a new generation. Raises ServiceError with LOADING, DRAINING or
        ENGINE_FAILED."""
        backend = self.look()
        if self.state is State.DRAINING:
            raise ServiceError(
                Reason.DRAINING, "the server is shutting down", retry_after_s=self._retry_after_s
            )
        return backend

    def look(self) -> Backend:
        """The backend, for what runs already and for questions about the model. Raises
        ServiceError with LOADING or ENGINE_FAILED."""
        if self.state is State.FAILED:
            raise ServiceError(Reason.ENGINE_FAILED, f"the engine failed: {self._failure}")
        if self._backend is None:
            raise ServiceError(
                Reason.LOADING, "the model is loading", retry_after_s=self._retry_after_s
            )
        return self._backend
