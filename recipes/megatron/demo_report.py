"""What came of a run with kills beside one without: checks, a picture, and a page that holds all of it."""

import dataclasses
import html
import io
import platform
import sys
import time
from pathlib import Path
from typing import Any

from demo_view import Picture

ROUNDING = 1e-10
"""Relative, in double precision. What is seen is around 1e-15; a sample left out moves the loss in the third digit."""
BLUE, SKY, VERMILION, GREEN, SAND, GREY = "#0072B2", "#9BD0F0", "#C1440E", "#00664B", "#F0C463", "#555555"
"""Of Okabe and Ito's palette or near it: told apart by all eyes, on paper too."""
_ROOM = 0.15
"""Of the picture's width, that a layout's name needs; with less it is only the width of the replica."""
NO_PICTURE = "There is no picture: matplotlib is not installed (pip install 'ntp-plugin[plots]')."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """Whom we killed, when by the clock on the wall, and in which step."""

    slot: str
    pid: int
    step: int
    at: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that must hold, and what was found."""

    what: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Both runs, side by side."""

    disturbed: Picture
    undisturbed: Picture
    kills: list[Kill]

    # ------------------------------------------------ what was found

    @property
    def holds(self) -> bool:
        """Whether everything is as promised."""
        return all(check.holds for check in self.checks())

    def checks(self) -> list[Check]:
        """What the demo is about."""
        return [self._all_steps(), self._last_loss(), self._samples(), self._all_recovered(), self._return()]

    def recovery_s(self, kill: Kill) -> float | None:
        """From the kill until all who are left have committed the first step that nobody took with the lost one."""
        epochs = [epoch for epoch, recovered in self.disturbed.recoveries.items() if kill.slot in recovered.lost]
        for step in sorted(self.disturbed.commits):
            told = self.disturbed.commits[step].values()
            if epochs and min(epoch for _, epoch in told) >= min(epochs):
                return max(at for at, _ in told) - kill.at
        return None

    def returns(self) -> list[tuple[str, int]]:
        """Who came back, and before which step."""
        found = []
        for epoch, recovered in self.disturbed.recoveries.items():
            commits = self.disturbed.commits.items()
            after = [step for step, told in commits if min(then for _, then in told.values()) >= epoch]
            found += [(slot, min(after)) for slot in recovered.back if after]
        return found

    def differences(self) -> dict[int, float]:
        """Step -> how far the losses are apart, relative to the undisturbed one."""
        calm = self.undisturbed.losses
        both = sorted(self.disturbed.losses.keys() & calm.keys())
        return {step: abs(self.disturbed.losses[step] - calm[step]) / abs(calm[step]) for step in both}

    def _all_steps(self) -> Check:
        done = [len(picture.losses) for picture in (self.disturbed, self.undisturbed)]
        wanted = self.disturbed.steps
        found = f"{done[0]} of {wanted} with the kills, {done[1]} of {wanted} without"
        return Check(what="every step was committed", found=found, holds=done == [wanted, wanted])

    def _last_loss(self) -> Check:
        last = self.disturbed.steps
        mine, calm = self.disturbed.losses.get(last), self.undisturbed.losses.get(last)
        what = "the last losses agree to rounding"
        if mine is None or calm is None:
            return Check(what=what, found="one of the runs did not come so far", holds=False)
        apart = self.differences()[last]
        found = f"{mine:.15f} with the kills, {calm:.15f} without: {apart:.1e} apart"
        return Check(what=what, found=found, holds=apart <= ROUNDING)

    def _samples(self) -> Check:
        batch = sum(self.undisturbed.micro_batches)
        wrong = [
            step
            for picture in (self.disturbed, self.undisturbed)
            for step in range(1, picture.steps + 1)
            if sorted(picture.samples.get(step, [])) != list(range((step - 1) * batch, step * batch))
        ]
        drawn = sum(map(len, self.disturbed.samples.values()))
        found = f"{drawn} drawn in {len(self.disturbed.samples)} steps of {batch}, each its own"
        if wrong:
            found = f"not so in step {', '.join(map(str, sorted(set(wrong))[:5]))}"
        return Check(what="every sample was used once", found=found, holds=not wrong)

    def _all_recovered(self) -> Check:
        times = [self.recovery_s(kill) for kill in self.kills]
        found = ", ".join("never" if seconds is None else f"{seconds:.2f} s" for seconds in times)
        return Check(what="training went on after each kill", found=found, holds=bool(times) and None not in times)

    def _return(self) -> Check:
        came = [slot for recovered in self.disturbed.recoveries.values() for slot in recovered.back]
        holds = self.kills[0].slot in came
        return Check(what=f"{self.kills[0].slot} came back", found=", ".join(came) or "nobody did", holds=holds)

    # ------------------------------------------------ how it is shown

    def print(self) -> None:
        """In the terminal."""
        print()
        for check in self.checks():
            print(f"  {'yes' if check.holds else 'NO '}  {check.what}: {check.found}")
        print()

    def write(self, folder: Path, *, command: str) -> None:
        """demo.png and demo.html; their paths are printed."""
        figure = _draw(self)
        page = folder / "demo.html"
        page.write_text(_page(self, _as_svg(figure), command), encoding="utf-8")
        if figure is not None:
            figure.savefig(folder / "demo.png", dpi=150)
            print(f"picture: {(folder / 'demo.png').resolve()}")
        else:
            print(NO_PICTURE)
        print(f"page:    {page.resolve()}")

    def layout_of(self, step: int) -> tuple[list[int], list[int]]:
        """Width and micro-batches of each replica, as a step was computed."""
        epochs = [epoch for _, epoch in self.disturbed.commits[step].values()]
        return self.disturbed.layouts[min(epochs)]


# ---------------------------------------------------------------- the picture


def _draw(report: Report) -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415  (an extra)
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"})
    figure, axes = plt.subplots(3, 1, figsize=(9, 8.6), sharex=True, height_ratios=(3, 1.4, 1.6), layout="constrained")
    _draw_losses(axes[0], report)
    _draw_differences(axes[1], report)
    _draw_shares(axes[2], report)
    axes[-1].set_xlabel("optimizer step")
    axes[-1].set_xlim(0.5, report.disturbed.steps + 0.5)
    figure.align_ylabels(axes)
    return figure


def _draw_losses(axes: Any, report: Report) -> None:
    calm, hurt = report.undisturbed.losses, report.disturbed.losses
    axes.plot(list(calm), list(calm.values()), color=SKY, linewidth=7, solid_capstyle="round", label="left alone")
    axes.plot(list(hurt), list(hurt.values()), color=BLUE, linewidth=1.6, label="two ranks killed")
    axes.set_ylabel("loss")
    title = "Two ranks die, one comes back, and" if report.returns() else "Two ranks die, and"
    axes.set_title(f"{title} the training is the same", loc="left", fontsize=13, fontweight="bold", pad=14)
    top = max([*calm.values(), *hurt.values()])
    for kill in report.kills:
        seconds = report.recovery_s(kill)
        after = "no step followed" if seconds is None else f"next step committed {seconds:.2f} s later"
        axes.annotate(
            f"{kill.slot} killed\n{after}",
            (kill.step, top),
            xytext=(6, 0),
            textcoords="offset points",
            color=VERMILION,
            va="top",
            fontsize=9,
        )
    for slot, step in report.returns():
        place = {"xytext": (6, -40), "textcoords": "offset points"}
        axes.annotate(f"{slot} is back", (step - 0.5, top), color=GREEN, va="top", fontsize=9, **place)
    _mark_changes(axes, report)
    axes.legend(frameon=False, loc="lower left")


def _draw_differences(axes: Any, report: Report) -> None:
    lowest = 1e-17
    apart = {step: max(value, lowest) for step, value in report.differences().items()}
    axes.axhline(ROUNDING, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    said = {"color": GREY, "fontsize": 9, "ha": "right", "va": "bottom"}
    axes.text(report.disturbed.steps, ROUNDING, "what the demo accepts", **said)
    axes.plot(list(apart), list(apart.values()), color=BLUE, marker="o", markersize=3.5, linestyle="none")
    axes.set_yscale("log")
    axes.set_ylim(lowest / 3, ROUNDING * 300)
    axes.set_yticks([1e-17, 1e-15, 1e-13, 1e-11], ["equal", "$10^{-15}$", "$10^{-13}$", "$10^{-11}$"])
    axes.minorticks_off()
    axes.set_ylabel("losses apart,\nrelative")
    _mark_changes(axes, report)


def _draw_shares(axes: Any, report: Report) -> None:
    steps = sorted(report.disturbed.commits)
    below = [0] * len(steps)
    for replica, colour in zip(range(report.disturbed.replicas), (BLUE, SAND), strict=True):
        shares = [report.layout_of(step)[1][replica] for step in steps]
        axes.bar(steps, shares, bottom=below, width=1.0, color=colour)
        stretches = _stretches(report, steps, replica)
        ends = [*(first for first, _, _ in stretches[1:]), steps[-1]]
        for (first, width, height), end in zip(stretches, ends, strict=True):
            place = below[steps.index(first)] + height / 2
            text = f"replica {replica}: width {width}" if end - first > _ROOM * len(steps) else str(width)
            axes.annotate(text, (first, place), color="white" if colour == BLUE else "black", va="center", fontsize=9)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_ylabel("micro-batches")
    _mark_changes(axes, report)


def _stretches(report: Report, steps: list[int], replica: int) -> list[tuple[int, int, int]]:
    """Where a layout begins: step, width and micro-batches of a replica."""
    found: list[tuple[int, int, int]] = []
    before: Any = None
    for step in steps:
        layout = report.layout_of(step)
        if layout != before:
            found.append((step, layout[0][replica], layout[1][replica]))
        before = layout
    return found


def _mark_changes(axes: Any, report: Report) -> None:
    for kill in report.kills:
        axes.axvline(kill.step - 0.5, color=VERMILION, linewidth=1.2, linestyle=(0, (4, 2)))
    for _, step in report.returns():
        axes.axvline(step - 0.5, color=GREEN, linewidth=1.2, linestyle=(0, (1, 1.5)))


def _as_svg(figure: Any) -> str:
    if figure is None:
        return f"<p>{html.escape(NO_PICTURE)}</p>"
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    whole = drawn.getvalue()
    return whole[whole.index("<svg") :]


# ---------------------------------------------------------------- the page

_STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600; color: #555 }
.yes { color: #0072B2; font-weight: 600 } .no { color: #C1440E; font-weight: 600 }
svg { width: 100%; height: auto }
footer, .small { color: #555; font-size: .9rem }
code { background: #f3f3f3; padding: .1rem .3rem }
"""


def _page(report: Report, picture: str, command: str) -> str:
    outcome = (
        "Two of eight ranks were killed by SIGKILL while they trained. Nobody restarted, and the training is the one"
        " that it would have been."
        if report.holds
        else "Something is not as it should be: see below."
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>ntp_plugin: ranks die, the job does not</title><style>{_STYLE}</style></head><body>
<h1>A rank dies; the job does not</h1>
<p>{html.escape(outcome)}</p>
{picture}
<p class="small">Above, the loss of the run with the kills over that of a run that was left alone. In the middle, how
far the two are apart. Below, how the replicas share the {sum(report.undisturbed.micro_batches)} micro-batches of each
step, and how many slots each of them runs on.</p>
<h2>The kills</h2>
{_table(("slot", "process", "in step", "to the next committed step", "after that"), _rows_of_kills(report))}
<h2>What was checked</h2>
{_table(("", "what", "found"), _rows_of_checks(report))}
<h2>What happened</h2>
<ol>{"".join(f"<li>{html.escape(said)}</li>" for said in report.disturbed.said)}</ol>
<footer><p>GPT on Megatron, {report.disturbed.replicas} replicas of TP {report.disturbed.tp}, {report.disturbed.steps}
steps in double precision on CPU. <code>{html.escape(command)}</code>, {time.strftime("%Y-%m-%d %H:%M")},
{html.escape(platform.platform())}, Python {html.escape(sys.version.split()[0])}.</p></footer>
</body></html>
"""


def _rows_of_kills(report: Report) -> list[list[str]]:
    rows = []
    for kill in report.kills:
        seconds = report.recovery_s(kill)
        recoveries = report.disturbed.recoveries
        epoch = min((epoch for epoch, one in recoveries.items() if kill.slot in one.lost), default=0)
        widths, shares = report.disturbed.layouts[epoch]
        after = "; ".join(
            f"replica {replica}: width {width}, {share} micro-batches"
            for replica, (width, share) in enumerate(zip(widths, shares, strict=True))
        )
        told = "never" if seconds is None else f"{seconds:.2f} s"
        rows.append([html.escape(text) for text in (kill.slot, str(kill.pid), str(kill.step), told, after)])
    return rows


def _rows_of_checks(report: Report) -> list[list[str]]:
    marks = {True: '<span class="yes">✓ yes</span>', False: '<span class="no">✗ no</span>'}
    return [[marks[check.holds], html.escape(check.what), html.escape(check.found)] for check in report.checks()]


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
