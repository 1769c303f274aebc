"""The engine as the loop sees it: built, run and closed on the one thread it lives on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.plan import Engine, EngineInfo, SavedPrefix, StepPlan, StepResult
from scheduler.keeping import Export
from scheduler.prefix import Entry
from scheduler.thread import OwnerThread


class EngineThread:
    """Every method but `abandon` waits for the thread and raises what the engine does.

    `on_failure` is told, on the thread, what closing the engine raised.
    """

    def __init__(
        self, *, factory: Callable[[], Engine], on_failure: Callable[[Exception], None]
    ) -> None:
        self._factory = factory
        self._on_failure = on_failure
        self._engine: Engine | None = None
        self._thread = OwnerThread("engine")

    async def load(self) -> tuple[EngineInfo, int]:
        """Build the engine; returns what it is and how many steps it takes in flight."""
        return await self._thread.call(self._load)

    async def submit(self, plan: StepPlan) -> None:
        await self._thread.call(self._submit, plan)

    async def collect(self) -> StepResult:
        """The result of the oldest step in flight."""
        return await self._thread.call(self._collect)

    async def exchange(self, plan: StepPlan, *, collect: bool) -> StepResult | None:
        """Submit `plan` unless it is empty; then the oldest result, if `collect`. One hop."""
        return await self._thread.call(self._exchange, plan, collect)

    async def export_boundary(self, what: Export, path: Path) -> None:
        await self._thread.call(self._export, what, path)

    async def read_boundary(self, path: Path) -> SavedPrefix:
        return await self._thread.call(self._read, path)

    async def import_boundary(self, entry: Entry, path: Path) -> None:
        await self._thread.call(self._import, entry, path)

    async def close(self) -> None:
        """Close the engine, end the thread, and wait for both."""
        await self._thread.call(self._unload)
        self._thread.stop()
        await self._thread.join()

    def abandon(self) -> None:
        """Nobody waits for the thread any more; it unloads when it gets there."""
        self._thread.post(self._unload)
        self._thread.stop()

    # --- on the thread ---------------------------------------------------------------------------

    def _load(self) -> tuple[EngineInfo, int]:
        self._engine = self._factory()
        return self._engine.info, self._engine.max_in_flight

    def _submit(self, plan: StepPlan) -> None:
        assert self._engine is not None
        self._engine.submit(plan)

    def _collect(self) -> StepResult:
        assert self._engine is not None
        return self._engine.collect()

    def _exchange(self, plan: StepPlan, collect: bool) -> StepResult | None:
        if not plan.is_empty:
            self._submit(plan)
        return self._collect() if collect else None

    def _export(self, what: Export, path: Path) -> None:
        assert self._engine is not None
        self._engine.export_boundary(what.boundary, what.saved, what.pages, path)

    def _read(self, path: Path) -> SavedPrefix:
        assert self._engine is not None
        return self._engine.read_boundary(path)

    def _import(self, entry: Entry, path: Path) -> None:
        assert self._engine is not None
        self._engine.import_boundary(entry.boundary, entry.pages, path)

    def _unload(self) -> None:
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            self._on_failure(error)
