"""Fixtures of the deployment tests: those of the service tests, which also run servers here."""

from tests.service.conftest import anyio_backend, one_event_loop

__all__ = ["anyio_backend", "one_event_loop"]
