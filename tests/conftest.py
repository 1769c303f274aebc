"""Shared by all tests.

MLX is imported first, so that no test that starts a server in this process can slip an OpenBLAS
in front of it: the bitwise tests are about MLX's own BLAS.
"""

import inspect
from collections.abc import Iterator

import mlx.core  # noqa: F401
import pytest
import sniffio


@pytest.fixture(autouse=True)
def no_event_loop_around_plain_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Commands that run a loop of their own may do so here, as in a process. The loop that the
    service's tests share leaves its name in sniffio, where that is installed (openai brings it)."""
    if inspect.iscoroutinefunction(request.function):
        yield
        return
    name = sniffio.current_async_library_cvar
    before = name.get()
    name.set(None)
    yield
    name.set(before)
