"""The caller's trace, carried along with a call as W3C `traceparent` (and what else OpenTelemetry's
propagators of this process say). Nothing is imported where the process has no OpenTelemetry."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Final

_KEY: Final = re.compile(r"[a-z0-9_.-]{1,128}")
_VALUE: Final = re.compile(r"[\x20-\x7e]{0,8192}")


def trace_metadata(given: Sequence[tuple[str, str]] = ()) -> tuple[tuple[str, str], ...]:
    """Metadata of the current span; nothing without one, where the caller has given a `traceparent`
    of his own, or where a propagator fails: no call does for it."""
    if any(key.lower() == "traceparent" for key, _ in given):
        return ()
    if "opentelemetry.trace" not in sys.modules:  # then no span can be current
        return ()
    from opentelemetry import propagate, trace

    if not trace.get_current_span().get_span_context().is_valid:
        return ()
    carrier: dict[str, str] = {}
    try:
        propagate.inject(carrier)
    except Exception:
        logging.getLogger(__name__).warning("the trace is not carried along", exc_info=True)
        return ()
    taken = {key.lower() for key, _ in given}
    found = ((key.lower(), str(value)) for key, value in carrier.items())
    return tuple(
        (key, value)
        for key, value in found
        if key not in taken and _KEY.fullmatch(key) and _VALUE.fullmatch(value)
    )
