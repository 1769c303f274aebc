"""Who makes a call, and which names are theirs. `service.guard` finds out; handlers ask here."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls."""

    tenant: str
    """"" for everybody, where no tokens are configured."""
    admin: bool


EVERYBODY: Final = Identity(tenant="", admin=True)
"""Who calls where no tokens are configured. The Admin service is then offered on loopback only."""

_caller: ContextVar[Identity] = ContextVar("caller")


def identity_of(context: Context) -> Identity:
    """Who makes the call that is being answered. Ask in its handler, or in a task of it.

    Raises LookupError outside of one, or for a service that is open to all.
    """
    return _caller.get()


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of one tenant among those of all.

    Inside the server the ids of requests and sessions bear their tenant's name, so that no look-up
    can meet another tenant's: there is no check that a new call could forget.
    """

    tenant: str

    def inside(self, name: str) -> str:
        """A client's id as the scheduler knows it."""
        return f"{self.tenant}/{name}" if self.tenant else name

    def outside(self, name: str) -> str | None:
        """The scheduler's id as this tenant knows it; None for another tenant's."""
        if not self.tenant:
            return name
        mine = f"{self.tenant}/"
        return name[len(mine) :] if name.startswith(mine) else None


def scope_of(context: Context) -> Scope:
    """Whose names a call may use. Raises LookupError like `identity_of`."""
    return Scope(identity_of(context).tenant)


def set_caller(identity: Identity) -> None:
    """The call that the current task answers is this caller's."""
    _caller.set(identity)
