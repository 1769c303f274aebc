"""A simulated run as one PNG. Needs matplotlib, which is an extra (`plot`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.simulation import Objective, Report
from service.config import SettingError

EXTRA = "needs matplotlib; install the extra: pip install 'selfdraft[plot]', or '.[plot]' here"
SIZE_INCHES = (11.0, 7.0)


def check_plot(path: Path) -> None:
    """Raises SettingError when a plot could not be drawn or written, before minutes of work."""
    _matplotlib()
    if path.suffix.lower() != ".png":
        raise SettingError("--plot", f"must be a .png file, not {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingError("--plot", f"cannot write {path}: {error.strerror}") from error


def _matplotlib() -> Any:
    """`Figure`, which draws without a display and without global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError("--plot", EXTRA) from error
    return Figure


def plot(report: Report, objective: Objective, title: str, path: Path) -> None:
    """Distributions above, the course of the run below. Raises SettingError, OSError."""
    figure = _matplotlib()(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, 3)
    series = report.series
    _distribution(axes[0][0], series.ttft, "time to first token", objective.ttft_p95_s, 95)
    _distribution(axes[0][1], series.gaps, "gap between bursts", objective.gap_p99_s, 99)
    _distribution(axes[0][2], series.end_to_end, "end to end", None, 0)
    _throughput(axes[1][0], series.token_times, series.token_counts)
    _lines(axes[1][1], series.sampled_at, {"running": series.running, "queued": series.queued})
    axes[1][1].set_title("requests per machine")
    kept = {"all": series.kv_used, "kept prefixes": series.kv_cached}
    _lines(axes[1][2], series.sampled_at, kept)
    axes[1][2].set_title("KV pages in use, share")
    axes[1][2].set_ylim(0, 1)
    machines = "1 machine" if report.machines == 1 else f"{report.machines} machines"
    figure.suptitle(f"{title}: {machines}, {report.tokens_per_s:.0f} tokens/s", fontsize=11)
    figure.savefig(path, format="png", dpi=110)


def _distribution(
    axis: Any, values: NDArray[np.float64], title: str, limit: float | None, percentile: int
) -> None:
    """The empirical distribution function, with an objective's limit and percentile."""
    axis.set_title(title)
    axis.set_xlabel("seconds")
    axis.set_ylim(0, 1)
    if not len(values):
        return
    shares = np.linspace(0, 1, min(len(values), 2000))
    axis.plot(np.quantile(values, shares), shares)
    if limit is not None:
        axis.axvline(limit, color="tab:red", linewidth=1)
        axis.axhline(percentile / 100, color="tab:red", linewidth=1, linestyle=":")
    axis.grid(alpha=0.3)


def _throughput(axis: Any, times: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
    axis.set_title("tokens per second")
    axis.set_xlabel("seconds")
    if not len(times):
        return
    end = float(times.max())
    bins = np.linspace(0, max(end, 1e-9), 121)
    found, _ = np.histogram(times, bins=bins, weights=counts)
    axis.step(bins[:-1], found / (bins[1] - bins[0]), where="post")
    axis.grid(alpha=0.3)


def _lines(axis: Any, times: NDArray[np.float64], lines: dict[str, NDArray[np.float64]]) -> None:
    for name, values in lines.items():
        axis.plot(times, values, label=name)
    axis.set_xlabel("seconds")
    axis.legend(loc="upper left", fontsize=8)
    axis.grid(alpha=0.3)
