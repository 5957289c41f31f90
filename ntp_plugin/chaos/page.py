"""Write the report on a run, with or without injected faults: one self-contained HTML page, and the verdict as JSON."""

import dataclasses
import html
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ntp_plugin.chaos.charts import NO_PICTURE, pictures, sheet
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import CampaignVerdict
from ntp_plugin.telemetry import Follower
from ntp_plugin.telemetry.event_text import described
from ntp_plugin.telemetry.events import Recovered

_STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600; color: #555 }
.yes { color: #0072B2; font-weight: 600 } .no { color: #C1440E; font-weight: 600 }
svg { width: 100%; height: auto }
footer, .small { color: #555; font-size: .9rem }
code { background: #f3f3f3; padding: .1rem .3rem }
"""
_MAX_EVENTS = 200
"""Events that the page lists; the record has all of them."""
_CHECKS_LEGEND = (
    "Each row is one property that the whole run must have. \u201cFound\u201d is what the record of the run shows; a"
    " row marked \u2717 fails the report."
)
_FAULTS_LEGEND = (
    "One row for each fault, in the order of injection. Kind: what was done to the process or host (docs/chaos.md lists"
    " the kinds). Slot: the rank's place in the job, r = replica, s = pipeline stage, t = tensor-parallel rank. When:"
    " the step in flight and the fault point in it. Detected after: seconds from injection until a supervisor reported"
    " the loss. Next step after: seconds from injection until all surviving ranks had committed a step without the lost"
    " rank. Repeated steps: steps that were complete and had to be computed again in this recovery. A cell is empty"
    " where it does not apply."
)
_EVENTS_LEGEND = (
    "Faults, losses and recoveries from the record of the run, each once, with the seconds since training began."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageContent:
    """The content of a report."""

    title: str
    record: Path
    """The folder of the run."""
    run: History
    reference: History | None
    verdict: CampaignVerdict
    bound: float = 0.0
    """Largest relative difference of a loss from the reference run's."""
    command: str
    job: str = ""
    """The job's `ntp run` arguments, if known."""


def write_page(report: PageContent, folder: Path) -> Path:
    """Write `report.html`, its charts as `report.png`, and `verdict.json` into a folder; return the page's path."""
    (folder / "verdict.json").write_text(json.dumps(_as_mapping(report), indent=1) + "\n")
    picture = sheet(report.run, report.reference, report.verdict, bound=report.bound)
    if picture is not None:
        (folder / "report.png").write_bytes(picture)
    page = folder / "report.html"
    page.write_text(_page(report), encoding="utf-8")
    return page


def _as_mapping(report: PageContent) -> dict[str, object]:
    verdict = report.verdict
    return {
        "title": report.title,
        "holds": verdict.holds,
        "efficiency": verdict.efficiency,
        "checks": [dataclasses.asdict(check) for check in verdict.checks],
        "samples": dataclasses.asdict(verdict.samples),
        "drawn": None if verdict.drawn is None else dataclasses.asdict(verdict.drawn),
        "left_out": list(verdict.left_out),
        "faults": [dataclasses.asdict(outcome) for outcome in verdict.outcomes],
    }


def _page(report: PageContent) -> str:
    verdict = report.verdict
    charts = "".join(
        f"<h2>{html.escape(chart.title)}</h2>{_legend(chart.legend)}{svg.decode()}"
        for chart, svg in pictures(report.run, report.reference, verdict, bound=report.bound)
    )
    checks = [(_mark(check.holds), html.escape(check.what), html.escape(check.found)) for check in verdict.checks]
    columns = ("", "fault", "kind", "slot", "when", "detected after", "next step after", "repeated steps")
    title = html.escape(f"{'Fault injection report' if verdict.outcomes else 'Training run report'}: {report.title}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p>{_mark(verdict.holds)} {html.escape(_summary(report))}</p>
{"".join(f"<p>Left out: {html.escape(line)}</p>" for line in verdict.left_out)}
<h2>What was checked</h2>
{_legend(_CHECKS_LEGEND)}
{_table(("", "check", "found"), checks)}
{f"<h2>Faults</h2>{_legend(_FAULTS_LEGEND)}{_table(columns, _rows(verdict))}" if verdict.outcomes else ""}
{charts or f"<p>{html.escape(NO_PICTURE)}</p>"}
<h2>What happened</h2>
{_legend(_EVENTS_LEGEND)}
<ol>{"".join(f"<li>{html.escape(line)}</li>" for line in _event_lines(report)) or "<li>Nothing.</li>"}</ol>
<footer><p>Written by <code>{html.escape(report.command)}</code>, {time.strftime("%Y-%m-%d %H:%M")},
{html.escape(platform.platform())}, Python {html.escape(sys.version.split()[0])}.
{f"The job: <code>ntp run {html.escape(report.job)}</code>" if report.job else ""}</p></footer>
</body></html>
"""


def _summary(report: PageContent) -> str:
    """Say what was run, how many faults were injected, and whether the job lost anything."""
    verdict = report.verdict
    sentences = [
        _job_sentence(report.run),
        _faults_sentence(verdict),
        _lost_sentence(report),
        f"Of all steps that were begun, {verdict.efficiency:.1%} counted; the others were interrupted or repeated.",
        "Every check below holds."
        if verdict.holds
        else "Something is not as it should be: see the rows marked \u2717.",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _job_sentence(run: History) -> str:
    if not run.began:
        return "No rank of this job began to train."
    first = run.began[0].event
    return (
        f"A training job on {first.replicas * first.stages * first.tp} ranks (data parallel {first.replicas}, pipeline"
        f" parallel {first.stages}, tensor parallel {first.tp}) committed {len(run.commits)} steps."
    )


def _faults_sentence(verdict: CampaignVerdict) -> str:
    if not verdict.outcomes:
        return "No fault was injected."
    injected = sum(outcome.injected_at > 0 for outcome in verdict.outcomes)
    seconds = [outcome.recovered_s for outcome in verdict.outcomes if outcome.recovered_s is not None]
    count = f"Faults injected: {injected} of {len(verdict.outcomes)}."
    if not seconds:
        return f"{count} The job committed no step after them."
    times = f"{statistics.median(seconds):.2f} s later (median; at most {max(seconds):.2f} s)"
    return f"{count} The job went on after {len(seconds)} of them: it committed the next step {times}."


def _lost_sentence(report: PageContent) -> str:
    samples, commits = report.verdict.samples, report.run.commits
    if not commits:
        return ""
    expected = commits if report.reference is None else report.reference.commits
    steps = len(set(range(min(expected, default=1), max(expected, default=0) + 1)) - commits.keys())
    lost = [
        f"{count} {what}"
        for count, what in (
            (steps, "steps are missing"),
            (samples.missing, "samples are missing"),
            (samples.twice, "samples were used twice"),
            (samples.others, "samples are not the reference run's"),
        )
        if count
    ]
    unknown = "" if report.reference is not None else " (without a reference run a sample left out cannot be noticed)"
    return (
        f"{', '.join(lost)}{unknown}." if lost else f"No step was lost, and no sample was lost or used twice{unknown}."
    )


def _rows(verdict: CampaignVerdict) -> list[tuple[str, ...]]:
    rows = []
    for outcome in verdict.outcomes:
        when = f"step {outcome.step}, {outcome.fault_point}" if outcome.fault_point else f"step {outcome.step}"
        fault = (outcome.name, outcome.what, outcome.slot, when if outcome.injected_at else "never")
        times = (_seconds(outcome.detected_s), _seconds(outcome.recovered_s), str(outcome.steps_again))
        mark = _mark(not outcome.problem) + (f" {html.escape(outcome.problem)}" if outcome.problem else "")
        rows.append((mark, *map(html.escape, (*fault, *times))))
    return rows


def _event_lines(report: PageContent) -> list[str]:
    """Return the events in words, once each, with the seconds since training began."""
    lines, headlines = [], set[str]()
    for recorded in sorted(Follower(report.record).news(), key=lambda recorded: recorded.at):
        words = described(recorded)
        if words is None or words[0] in headlines:
            continue
        headlines = {words[0]} if isinstance(recorded.event, Recovered) else headlines | {words[0]}
        lines.append(f"{max(0.0, recorded.at - report.run.began_at):.2f} s: {words[0]}: {words[1]}")
    more = [f"... and {len(lines) - _MAX_EVENTS} more in {report.record}"] if len(lines) > _MAX_EVENTS else []
    return lines[:_MAX_EVENTS] + more


def _mark(holds: bool) -> str:
    return '<span class="yes">✓ yes</span>' if holds else '<span class="no">✗ no</span>'


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _legend(text: str) -> str:
    return f'<p class="small">{html.escape(text)}</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
