"""Every reason an engine refuses to load, as a closed set under `EngineError`.

Faults of a running engine are `engine.plan.EngineFailedError` and `RowResult.fault`; these here are
raised before the first step, while a person is still watching the log. Each message names what is
wrong, where, and what would put it right.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything raised while an engine is configured, checked or loaded."""


class ConfigError(EngineError):
    """A setting of ours, or a key of a checkpoint's `config.json`, is missing or out of range.

    `field` is the setting's name (or the key's path in `config.json`), `limit` what it must be.
    """

    def __init__(self, field: str, limit: str, *, where: str = "engine config") -> None:
        super().__init__(f"{where}: {field}: {limit}")
        self.field = field
        self.limit = limit
        self.where = where


class CheckpointError(EngineError):
    """A checkpoint folder cannot be loaded as it stands.

    `where` is the file or folder, `tensors` the names concerned (canonical where the fault is in
    the set of tensors, as stored where it is in a file), at most a handful.
    """

    def __init__(self, where: object, what: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(f"{where}: {what}")
        self.where = str(where)
        self.what = what
        self.tensors = tensors


class BudgetError(EngineError):
    """What must be resident does not fit the device. `change` names the setting to change, with the
    value that would fit where there is one."""

    def __init__(self, what: str, *, change: str) -> None:
        super().__init__(f"{what}; {change}")
        self.what = what
        self.change = change
