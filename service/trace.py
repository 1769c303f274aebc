"""W3C trace context of a call: where it stands in a trace that its client began.

Read from the metadata `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context/). What
is malformed is as good as absent: a call never fails for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

# version, trace id, parent id, flags; what a later version appends is not ours to read.
_TRACEPARENT: Final = re.compile(
    r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?"
)
_BLANK: Final = " \t"
_MOST_STATE: Final = 4096
"""Characters of `tracestate` that are passed on; the specification asks for at least 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The span that a call was made in."""

    trace_id: str
    """32 hexadecimal digits, not all 0."""
    span_id: str
    """16 hexadecimal digits, not all 0."""
    flags: int = 0
    """Of which 1 is known: the caller may have recorded its span."""
    state: str = ""
    """What tracing systems have put along, unread."""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & 1)


def trace_context(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """The trace context in a call's metadata; None without a valid one. Of two parents neither is
    one."""
    parents: list[str | bytes] = []
    states: list[str | bytes] = []
    for key, value in metadata:
        if key == TRACEPARENT:
            parents.append(value)
        elif key == TRACESTATE:
            states.append(value)
    if len(parents) != 1 or not isinstance(parents[0], str):
        return None
    match = _TRACEPARENT.fullmatch(parents[0].strip(_BLANK))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    known = int(flags, 16) & 1 if version != "00" else int(flags, 16)
    return TraceContext(trace_id=trace_id, span_id=span_id, flags=known, state=_state(states))


def _state(values: list[str | bytes]) -> str:
    """Several headers are one list."""
    texts = [value.strip(_BLANK) for value in values if isinstance(value, str)]
    joined = ",".join(text for text in texts if text)
    return joined if len(joined) <= _MOST_STATE else ""
