"""Scenarios of `selfdraft simulate` from TOML files and options. Every key is checked; an error
names the key and its limit. Several files are merged, later ones over earlier ones, key by key;
assumptions add up.

    title, assumptions          what is shown above the numbers
    [run]                       duration_s, warmup_s, seed
    [fleet]                     machines, routing, attempts, reads_per_s, failures
    [machine]                   fields of `MachineSpec`
    [machine.memory]            sizes, from which pages and boundaries follow (`Memory`)
    [machine.costs]             fields of `MachineCosts`; widths and draft_s, or cost_table
    [machine.acceptance]        fields of `AcceptanceModel`
    [scheduler]                 fields of `SchedulerConfig`
    [load]                      kind = "open" or "chat", and fields of `Open` or `Chat`
    [objective]                 fields of `Objective`
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.request import Priority
from scheduler.simulation import (
    AcceptanceModel,
    Amount,
    Chat,
    Failure,
    MachineCosts,
    MachineSpec,
    Objective,
    Open,
    Scenario,
    TableCosts,
    TraceError,
    WidthCosts,
    read_trace,
)
from scheduler.simulation.costs import DecodeCosts
from scheduler.simulation.traces import Arrival
from service.config import SettingError
from service.costs import CostFile

T = TypeVar("T")
Table = dict[str, Any]

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A machine's memory for the model. ValueError names what does not fit."""

    working_set_gb: float
    """What the device may hold in all."""
    weights_gb: float
    kv_gb: float
    """For KV pages."""
    prefix_gb: float
    """For saved prefixes, their pages aside."""
    kv_bytes_per_token: int
    """Over all attention layers, MTP included."""
    row_bytes: int
    """Recurrent state of a row, and of a saved prefix."""
    transient_gb: float = 1.0
    """For what a prefill computes, and for the system."""

    def sizes(self, max_rows: int, page_size: int) -> tuple[int, int]:
        """Pages and boundaries."""
        parts = (self.weights_gb, self.kv_gb, self.prefix_gb, self.transient_gb)
        total = sum(parts) + max_rows * self.row_bytes / GB
        if total > self.working_set_gb:
            raise ValueError(
                f"weights, KV, prefixes, {max_rows} rows and transient need {total:.1f} GB; "
                f"working_set_gb is {self.working_set_gb:g}"
            )
        pages = int(self.kv_gb * GB / (self.kv_bytes_per_token * page_size))
        return pages, int(self.prefix_gb * GB / self.row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A scenario and how to look at it."""

    scenario: Scenario
    objective: Objective
    title: str = "simulation"
    assumptions: tuple[str, ...] = field(default=())


# --- files ---------------------------------------------------------------------------------------


def read_files(paths: Sequence[Path]) -> Table:
    """The files, merged. Raises SettingError."""
    merged: Table = {}
    for path in paths:
        content = _toml(path)
        costs = content.get("machine", {})
        costs = costs.get("costs", {}) if isinstance(costs, dict) else {}
        if isinstance(costs, dict) and isinstance(costs.get("cost_table"), str):
            costs["cost_table"] = str(path.parent / costs["cost_table"])
        load = content.get("load", {})
        if isinstance(load, dict) and isinstance(load.get("trace"), str):
            load["trace"] = str(path.parent / load["trace"])
        notes = [*_assumptions(merged), *_assumptions(content)]
        _merge(merged, content)
        if notes:
            merged["assumptions"] = notes
    return merged


def _assumptions(table: Table) -> list[Any]:
    """They add up over files. What is not a list is refused later."""
    found = table.get("assumptions", [])
    return found if isinstance(found, list) else [found]


def _toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingError("--scenario", f"cannot read {path}: {why}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingError("--scenario", f"{path}: not TOML ({error})") from error


def _merge(into: Table, other: Table) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def set_value(table: Table, key: str, value: object) -> None:
    """`set_value(table, "fleet.machines", 3)`; None changes nothing."""
    if value is None:
        return
    *parents, name = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[name] = value


# --- tables to values ----------------------------------------------------------------------------


def _built(cls: type[T], table: object, where: str) -> T:
    """A dataclass from a table whose keys are its fields. Raises SettingError."""
    if not isinstance(table, Mapping):
        raise SettingError(where, f"must be a table, not {table!r}")
    hints = get_type_hints(cls)
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(table) - names):
        known = ", ".join(sorted(names))
        raise SettingError(f"{where}.{unknown[0]}", f"no such key; there are {known}")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in table.items()}
    try:
        return cls(**values)
    except TypeError as error:
        missing = str(error).rpartition(": ")[2]
        raise SettingError(where, f"needs {missing}") from error
    except ValueError as error:
        raise SettingError(where, str(error)) from error


def _value(hint: Any, value: object, where: str) -> Any:
    """A value as a field's type wants it. Raises SettingError."""
    if get_origin(hint) in (Union, UnionType):
        return _one_of([arm for arm in get_args(hint) if arm is not NoneType], value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise SettingError(where, f"must be a list, not {value!r}")
        item = get_args(hint)[0]
        return tuple(_value(item, part, f"{where}[{n}]") for n, part in enumerate(value))
    if hint is Amount and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = {"median": value}
    if isinstance(hint, type) and is_dataclass(hint):
        return _built(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    if get_origin(hint) is not None and value in get_args(hint):  # a Literal
        return value
    name = getattr(hint, "__name__", str(hint))
    raise SettingError(where, f"must be of type {name}, not {value!r}")


def _one_of(arms: list[Any], value: object, where: str) -> Any:
    problem: SettingError | None = None
    for arm in arms:
        try:
            return _value(arm, value, where)
        except SettingError as error:
            problem = error
    assert problem is not None
    raise problem


def make_plan(table: Table) -> Plan:
    """Everything checked. Raises SettingError, CostTableError."""
    known = ("title", "assumptions", "run", "fleet", "machine", "scheduler", "load", "objective")
    if unknown := sorted(set(table) - set(known)):
        raise SettingError(unknown[0], f"no such key; there are {', '.join(known)}")
    fleet = _part(table, "fleet")
    failures = _value(tuple[Failure, ...], fleet.pop("failures", []), "fleet.failures")
    machine = _machine(_part(table, "machine"))
    settings = {**_part(table, "run"), **fleet}
    wanted = {"duration_s", "warmup_s", "seed", "machines", "routing", "attempts", "reads_per_s"}
    if unknown := sorted(set(settings) - wanted):
        where = "run" if unknown[0] in _part(table, "run") else "fleet"
        raise SettingError(f"{where}.{unknown[0]}", "no such key")
    hints = get_type_hints(Scenario)
    values = {
        name: _value(hints[name], value, f"{'fleet' if name in fleet else 'run'}.{name}")
        for name, value in settings.items()
    }
    load = _load(_part(table, "load"))
    scheduler = _scheduler(_part(table, "scheduler"))
    try:
        scenario = Scenario(
            machine=machine, load=load, scheduler=scheduler, failures=failures, **values
        )
        for failure in failures:
            if not 0 <= failure.machine < scenario.machines:
                raise ValueError(f"failures: there is no machine {failure.machine}")
    except ValueError as error:
        raise SettingError("scenario", str(error)) from error
    return Plan(
        scenario=scenario,
        objective=_built(Objective, _part(table, "objective"), "objective"),
        title=_value(str, table.get("title", "simulation"), "title"),
        assumptions=_value(tuple[str, ...], table.get("assumptions", []), "assumptions"),
    )


def _part(table: Table, name: str) -> Table:
    part = table.get(name, {})
    if not isinstance(part, dict):
        raise SettingError(name, f"must be a table, not {part!r}")
    return dict(part)


def _machine(table: Table) -> MachineSpec:
    costs, rates = _costs(_part(table, "costs"))
    acceptance = _part(table, "acceptance")
    if rates and "rates" not in acceptance:
        acceptance["rates"] = rates
    table = {k: v for k, v in table.items() if k not in ("costs", "acceptance")}
    memory = table.pop("memory", None)
    hints = get_type_hints(MachineSpec)
    names = set(hints) - {"costs", "acceptance"}
    if unknown := sorted(set(table) - names):
        known = ", ".join(sorted(names | {"costs", "acceptance", "memory"}))
        raise SettingError(f"machine.{unknown[0]}", f"no such key; there are {known}")
    values = {name: _value(hints[name], v, f"machine.{name}") for name, v in table.items()}
    model = _built(AcceptanceModel, acceptance, "machine.acceptance")
    sizes = None if memory is None else _built(Memory, memory, "machine.memory")
    try:
        spec = MachineSpec(costs=costs, acceptance=model, **values)
        if sizes is None:
            return spec
        pages, boundaries = sizes.sizes(spec.max_rows, spec.page_size)
        return replace(spec, pages=pages, boundaries=boundaries)
    except ValueError as error:
        raise SettingError("machine", str(error)) from error


def _costs(table: Table) -> tuple[MachineCosts, list[float]]:
    """Costs, and the acceptance that a cost file tells of."""
    where = "machine.costs"
    rates: list[float] = []
    decode: DecodeCosts
    if "cost_table" in table:
        path = Path(_value(str, table.pop("cost_table"), f"{where}.cost_table"))
        table.pop("widths", None)
        decode = TableCosts(CostFile.load(path).table)
        rates = json.loads(path.read_text(encoding="utf-8")).get("acceptance", [])
    elif "widths" in table:
        widths = table.pop("widths")
        pair = isinstance(widths, list) and all(
            isinstance(p, list) and len(p) == 2 and type(p[0]) is int for p in widths
        )
        if not pair:
            raise SettingError(f"{where}.widths", "must be a list of [positions, seconds]")
        draft = {
            name: _value(float, table.pop(name), f"{where}.{name}")
            for name in ("draft_s", "draft_row_s")
            if name in table
        }
        points = [(width, _value(float, s, f"{where}.widths")) for width, s in widths]
        try:
            decode = WidthCosts(points, **draft)
        except ValueError as error:
            raise SettingError(where, str(error)) from error
    else:
        raise SettingError(where, "needs widths, or a cost_table that selfdraft tune wrote")
    names = {f.name for f in fields(MachineCosts)} - {"decode"}
    if unknown := sorted(set(table) - names):
        raise SettingError(f"{where}.{unknown[0]}", f"no such key; there are {sorted(names)}")
    if "token_s" not in table:
        raise SettingError(f"{where}.token_s", "is missing: seconds per prompt token")
    values = {name: _value(float, value, f"{where}.{name}") for name, value in table.items()}
    try:
        return MachineCosts(decode=decode, **values), rates
    except ValueError as error:
        raise SettingError(where, str(error)) from error


def _scheduler(table: Table) -> SchedulerConfig:
    tenants = table.pop("tenants", {})
    if not isinstance(tenants, dict):
        raise SettingError("scheduler.tenants", "must be a table of tenants")
    policies = {
        name: _tenant(policy, f"scheduler.tenants.{name}") for name, policy in tenants.items()
    }
    default = _tenant(table.pop("default_tenant", {}), "scheduler.default_tenant")
    if "cost_table" in table:
        raise SettingError("scheduler.cost_table", "belongs into machine.costs")
    hints = get_type_hints(SchedulerConfig)
    if unknown := sorted(set(table) - set(hints)):
        known = ", ".join(sorted(hints))
        raise SettingError(f"scheduler.{unknown[0]}", f"no such key; there are {known}")
    values = {name: _value(hints[name], v, f"scheduler.{name}") for name, v in table.items()}
    try:
        return SchedulerConfig(tenants=policies, default_tenant=default, **values)
    except ValueError as error:
        raise SettingError("scheduler", str(error)) from error


def _tenant(table: object, where: str) -> TenantPolicy:
    if not isinstance(table, dict):
        raise SettingError(where, "must be a table")
    table = dict(table)
    if "max_priority" in table:
        name = str(table["max_priority"]).upper()
        if name not in Priority.__members__:
            known = ", ".join(p.lower() for p in Priority.__members__)
            raise SettingError(f"{where}.max_priority", f"must be one of {known}")
        table["max_priority"] = Priority[name]
    try:
        return TenantPolicy(**table)
    except (TypeError, ValueError) as error:
        raise SettingError(where, str(error)) from error


def _load(table: Table) -> Open | Chat:
    kind = table.pop("kind", "open")
    if kind not in ("open", "chat"):
        raise SettingError("load.kind", f"must be open or chat, not {kind!r}")
    if kind == "chat":
        return _built(Chat, table, "load")
    trace = table.pop("trace", None)
    found = _built(Open, table, "load")
    if trace is None:
        return found
    return Open(trace=read_trace_file(Path(str(trace))), shared_tokens=found.shared_tokens)


def read_trace_file(path: Path) -> tuple[Arrival, ...]:
    """Raises SettingError."""
    try:
        with path.open(encoding="utf-8") as lines:
            arrivals = tuple(read_trace(lines))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SettingError("--trace", f"cannot read {path}: {why}") from error
    except TraceError as error:
        raise SettingError("--trace", f"{path}, {error}") from error
    if not arrivals:
        raise SettingError("--trace", f"{path} holds no requests")
    return arrivals
