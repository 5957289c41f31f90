"""Draws a simulation as a figure: throughput lost by failed share, goodput over time, spares needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ntp_plugin.errors import ConfigError
from ntp_plugin.simulator.failures import DAY_S
from ntp_plugin.simulator.report import SimulationReport

POINTS = 200
"""Points of a curve over time; a run has thousands of events."""


def draw(report: SimulationReport, path: Path) -> None:
    """Write the figure; the suffix of the path selects the format."""
    parts: list[Callable[[Any, SimulationReport], None]] = []
    parts += [_losses] if report.losses else []
    parts += [_goodput] if report.courses else []
    parts += [_spares] if report.spares else []
    figure = Figure(figsize=(6.4 * len(parts), 4.4), layout="constrained")
    for place, part in enumerate(parts):
        part(figure.add_subplot(1, len(parts), place + 1), report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be drawn: {error}", fix="name it .png, .svg or .pdf") from None


def _losses(axes: Any, report: SimulationReport) -> None:
    for name in dict.fromkeys(loss.policy for loss in report.losses):
        rows = [loss for loss in report.losses if loss.policy == name]
        failed = [100 * row.failed for row in rows]
        (line,) = axes.plot(failed, [100 * row.mean for row in rows], marker="o", markersize=4, label=name)
        axes.fill_between(
            failed, [100 * r.mean for r in rows], [100 * r.worst for r in rows], color=line.get_color(), alpha=0.15
        )
    axes.set(title="Throughput lost (mean, shaded to the worst draw)", xlabel="failed GPUs, %", ylabel="lost, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _goodput(axes: Any, report: SimulationReport) -> None:
    for course in report.courses:
        end = course.series[-1][0]
        marks = [end * (number + 1) / POINTS for number in range(POINTS)]
        done = _at(course.series, marks)
        rates = [100 * (b - a) / (end / POINTS) for a, b in zip([0.0, *done], done, strict=False)]
        axes.plot(
            [mark / DAY_S for mark in marks], rates, label=f"{course.policy} ({course.goodput:.2%})", linewidth=1.2
        )
    axes.set(title="Goodput over time", xlabel="days", ylabel="of a whole cluster, %")
    axes.grid(alpha=0.3)
    axes.legend()


def _at(series: tuple[tuple[float, float], ...], marks: list[float]) -> list[float]:
    """Return the work done by each of the times in `marks`, interpolated."""
    found, place = [], 0
    for mark in marks:
        while place + 1 < len(series) and series[place + 1][0] < mark:
            place += 1
        (at, done), (after, later) = series[place], series[min(place + 1, len(series) - 1)]
        part = (mark - at) / (after - at) if after > at else 0.0
        found.append(done + min(1.0, part) * (later - done))
    return found


def _spares(axes: Any, report: SimulationReport) -> None:
    names, needed = zip(*report.spares, strict=True)
    bars = axes.bar(names, needed)
    axes.bar_label(bars)
    axes.set(title="Spare domains that keep the batch whole", ylabel="domains")
    axes.grid(alpha=0.3, axis="y")
