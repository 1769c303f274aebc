"""Cost tables on disk: what a decode cycle takes at (rows, depth), by model and machine.

`selfdraft tune` writes them; `serve --cost-table auto` looks for one in a per-user cache folder
under the fingerprint of machine and model, and on a clean stop keeps there what its depth
controller has learnt, so a second start is a good one even where nobody ever tuned. A table given
as a file is the operator's: it is read, must fit, and is never written.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import platformdirs

from engine.blas import cores
from engine.plan import EngineInfo
from scheduler.costs import CostTable
from service.logs import Logger
from service.whole import write_whole

FORMAT: Final = 1
"""Version of the file; others are refused."""

Choice = Literal["auto", "off"] | Path
"""Where a server's cost table comes from."""
Fingerprint = dict[str, dict[str, str | int]]


class CostTableError(Exception):
    """A cost table cannot be read, or is of another machine or model; the text says which."""


def fingerprint(info: EngineInfo) -> Fingerprint:
    """What a cycle's cost depends on, besides rows and depth."""
    try:
        mlx = version("mlx")
    except PackageNotFoundError:
        mlx = "unknown"
    return {
        "machine": {
            "device": info.device,
            "cores": cores(),
            "mlx": mlx,
            "blas": info.blas,
            "os": f"{platform.system()} {platform.machine()}",
        },
        "model": {
            "family": info.family,
            "layers": info.layers,
            "mtp_layers": info.mtp_layers,
            "vocab_size": info.vocab_size,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "parameters": info.parameters,
            "weight_bytes": info.weight_bytes,
        },
    }


def difference(stored: Fingerprint, here: Fingerprint) -> str | None:
    """The first field in which two fingerprints differ, with both values; None when they agree."""
    for part, fields in here.items():
        for name, value in fields.items():
            other = stored.get(part, {}).get(name)
            if other != value:
                return f"{part}.{name} is {other!r} in the table and {value!r} here"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """A cost table with its origin."""

    fingerprint: Fingerprint
    table: CostTable
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else a person may want to know: spreads, acceptance. Not read back by the service."""

    def save(self, path: Path) -> None:
        """Write the whole file or nothing. Raises OSError."""
        costs = [
            {"rows": rows, "depth": depth, "seconds": seconds}
            for (rows, depth), seconds in sorted(self.table.seconds.items())
        ]
        content = {
            "format": FORMAT,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "fingerprint": self.fingerprint,
            "deviation": self.table.deviation,
            "costs": costs,
            **self.extra,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostFile:
        """Raises CostTableError, naming the file and what is wrong with it."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise CostTableError(f"cost table {path}: {why}") from error
        except json.JSONDecodeError as error:
            raise CostTableError(f"cost table {path}: not JSON ({error})") from error
        try:
            return cls._parsed(content)
        except ValueError as error:
            raise CostTableError(f"cost table {path}: {error}") from error

    @classmethod
    def _parsed(cls, content: Any) -> CostFile:
        if not isinstance(content, dict):
            raise ValueError("must be a JSON object")
        if content.get("format") != FORMAT:
            raise ValueError(f"format: must be {FORMAT}, not {content.get('format')!r}")
        mark, costs = content.get("fingerprint"), content.get("costs")
        if not isinstance(mark, dict) or not all(isinstance(v, dict) for v in mark.values()):
            raise ValueError("fingerprint: must be an object of objects")
        if not isinstance(costs, list):
            raise ValueError("costs: must be a list")
        seconds = {}
        for index, entry in enumerate(costs):
            where = f"costs[{index}]"
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: must be an object")
            for name, kinds in (("rows", int), ("depth", int), ("seconds", (int, float))):
                value = entry.get(name)
                if isinstance(value, bool) or not isinstance(value, kinds):
                    raise ValueError(f"{where}.{name}: must be a number, not {value!r}")
            seconds[entry["rows"], entry["depth"]] = float(entry["seconds"])
        deviation = content.get("deviation")
        if isinstance(deviation, bool) or not isinstance(deviation, (int, float)):
            raise ValueError(f"deviation: must be a number, not {deviation!r}")
        return cls(fingerprint=mark, table=CostTable(seconds=seconds, deviation=float(deviation)))


def cache_path(mark: Fingerprint) -> Path:
    """Where the table of this machine and model is kept for this user."""
    digest = hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("selfdraft") / "costs" / f"{digest}.json"


class CostSource:
    """The cost table of one server: `check` when the engine has loaded, `table` for the scheduler,
    `keep` after a clean stop."""

    def __init__(self, choice: Choice, logger: Logger) -> None:
        """Raises CostTableError when a file was given and cannot be read: before the model loads,
        which takes longer."""
        self._choice = choice
        self._logger = logger
        self._file = CostFile.load(choice) if isinstance(choice, Path) else None

    def check(self, info: EngineInfo) -> None:
        """Find or compare the table. Raises CostTableError when a file was given and is of another
        machine or model; what `auto` finds and cannot use is ignored with one log line."""
        here = fingerprint(info)
        if isinstance(self._choice, Path):
            assert self._file is not None
            if found := difference(self._file.fingerprint, here):
                raise CostTableError(f"cost table {self._choice}: {found}")
        elif self._choice == "auto":
            path = cache_path(here)
            try:
                stored = CostFile.load(path) if path.exists() else None
                if stored is not None and (found := difference(stored.fingerprint, here)):
                    raise CostTableError(f"cost table {path}: {found}")
                self._file = stored
            except CostTableError as error:
                self._logger.warning("cost table ignored", reason=str(error))

    def table(self, info: EngineInfo) -> CostTable | None:
        """For `SchedulerConfig.cost_table`."""
        return self._file.table if self._file is not None else None

    def keep(self, info: EngineInfo, learnt: Mapping[tuple[int, int], float]) -> None:
        """With `auto`: save what the depth controller knows now, over what was stored. A disk that
        does not take it costs a log line, not the stop."""
        found = {point: s for point, s in learnt.items() if math.isfinite(s) and s > 0}
        if self._choice != "auto" or not found:
            return
        mark = fingerprint(info)
        before = self._file.table.seconds if self._file is not None else {}
        table = CostTable(seconds={**before, **found})
        path = cache_path(mark)
        try:
            CostFile(fingerprint=mark, table=table, extra={"source": "serve"}).save(path)
        except OSError as error:
            self._logger.warning("cost table not saved", path=str(path), reason=error.strerror)
