"""What is kept for sessions, as RPCs show it."""

from __future__ import annotations

from selfdraft.v1 import selfdraft_pb2 as pb

from service.backend import Backend
from service.config import RequestLimits
from service.validation import Violations, check_id, check_known


def release_session(
    request: pb.ReleaseSessionRequest, backend: Backend, limits: RequestLimits
) -> pb.ReleaseSessionResponse:
    """Forgets one. Raises ServiceError with every violation at once."""
    complain = Violations()
    check_known(request, complain)
    check_id("session_id", request.session_id, complain, limits)
    complain.raise_found()
    released = backend.scheduler.release_session(request.session_id)
    return pb.ReleaseSessionResponse(released=released)


def list_sessions(
    request: pb.ListSessionsRequest, backend: Backend, now: float
) -> pb.ListSessionsResponse:
    """All of them; `now` on the scheduler's clock. Raises ServiceError for an unknown field."""
    complain = Violations()
    check_known(request, complain)
    complain.raise_found()
    return pb.ListSessionsResponse(
        sessions=[
            pb.Session(
                session_id=session.session_id,
                tokens=session.tokens,
                pages=session.pages,
                expires_in_seconds=max(session.expires_at - now, 0.0),
            )
            for session in backend.scheduler.sessions()
        ]
    )
