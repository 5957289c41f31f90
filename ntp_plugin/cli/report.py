"""`ntp report`: a page on a run, from its record."""

import argparse
from pathlib import Path
from typing import Any

from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.page import PageContent, write_page
from ntp_plugin.chaos.verdict import look_over
from ntp_plugin.cli.parser import OneLineParser, add_run, number
from ntp_plugin.launch.records import newest_record
from ntp_plugin.telemetry import read_run
from ntp_plugin.telemetry.printable import printable


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `report` to the commands of `ntp`."""
    parser = commands.add_parser(
        "report",
        help="make a page on a run, from its record",
        description="Make report.html in the folder of a run: losses, throughput, who was there, what happened.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--reference", metavar="RUN_DIR", type=Path, help="the same job, undisturbed, to compare with")
    parser.add_argument(
        "--bound",
        type=number(float, least=0.0),
        default=1e-6,
        help="how far losses and weights may be from the reference run's (default: %(default)s)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(said: Any) -> int:
    """Read, judge and write."""
    folder = said.folder or newest_record()
    told = History.of(read_run(folder))
    reference = None if said.reference is None else History.of(read_run(said.reference))
    report = PageContent(
        title=str(folder),
        record=folder,
        run=told,
        reference=reference,
        verdict=look_over(told, reference, bound=said.bound),
        bound=said.bound,
        command=f"ntp report {folder}" + (f" --reference run {said.reference}" if said.reference else ""),
    )
    print(printable(write_page(report, folder)))
    for check in report.verdict.checks:
        print(printable(f"  {'ok  ' if check.holds else 'NO  '} {check.what}: {check.found}"))
    for line in report.verdict.left_out:
        print(printable(f"  left out: {line}"))
    return 0 if report.verdict.holds else 1
