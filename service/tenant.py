"""Tenants: whose account a call goes on, and what an operator lets each have."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final

from scheduler.config import TenantPolicy
from scheduler.request import Priority
from service.auth import Context, identity_of
from service.config import SettingError
from service.errors import Reason, ServiceError, Violation, invalid

TENANT_KEY: Final = "selfdraft-tenant"
"""Name of the call's metadata that holds its tenant."""

MAX_TENANTS: Final = 256
"""Policies in a file. Each has a series of metrics."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_RULE: Final = "must be 1 … 64 characters of A-Z a-z 0-9 . _ -"


def tenant_of(context: Context) -> str:
    """The tenant that a call is on account of; "" when there is none.

    It is the caller's own where tokens are configured; else what the client says is believed.
    Raises ServiceError: INVALID_ARGUMENT, or PERMISSION_DENIED for a name that is not the caller's.
    """
    mine, named = identity_of(context).tenant, _named(context)
    if mine and named and named != mine:
        raise ServiceError(Reason.PERMISSION_DENIED, f"the token is not of tenant {named}")
    return mine or named


def _named(context: Context) -> str:
    """What the call's metadata says; "" when it names nobody."""
    metadata: Any = context.invocation_metadata() or ()
    names = [value for key, value in metadata if key == TENANT_KEY]
    if not names:
        return ""
    if len(names) > 1:
        raise invalid([Violation(TENANT_KEY, f"must be given once, is given {len(names)} times")])
    if not isinstance(names[0], str) or not _NAME.fullmatch(names[0]):
        raise invalid([Violation(TENANT_KEY, _NAME_RULE)])
    return names[0]


def read_tenants(text: str) -> dict[str, Any]:
    """The scheduler's `tenants` and `default_tenant` from TOML:

        [default]              # every tenant that is not named
        max_queued_tokens = 20000

        [tenants.search]
        weight = 4.0           # share of served tokens and of kept prefixes, relative to others'
        max_rows = 8
        max_queued_tokens = 100000
        max_sessions = 20
        max_priority = "default"   # batch, default or interactive

    What is absent takes the default of `TenantPolicy`. Raises SettingError naming the key and its
    limit; unknown keys are errors.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError("tenants", f"the file is not TOML: {error}") from error
    _known("", found, ("tenants", "default"))
    tenants = _table("tenants", found.get("tenants", {}))
    if len(tenants) > MAX_TENANTS:
        raise SettingError("tenants", f"at most {MAX_TENANTS}, are {len(tenants)}")
    for name in tenants:
        if not _NAME.fullmatch(name):
            raise SettingError(f"tenants.{name}", f"a name {_NAME_RULE}")
        if name == "other":
            raise SettingError("tenants.other", "is what metrics call those that are not named")
    return {
        "tenants": {name: _policy(f"tenants.{name}", value) for name, value in tenants.items()},
        "default_tenant": _policy("default", found.get("default", {})),
    }


def _policy(path: str, value: Any) -> TenantPolicy:
    table = _table(path, value)
    _known(f"{path}.", table, tuple(_FIELDS))
    fields = {key: _FIELDS[key](f"{path}.{key}", given) for key, given in table.items()}
    try:
        return TenantPolicy(**fields)
    except ValueError as error:
        raise SettingError(path, str(error)) from error


def _number(path: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(path, "must be a number > 0")
    return float(value)


def _count(path: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(path, "must be an integer >= 1")
    return value


def _priority(path: str, value: Any) -> Priority:
    names = {priority.name.lower(): priority for priority in Priority}
    if not isinstance(value, str) or value not in names:
        raise SettingError(path, f"must be one of {', '.join(names)}")
    return names[value]


_FIELDS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "weight": _number,
    "max_rows": _count,
    "max_queued_tokens": _count,
    "max_sessions": _count,
    "max_priority": _priority,
}


def _table(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(path, "must be a table")
    return value


def _known(path: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise SettingError(f"{path}{key}", f"is not known; there are {', '.join(known)}")
