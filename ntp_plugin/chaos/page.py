"""The report on a run, broken on purpose or not: one page that holds all of it, and the same as JSON."""

import dataclasses
import html
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ntp_plugin.chaos.charts import NO_PICTURE, pictures, sheet
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import CampaignVerdict
from ntp_plugin.telemetry import Follower
from ntp_plugin.telemetry.event_text import in_words

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
_HAPPENED = 200
"""Lines of what happened; a long campaign has its record."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageContent:
    """What is to be shown."""

    title: str
    record: Path
    """The folder of the run."""
    run: History
    reference: History | None
    verdict: CampaignVerdict
    bound: float = 0.0
    """For losses against the reference run's."""
    command: str
    job: str = ""
    """The command of the run, where it is known."""


def write_page(report: PageContent, folder: Path) -> Path:
    """`report.html`, its pictures as `report.png`, and `verdict.json`; where the page is."""
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
        "strikes": [dataclasses.asdict(outcome) for outcome in verdict.outcomes],
    }


def _page(report: PageContent) -> str:
    verdict = report.verdict
    drawn = pictures(report.run, report.reference, verdict, bound=report.bound)
    shown = "".join(f"<h2>{html.escape(title)}</h2>{svg.decode()}" for title, svg in drawn.items())
    checks = [(_mark(check.holds), html.escape(check.what), html.escape(check.found)) for check in verdict.checks]
    faults = _table(("", "strike", "what", "slot", "when", "noticed after", "next step after", "again"), _rows(verdict))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(report.title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(report.title)}</h1>
<p>{_summary(verdict)}</p>
{"".join(f"<p>Left out: {html.escape(line)}</p>" for line in verdict.left_out)}
<h2>What was checked</h2>
{_table(("", "what", "found"), checks)}
{f"<h2>The strikes</h2>{faults}" if verdict.outcomes else ""}
{shown or f"<p>{html.escape(NO_PICTURE)}</p>"}
<h2>What happened</h2>
<ol>{"".join(f"<li>{html.escape(line)}</li>" for line in _happened(report)) or "<li>Nothing.</li>"}</ol>
<footer><p><code>{html.escape(report.command)}</code>, {time.strftime("%Y-%m-%d %H:%M")},
{html.escape(platform.platform())}, Python {html.escape(sys.version.split()[0])}.
{f"The job: <code>ntp run {html.escape(report.job)}</code>" if report.job else ""}</p></footer>
</body></html>
"""


def _summary(verdict: CampaignVerdict) -> str:
    outcome = "Everything is as promised." if verdict.holds else "Something is not as it should be: see below."
    injected = sum(outcome.injected_at > 0 for outcome in verdict.outcomes)
    faults = f" {injected} of {len(verdict.outcomes)} strikes struck;" if verdict.outcomes else ""
    return f"{_mark(verdict.holds)} {outcome}{faults} {verdict.efficiency:.1%} of the steps that were begun counted."


def _rows(verdict: CampaignVerdict) -> list[tuple[str, ...]]:
    rows = []
    for outcome in verdict.outcomes:
        when = f"step {outcome.step}, {outcome.fault_point}" if outcome.fault_point else f"step {outcome.step}"
        told = (outcome.name, outcome.what, outcome.slot, when if outcome.injected_at else "never")
        times = (_seconds(outcome.detected_s), _seconds(outcome.recovered_s), str(outcome.steps_again))
        mark = _mark(not outcome.problem) + (f" {html.escape(outcome.problem)}" if outcome.problem else "")
        rows.append((mark, *map(html.escape, (*told, *times))))
    return rows


def _happened(report: PageContent) -> list[str]:
    """In words, once each, with the seconds since training began."""
    lines, said = [], set[str]()
    for told in sorted(Follower(report.record).news(), key=lambda told: told.at):
        words = in_words(told)
        if words is None or words[0] in said:
            continue
        said = {words[0]} if words[0].startswith("the job goes on") else said | {words[0]}
        lines.append(f"{max(0.0, told.at - report.run.began_at):.2f} s: {words[0]}: {words[1]}")
    more = [f"... and {len(lines) - _HAPPENED} more in {report.record}"] if len(lines) > _HAPPENED else []
    return lines[:_HAPPENED] + more


def _mark(holds: bool) -> str:
    return '<span class="yes">✓ yes</span>' if holds else '<span class="no">✗ no</span>'


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
