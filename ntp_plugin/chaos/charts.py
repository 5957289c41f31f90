"""The pictures of a report: losses over the reference run's, throughput, who was there when, and where recoveries
spent time."""

import importlib.util
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import CampaignVerdict, FaultOutcome, differences

BLUE, SKY, VERMILION, GREEN, SAND, GREY = "#0072B2", "#9BD0F0", "#C1440E", "#00664B", "#F0C463", "#555555"
"""Of Okabe and Ito's palette or near it: told apart by all eyes, on paper too."""
PHASES = {"noticed": GREY, "agree": SAND, "regroup": SKY, "move": BLUE, "first step": GREEN}
NO_PICTURE = "There is no picture: matplotlib is not installed (pip install 'ntp-plugin[plots]')."
_LOWEST = 1e-17
"""Equal losses are drawn here, on a scale that has no zero."""
_SLOTS, _BARS = 48, 40
"""More of them make no picture."""

type Draw = Callable[[Any], None]


def pictures(run: History, reference: History | None, verdict: CampaignVerdict, *, bound: float) -> dict[str, bytes]:
    """Title -> SVG, for a page; empty where there is no matplotlib."""
    if not _can_draw():
        return {}
    return {
        title: _drawn([(title, height, draw)], "svg") for title, height, draw in _wanted(run, reference, verdict, bound)
    }


def sheet(run: History, reference: History | None, verdict: CampaignVerdict, *, bound: float) -> bytes | None:
    """All of them as one PNG, to be sent to somebody; None where there is no matplotlib."""
    return _drawn(_wanted(run, reference, verdict, bound), "png") if _can_draw() else None


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _wanted(
    run: History, reference: History | None, verdict: CampaignVerdict, bound: float
) -> list[tuple[str, float, Draw]]:
    """Title, height in inches, and what draws it."""
    injected = [outcome for outcome in verdict.outcomes if outcome.injected_at]
    timed = [outcome for outcome in injected if outcome.recovered_s is not None]
    rows, bars = min(len(run.slots), _SLOTS), min(len(timed), _BARS)
    wanted: list[tuple[str, float, Draw]] = [("Loss", 3.2, lambda axes: _losses(axes, run, reference, injected))]
    if reference is not None:
        apart = "How far the losses are from the reference run's"
        wanted.append((apart, 2.0, lambda axes: _differences(axes, run, reference, injected, bound)))
    wanted.append(("Micro-batches a second", 2.2, lambda axes: _throughput(axes, run, injected)))
    wanted.append(("Who was there", 0.8 + 0.16 * rows, lambda axes: _timeline(axes, run, injected)))
    if timed:
        wanted.append(("From each strike to the next step", 0.8 + 0.2 * bars, lambda axes: _bars(axes, timed)))
    return wanted


def _drawn(wanted: Sequence[tuple[str, float, Draw]], kind: str) -> bytes:
    """A page has its titles as headings; a sheet has them in it."""
    import matplotlib as mpl  # noqa: PLC0415  (a second that only reports cost)
    from matplotlib.figure import Figure  # noqa: PLC0415

    settings: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "path"}
    heights, out = [height for _, height, _ in wanted], io.BytesIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, sum(heights) + 0.5 * (len(wanted) - 1)), layout="constrained")
        all_axes = figure.subplots(len(wanted), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (title, _, draw) in zip(all_axes, wanted, strict=True):
            draw(axes)
            if kind == "png":
                axes.set_title(title, loc="left")
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else None
        figure.savefig(out, format=kind, bbox_inches="tight", dpi=150, metadata=unsaid)
    whole = out.getvalue()
    return whole[whole.index(b"<svg") :] if kind == "svg" else whole


def _losses(axes: Any, run: History, reference: History | None, injected: list[FaultOutcome]) -> None:
    if reference is not None:
        axes.plot(list(reference.losses), list(reference.losses.values()), color=SKY, linewidth=6, label="left alone")
    axes.plot(list(run.losses), list(run.losses.values()), color=BLUE, linewidth=1.5, label="broken on purpose")
    _mark_steps(axes, injected)
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right")


def _differences(axes: Any, run: History, reference: History, injected: list[FaultOutcome], bound: float) -> None:
    apart = {step: max(value, _LOWEST) for step, value in differences(run, reference).items()}
    axes.plot(list(apart), list(apart.values()), color=BLUE, marker="o", markersize=3, linestyle="none")
    if bound:
        axes.axhline(bound, color=GREY, linewidth=1, linestyle=(0, (1, 2)), label="what is accepted")
        axes.legend(frameon=False, loc="upper right")
    axes.set_yscale("log")
    top = max([1e-9, bound * 100, *(2 * value for value in apart.values())])
    axes.set_ylim(_LOWEST / 3, top)
    exponents = range(-15, int(math.log10(top)) + 1, 3)
    axes.set_yticks([_LOWEST, *(10.0**at for at in exponents)], ["equal", *(f"$10^{{{at}}}$" for at in exponents)])
    axes.minorticks_off()
    _mark_steps(axes, injected)
    axes.set_xlabel("step")
    axes.set_ylabel("relative")


def _throughput(axes: Any, run: History, injected: list[FaultOutcome]) -> None:
    steps = sorted(run.commits)
    at = [run.committed_at(step) - run.began_at for step in steps]
    spent = [later - earlier for earlier, later in itertools.pairwise(at)]
    rates = [sum(run.layout_of(step)[1]) / max(each, 1e-6) for step, each in zip(steps[1:], spent, strict=True)]
    axes.step(at[1:], rates, where="pre", color=BLUE, linewidth=1.2)
    axes.fill_between(at[1:], rates, step="pre", color=SKY, alpha=0.4)
    for outcome in injected:
        axes.axvline(outcome.injected_at, color=VERMILION, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since training began")


def _timeline(axes: Any, run: History, injected: list[FaultOutcome]) -> None:
    slots = run.slots[:_SLOTS]
    end = max((run.committed_at(step) for step in run.commits), default=run.began_at) - run.began_at
    for row, slot in enumerate(slots):
        for begin, until in presence(run, slot, end):
            axes.barh(row, until - begin, left=begin, height=0.7, color=BLUE)
        hits = [outcome.injected_at for outcome in injected if outcome.slot == slot]
        axes.plot(
            hits, [row] * len(hits), color=VERMILION, marker="x", markersize=6, markeredgewidth=2, linestyle="none"
        )
    axes.set_yticks(range(len(slots)), slots)
    axes.set_ylim(len(slots) - 0.4, -0.6)
    axes.set_xlabel("seconds since training began (x: a strike)")


def presence(run: History, slot: str, end: float) -> list[tuple[float, float]]:
    """When a slot was a member, in seconds since training began."""
    changes = (
        [(0.0, True)] if any(said.slot == slot and not said.event.joiner for said in run.began) else [(0.0, False)]
    )
    for _, slots in sorted(run.recoveries.items()):
        first = min(slots.values(), key=lambda said: said.at)
        changes.append((first.at - run.began_at, slot not in first.event.lost))
    changes.append((max(end, changes[-1][0]), False))
    return [(at, until) for (at, there), (until, _) in itertools.pairwise(changes) if there]


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
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def spent(outcome: FaultOutcome) -> dict[str, float]:
    """The time from a strike to the next step, by phases; what is in none of them is the first step."""
    assert outcome.recovered_s is not None, "only what was recovered from has times"
    walked = {name: seconds for name, seconds in outcome.phases.items() if name in PHASES}
    noticed = {"noticed": min(outcome.detected_s or 0.0, outcome.recovered_s)}
    rest = outcome.recovered_s - sum(walked.values()) - noticed["noticed"]
    return {**noticed, **walked, "first step": max(0.0, rest)}


def _mark_steps(axes: Any, injected: list[FaultOutcome]) -> None:
    for outcome in injected:
        axes.axvline(outcome.step - 0.5, color=VERMILION, linewidth=1, linestyle=(0, (4, 2)))
