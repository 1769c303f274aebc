"""For each guarantee of metrics, logs and traces a planted fault, and proof that a test sees it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service import calls, logs, trace, tracing
from service.calls import CallInterceptor
from service.errors import ServiceError
from service.loopwatch import LoopWatch
from service.metrics import Metrics
from service.scrape import SnapshotCollector
from tests.service import test_catalogue, test_log_bounds, test_trace

pytestmark = pytest.mark.anyio

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path, pytest.MonkeyPatch], Awaitable[None] | None]
MUTATIONS: dict[str, tuple[Patch, Check]] = {}

SEEN = (Exception, BaseExceptionGroup, pytest.fail.Exception)


def seen_by(check: Check) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTATIONS[patch.__name__] = (patch, check)
        return patch

    return add


@seen_by(lambda folder, patch: test_catalogue.test_no_client_makes_a_series())
def methods_are_labels_as_they_come(patch: pytest.MonkeyPatch) -> None:
    class Anything(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            return key

    patch.setattr(calls, "METHODS", Anything())


@seen_by(lambda folder, patch: test_catalogue.test_no_client_makes_a_series())
def tenants_are_labels_as_they_come(patch: pytest.MonkeyPatch) -> None:
    well, seen = Metrics.admitted, dict[str, int]()

    def admitted(self: Metrics, *args: Any, **more: Any) -> None:
        seen[f"t{len(seen)}"] = 1
        well(self, *args, **more)

    collect_well = SnapshotCollector.collect

    def collect(self: SnapshotCollector) -> Any:
        for metric in collect_well(self):
            if metric.name == "selfdraft_tenant_tokens":
                for name in seen:
                    metric.add_metric([name], 1)  # type: ignore[attr-defined]
            yield metric

    patch.setattr(Metrics, "admitted", admitted)
    patch.setattr(SnapshotCollector, "collect", collect)


@seen_by(lambda folder, patch: test_catalogue.test_a_server_exports_exactly_what_is_declared())
def a_family_is_missing(patch: pytest.MonkeyPatch) -> None:
    collect_well = SnapshotCollector.collect

    def collect(self: SnapshotCollector) -> Any:
        return (m for m in collect_well(self) if m.name != "selfdraft_rows_used")

    patch.setattr(SnapshotCollector, "collect", collect)


@seen_by(lambda folder, patch: test_catalogue.test_calls_are_counted_by_method_and_status())
def errors_are_calls_that_went_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calls, "_code", lambda context: "OK")


@seen_by(lambda folder, patch: test_catalogue.test_calls_are_counted_by_method_and_status())
def a_call_that_left_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Metrics, "call_left", lambda self, method: None)


@seen_by(lambda folder, patch: test_catalogue.test_what_a_token_does_not_allow_is_counted(folder))
def only_known_callers_are_counted(patch: pytest.MonkeyPatch) -> None:
    well = CallInterceptor.intercept_service

    async def intercept(self: CallInterceptor, continuation: Any, details: Any) -> Any:
        if not any(key == "authorization" for key, _ in details.invocation_metadata):
            return await continuation(details)
        return await well(self, continuation, details)

    patch.setattr(CallInterceptor, "intercept_service", intercept)


@seen_by(
    lambda folder, patch: test_log_bounds.test_nothing_a_client_sends_or_gets_is_logged(folder)
)
def errors_are_logged_word_for_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServiceError, "for_log", property(lambda self: self.message))


@seen_by(
    lambda folder, patch: (
        test_log_bounds.test_each_call_makes_one_line_and_a_flood_a_bounded_number()
    )
)
def every_bad_call_has_its_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logs, "_kind", lambda event: None)


@seen_by(lambda folder, patch: test_log_bounds.test_a_bucket_fills_again_and_says_what_is_missing())
def good_calls_share_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logs, "_kind", lambda event: str(event["event"]))


@seen_by(lambda folder, patch: test_log_bounds.test_a_real_pipe_that_nobody_reads())
def a_broken_stream_raises(patch: pytest.MonkeyPatch) -> None:
    def msg(self: logs.Lines, message: str) -> None:
        self._stream.write(message)
        self._stream.flush()

    patch.setattr(logs.Lines, "info", msg)


@seen_by(lambda folder, patch: test_log_bounds.test_what_libraries_log_never_raises())
def what_libraries_log_raises(patch: pytest.MonkeyPatch) -> None:
    def emit(self: logs._Forward, record: Any) -> None:
        self._logger.log(record.levelno, "library message", message=record.getMessage())

    patch.setattr(logs._Forward, "emit", emit)


@seen_by(lambda folder, patch: test_log_bounds.test_a_slow_loop_is_measured_and_told_of())
def a_stall_is_seen_when_it_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoopWatch, "stalled_s", lambda self: 0.0)


@seen_by(
    lambda folder, patch: test_trace.test_what_is_malformed_is_as_good_as_absent(
        f"ff{test_trace.PARENT[2:]}"
    )
)
def any_version_is_one(patch: pytest.MonkeyPatch) -> None:
    rewrite(patch, trace, "trace_context", 'version == "ff"', "False")


@seen_by(lambda folder, patch: test_trace.test_two_parents_are_none())
def the_first_parent_counts(patch: pytest.MonkeyPatch) -> None:
    rewrite(patch, trace, "trace_context", "len(parents) != 1", "not parents")


@seen_by(lambda folder, patch: test_trace.test_a_call_is_a_span_below_its_client_s())
def spans_are_roots(patch: pytest.MonkeyPatch) -> None:
    from opentelemetry.context import Context

    patch.setattr(tracing, "_remote", lambda found: Context())


@seen_by(lambda folder, patch: test_trace.test_a_collector_that_is_away_costs_no_request("silent"))
def a_stop_waits_for_the_collector(patch: pytest.MonkeyPatch) -> None:
    async def close(self: tracing.Tracing) -> None:
        self._shut_down()

    patch.setattr(tracing.Tracing, "close", close)


@seen_by(lambda folder, patch: test_trace.test_what_waits_is_handed_on_by_a_stop())
def a_stop_forgets_what_waits(patch: pytest.MonkeyPatch) -> None:
    async def close(self: tracing.Tracing) -> None:
        return

    patch.setattr(tracing.Tracing, "close", close)


@seen_by(lambda folder, patch: test_trace.test_a_defect_of_tracing_fails_no_request(patch))
def a_defect_of_tracing_is_the_call_s(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracing.Tracing, "record", lambda self, record, now: self._record(record, now))


def rewrite(patch: pytest.MonkeyPatch, module: Any, name: str, well: str, ill: str) -> None:
    """The function of a module with a piece of its source replaced, where tests look it up too."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(well) == 1
    space = dict(vars(module))
    exec(compile(source.replace(well, ill), module.__name__, "exec"), space)
    patch.setattr(module, name, space[name])
    patch.setattr(test_trace, name, space[name], raising=False)


@pytest.mark.parametrize("name", list(MUTATIONS))
async def test_the_fault_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, check = MUTATIONS[name]
    patch(monkeypatch)
    with pytest.raises(SEEN):
        await finish(check, tmp_path, monkeypatch)


async def finish(check: Check, folder: Path, patch: pytest.MonkeyPatch) -> None:
    outcome = check(folder, patch)
    if outcome is not None:
        await outcome
