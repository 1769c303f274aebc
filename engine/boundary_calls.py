"""The engine's calls that move boundaries to and from files, apart from the steps it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine import boundary_file
from engine.boundary import BoundaryStore, PlannedBoundaries
from engine.cache import PagePool
from engine.checks import check_table
from engine.models.qwen3_5 import Qwen35Model
from engine.plan import EngineInfo, SavedPrefix

T = TypeVar("T")


class BoundaryCalls(ABC):
    """Part of `engine.runner.MLXEngine`, which has the state and the checks."""

    _boundaries: BoundaryStore
    _fingerprint: str
    _info: EngineInfo
    _model: Qwen35Model
    _pools: list[PagePool]

    @abstractmethod
    def _check_alive(self) -> None: ...

    @abstractmethod
    def _check_idle(self) -> None: ...

    @abstractmethod
    def _on_device(self, job: Callable[[], T]) -> T: ...

    def export_boundary(
        self, boundary: int, saved: SavedPrefix, pages: NDArray[np.int32], path: Path
    ) -> None:
        """Write a boundary and the pages of its prefix to a file. Nothing may be in flight.

        Raises ValueError for an unknown boundary and OSError as the file system does; a file is
        complete or absent.
        """
        self._check_idle()
        position, mtp = self._boundaries.facts().get(boundary, (0, False))
        if position == 0:
            raise ValueError(f"boundary {boundary} is unknown")
        if (len(saved.tokens), saved.mtp) != (position, mtp):
            raise ValueError(
                f"boundary {boundary} is at {position} with mtp={mtp}, "
                f"saved says {len(saved.tokens)} with mtp={saved.mtp}"
            )
        check_table(self._info, f"boundary {boundary}", pages, position)
        self._on_device(lambda: self._files().write(self._boundaries[boundary], saved, pages, path))

    def read_boundary(self, path: Path) -> SavedPrefix:
        """What a file holds. Raises ForeignFileError unless it is of this very model."""
        self._check_alive()
        return self._on_device(lambda: self._files().read(path))

    def import_boundary(self, boundary: int, pages: NDArray[np.int32], path: Path) -> None:
        """Load a file into `pages` and under a new boundary id. Nothing may be in flight.

        Raises ForeignFileError as `read_boundary` does, before anything is changed.
        """
        self._check_idle()
        facts = self._boundaries.facts()
        planned = PlannedBoundaries(facts, limit=self._info.boundaries, drafts=True)
        saved, arrays = self._on_device(lambda: self._files().load(path))
        planned.add(boundary, len(saved.tokens), mtp=saved.mtp)
        planned.finish()
        check_table(self._info, f"boundary {boundary}", pages, len(saved.tokens))
        placed = self._on_device(lambda: self._files().place(saved, arrays, pages))
        self._boundaries.add(boundary, placed)

    def _files(self) -> boundary_file.BoundaryFiles:
        if not self._fingerprint:
            self._fingerprint = boundary_file.fingerprint(self._model)
        count = self._model.attention_layers
        return boundary_file.BoundaryFiles(
            fingerprint=self._fingerprint,
            model=self._model,
            pools=self._pools[:count],
            mtp_pool=self._pools[count] if len(self._pools) > count else None,
        )
