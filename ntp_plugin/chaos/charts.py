"""Draw the charts of a report: losses beside the reference run's, throughput, ranks over time, and recovery phases."""

import dataclasses
import importlib.util
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import CampaignVerdict, FaultOutcome, differences

BLUE, SKY, VERMILION, GREEN, SAND, GREY = "#0072B2", "#9BD0F0", "#C1440E", "#00664B", "#F0C463", "#555555"
"""Okabe and Ito's palette, or near it: distinct for colour-blind readers, and on paper."""
PHASES = {"detect": GREY, "agree": SAND, "regroup": SKY, "move": BLUE, "first step": GREEN}
NO_PICTURE = "No charts: matplotlib is not installed (pip install 'ntp-plugin[plots]')."
_LOWEST = 1e-17
"""Equal losses are drawn at this value: the scale is logarithmic and has no zero."""
_SLOTS, _BARS = 48, 40
"""Most rows of the timeline, and most bars; more are not readable."""

type Draw = Callable[[Any], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart, before it is drawn."""

    title: str
    legend: str
    """Sentences that explain axes and colours."""
    height: float
    """In inches."""
    draw: Draw


def pictures(
    run: History, reference: History | None, verdict: CampaignVerdict, *, bound: float
) -> list[tuple[Chart, bytes]]:
    """Return each chart with its SVG; empty without matplotlib."""
    if not _can_draw():
        return []
    return [(chart, _drawn([chart], "svg")) for chart in _charts(run, reference, verdict, bound)]


def sheet(run: History, reference: History | None, verdict: CampaignVerdict, *, bound: float) -> bytes | None:
    """Return all charts as one PNG, or None without matplotlib."""
    return _drawn(_charts(run, reference, verdict, bound), "png") if _can_draw() else None


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _charts(run: History, reference: History | None, verdict: CampaignVerdict, bound: float) -> list[Chart]:
    injected = [outcome for outcome in verdict.outcomes if outcome.injected_at]
    timed = [outcome for outcome in injected if outcome.recovered_s is not None]
    rows, bars = min(len(run.slots), _SLOTS), min(len(timed), _BARS)
    dashed = " Dashed lines: injected faults." if injected else ""
    beside = ", beside the same job without faults (wide line)" if reference is not None else ""
    charts = [
        Chart(
            title="Loss",
            legend=f"Training loss at each step of this run{beside}.{dashed}",
            height=3.2,
            draw=lambda axes: _losses(axes, run, reference, injected),
        )
    ]
    if reference is not None:
        charts.append(
            Chart(
                title="Difference from the reference run's loss",
                legend=f"Relative difference of the loss at each step; at \u201cequal\u201d there is none. Dotted line:"
                f" the largest difference that is accepted.{dashed}",
                height=2.0,
                draw=lambda axes: _differences(axes, run, reference, injected, bound),
            )
        )
    charts += [
        Chart(
            title="Throughput",
            legend=f"Micro-batches per second, from one committed step to the next. A dip is a recovery.{dashed}",
            height=2.2,
            draw=lambda axes: _throughput(axes, run, injected),
        ),
        Chart(
            title="Ranks over time",
            legend="One row for each slot (r = replica, s = pipeline stage, t = tensor-parallel rank). Bar: a rank"
            " trains in that slot. Gap: the slot is lost, until a rank rejoins. Cross: a fault was injected there."
            + f" The first {_SLOTS} of {len(run.slots)} slots."
            * (len(run.slots) > _SLOTS),
            height=0.8 + 0.16 * rows,
            draw=lambda axes: _timeline(axes, run, injected),
        ),
    ]
    if timed:
        charts.append(
            Chart(
                title="Time from each fault to the next step",
                legend="One bar for each fault, by the phases of its recovery. Detect: until a supervisor reports the"
                " loss. Agree: the surviving ranks agree on the recovery plan. Regroup: they build new process groups."
                " Move: state moves to its new owners. First step: the rest, until the next step is committed."
                + f" The first {_BARS} of {len(timed)} faults."
                * (len(timed) > _BARS),
                height=0.8 + 0.2 * bars,
                draw=lambda axes: _bars(axes, timed),
            )
        )
    return charts


def _drawn(charts: Sequence[Chart], kind: str) -> bytes:
    """A page shows titles as headings; a sheet shows them in the picture."""
    import matplotlib as mpl  # noqa: PLC0415  (a second that only reports cost)
    from matplotlib.figure import Figure  # noqa: PLC0415

    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path"}
    heights, out = [chart.height for chart in charts], io.BytesIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, sum(heights) + 0.5 * (len(charts) - 1)), layout="constrained")
        all_axes = figure.subplots(len(charts), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, chart in zip(all_axes, charts, strict=True):
            chart.draw(axes)
            if kind == "png":
                axes.set_title(chart.title, loc="left")
        omitted = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else None
        figure.savefig(out, format=kind, bbox_inches="tight", dpi=150, metadata=omitted)
    picture = out.getvalue()
    return picture[picture.index(b"<svg") :] if kind == "svg" else picture


def _losses(axes: Any, run: History, reference: History | None, injected: list[FaultOutcome]) -> None:
    if reference is not None:
        axes.plot(list(reference.losses), list(reference.losses.values()), color=SKY, linewidth=6, label="reference")
    axes.plot(
        list(run.losses),
        list(run.losses.values()),
        color=BLUE,
        linewidth=1.5,
        label="with faults" if injected else "this run",
    )
    _mark_steps(axes, injected)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    _legend_outside(axes)


def _differences(axes: Any, run: History, reference: History, injected: list[FaultOutcome], bound: float) -> None:
    apart = {step: max(value, _LOWEST) for step, value in differences(run, reference).items()}
    axes.plot(
        list(apart), list(apart.values()), color=BLUE, marker="o", markersize=3, linestyle="none", label="difference"
    )
    if bound:
        axes.axhline(bound, color=GREY, linewidth=1, linestyle=(0, (1, 2)), label="accepted")
    axes.set_yscale("log")
    top = max([1e-9, bound * 100, *(2 * value for value in apart.values())])
    axes.set_ylim(_LOWEST / 3, top)
    exponents = range(-15, int(math.log10(top)) + 1, 3)
    axes.set_yticks([_LOWEST, *(10.0**at for at in exponents)], ["equal", *(f"$10^{{{at}}}$" for at in exponents)])
    axes.minorticks_off()
    _mark_steps(axes, injected)
    _legend_outside(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference")


def _throughput(axes: Any, run: History, injected: list[FaultOutcome]) -> None:
    steps = sorted(run.commits)
    at = [run.committed_at(step) - run.began_at for step in steps]
    spent = [later - earlier for earlier, later in itertools.pairwise(at)]
    rates = [sum(run.layout_of(step)[1]) / max(each, 1e-6) for step, each in zip(steps[1:], spent, strict=True)]
    axes.step(at[1:], rates, where="pre", color=BLUE, linewidth=1.2, label="throughput")
    axes.fill_between(at[1:], rates, step="pre", color=SKY, alpha=0.4)
    _mark(axes, [outcome.injected_at for outcome in injected])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("micro-batches / s")
    _legend_outside(axes)


def _timeline(axes: Any, run: History, injected: list[FaultOutcome]) -> None:
    slots = run.slots[:_SLOTS]
    end = max((run.committed_at(step) for step in run.commits), default=run.began_at) - run.began_at
    for row, slot in enumerate(slots):
        for begin, until in presence(run, slot, end):
            axes.barh(row, until - begin, left=begin, height=0.7, color=BLUE, label="training")
        hits = [outcome.injected_at for outcome in injected if outcome.slot == slot]
        cross: Any = {"color": VERMILION, "marker": "x", "markersize": 6, "markeredgewidth": 2, "linestyle": "none"}
        if hits:
            axes.plot(hits, [row] * len(hits), label="fault", **cross)
    axes.set_yticks(range(len(slots)), slots)
    axes.set_ylim(len(slots) - 0.4, -0.6)
    axes.set_xlabel("seconds since training began")
    _legend_outside(axes)


def presence(run: History, slot: str, end: float) -> list[tuple[float, float]]:
    """Return the spans in which a slot was a member, in seconds since training began."""
    is_member = any(began.slot == slot and not began.event.joiner for began in run.began)
    changes = [(0.0, is_member)]
    for _, slots in sorted(run.recoveries.items()):
        first = min(slots.values(), key=lambda recovered: recovered.at)
        changes.append((first.at - run.began_at, slot not in first.event.lost))
    changes.append((max(end, changes[-1][0]), False))
    return [(at, until) for (at, is_member), (until, _) in itertools.pairwise(changes) if is_member]


def _bars(axes: Any, timed: list[FaultOutcome]) -> None:
    shown = timed[:_BARS]
    for row, outcome in enumerate(shown):
        left = 0.0
        for phase, seconds in spent(outcome).items():
            axes.barh(row, seconds, left=left, height=0.7, color=PHASES[phase], label=phase if row == 0 else None)
            left += seconds
    axes.set_yticks(range(len(shown)), [f"{outcome.name}: {outcome.what} {outcome.slot}" for outcome in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("seconds")
    _legend_outside(axes)


def spent(outcome: FaultOutcome) -> dict[str, float]:
    """Split the time from a fault to the next step into phases; the remainder is the first step."""
    assert outcome.recovered_s is not None, "the job has recovered from this fault"
    recovery = {name: seconds for name, seconds in outcome.phases.items() if name in PHASES}
    detect = min(outcome.detected_s or 0.0, outcome.recovered_s)
    rest = outcome.recovered_s - sum(recovery.values()) - detect
    return {"detect": detect, **recovery, "first step": max(0.0, rest)}


def _mark_steps(axes: Any, injected: list[FaultOutcome]) -> None:
    _mark(axes, [outcome.step - 0.5 for outcome in injected])


def _mark(axes: Any, places: Sequence[float]) -> None:
    for number, at in enumerate(places):
        label = "fault" if number == 0 else None
        axes.axvline(at, color=VERMILION, linewidth=1, linestyle=(0, (4, 2)), label=label)


def _legend_outside(axes: Any) -> None:
    """Legend at the right of the axes, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
