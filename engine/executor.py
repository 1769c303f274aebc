"""The thread that evaluates: graphs are built elsewhere while it keeps the device busy.

Handing a graph to the device takes the host about as long as running it: on a CPU `mx.async_eval`
returns when the work is nearly done, on CUDA encoding some thousand small kernels is the larger
part of a step. Both happen without Python's lock. So one thread does nothing else, step after step
without a gap, and the caller's thread builds the next graph (Python's share, a quarter of a step)
and reads results meanwhile.

Rules that make this safe. Every array lives on the executor's stream: builders work under
`mx.stream(executor.stream)`. Builders never evaluate; they read nothing of an array but its shape
and type, which do not change. Steps are evaluated in order, each after the one before is done, so
that a step finds nobody else holding the buffers it updates in place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import mlx.core as mx

T = TypeVar("T")


PATIENCE_S = 10.0
"""How long the end of the process waits for a job that is running."""


class Pending(Generic[T]):
    """The outcome of a job, some time."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._done = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the executor's thread."""
        job, self._job = self._job, None
        assert job is not None
        try:
            self._value = job()
        except BaseException as error:
            self._error = error
        del job  # what it holds must not outlive it: buffers are updated in place
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> T:
        """Blocks; returns or raises what the job did."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


Jobs = SimpleQueue[Pending[Any] | None]


class Executor:
    """A daemon thread with a queue of jobs, run in order; it ends with `stop`, with the last
    reference to the executor, or with the process. Daemon: a wedged device must not keep the
    process for longer than `PATIENCE_S`."""

    def __init__(self) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name="device", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _finish, self._jobs, self._thread)
        device = mx.default_device()
        self.stream: mx.Stream = self.call(lambda: _settle(device))

    def post(self, job: Callable[[], T]) -> Pending[T]:
        """Run `job` after everything posted before it."""
        pending = Pending(job)
        self._jobs.put(pending)
        return pending

    def call(self, job: Callable[[], T]) -> T:
        """Run `job` and wait. On the executor's own thread: at once."""
        if threading.current_thread() is self._thread:
            return job()
        return self.post(job).wait()

    def stop(self) -> None:
        """End the thread after the jobs already posted, and wait for it; idempotent."""
        self._end()


def _run(jobs: Jobs) -> None:
    while (pending := jobs.get()) is not None:
        pending.run()
        del pending
    mx.synchronize()
    mx.clear_streams()  # or the process aborts at exit


def _finish(jobs: Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join(PATIENCE_S)


def _settle(device: mx.Device) -> mx.Stream:
    """Give this thread the device of the one that made it; returns its stream there."""
    mx.set_default_device(device)
    return mx.default_stream(device)
