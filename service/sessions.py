"""What is kept for sessions, as RPCs show it."""

from __future__ import annotations

from selfdraft.v1 import selfdraft_pb2 as pb

from service.auth import Scope
from service.backend import Backend
from service.config import RequestLimits
from service.validation import Violations, check_id, check_known


def release_session(
    request: pb.ReleaseSessionRequest, backend: Backend, limits: RequestLimits, scope: Scope
) -> pb.ReleaseSessionResponse:
    """Forgets one of the caller's. Raises ServiceError with every violation at once."""
    complain = Violations()
    check_known(request, complain)
    check_id("session_id", request.session_id, complain, limits)
    complain.raise_found()
    released = backend.scheduler.release_session(scope.inside(request.session_id))
    return pb.ReleaseSessionResponse(released=released)


def list_sessions(
    request: pb.ListSessionsRequest, backend: Backend, now: float, scope: Scope
) -> pb.ListSessionsResponse:
    """All of the caller's; `now` on the scheduler's clock. Raises ServiceError for an unknown
    field."""
    complain = Violations()
    check_known(request, complain)
    complain.raise_found()
    return pb.ListSessionsResponse(
        sessions=[
            pb.Session(
                session_id=name,
                tokens=session.tokens,
                pages=session.pages,
                expires_in_seconds=max(session.expires_at - now, 0.0),
            )
            for session in backend.scheduler.sessions()
            if (name := scope.outside(session.session_id)) is not None
        ]
    )
