"""Pages of reference in deploy/, printed from what the code declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from service import catalogue, logcatalogue
from service.logs import BURST, PER_S

_METRICS: Final = """# Metrics

What `/metrics` of a server shows: plain text, or OpenMetrics where it is asked for. This page is
printed by `selfdraft reference metrics`, and a test compares.

Labels are from closed sets, so nothing a client sends makes a series: one process has at most
{most} of them, `process_*` aside, of which {tenants} need as many tenants with a policy of their
own. From "{first}" on they are there once the model is loaded.

{table}"""

_LOGS: Final = """# The log

Lines on standard error, JSON with `--log-format json`. This page is printed by
`selfdraft reference logs`, and tests compare it with what is written.

- Each `Generate` call makes one line, `request`, when it ends, whatever its end. What its client
  sent and got is not in it: no prompt, text, stop string, schema or metadata; ids are.
- What calls cannot fill a disk with: lines of calls that got no token, what
  libraries say and unexpected errors are each bounded to {burst} at once and {per_s:g} a second
  after that. The next line of the kind says how many are missing (`suppressed`), and
  `selfdraft_log_lines_dropped_total` counts them. A call that got a token always has its line.
  `--log-all` lifts the bounds.
- Calls that end before their message was read are never many lines either: the first of a kind is
  one, and for each second after it one more says how many followed.
- A line that standard error does not take is lost and counted; no request fails for it.

## Fields of `request`

{request}
## Other events

{events}"""


def metrics_page() -> str:
    """deploy/metrics.md."""
    first = next(family for family in catalogue.CATALOGUE.values() if family.loaded)
    return _METRICS.format(
        most=f"{catalogue.most_series():,}",
        tenants=catalogue.CATALOGUE["tenant_tokens"].most_series,
        first=first.full_name,
        table=catalogue.table(),
    )


def logs_page() -> str:
    """deploy/logs.md."""
    return _LOGS.format(
        burst=BURST,
        per_s=PER_S,
        request=logcatalogue.request_table(),
        events=logcatalogue.event_table(),
    )


PAGES: Final[Mapping[str, Callable[[], str]]] = {"metrics": metrics_page, "logs": logs_page}
"""By name; each is deploy/NAME.md."""
