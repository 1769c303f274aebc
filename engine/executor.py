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
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import mlx.core as mx

T = TypeVar("T")


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


class Executor:
    """A daemon thread with a queue of jobs, run in order. Daemon: a wedged device must not keep
    the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()
        self.stream: mx.Stream = self.call(lambda: mx.default_stream(mx.default_device()))

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
        if self._thread.is_alive():
            self._jobs.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        while (pending := self._jobs.get()) is not None:
            pending.run()
            del pending
        mx.synchronize()
        mx.clear_streams()  # or the process aborts at exit
