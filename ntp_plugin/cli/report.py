"""`ntp report`: writes a page about a run, from its record."""

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
        help="write a page about a run, from its record",
        description="Write report.html into the folder of a run: losses, throughput, which slots trained, all events.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument(
        "--reference", metavar="RUN_DIR", type=Path, help="a run of the same job without faults, to compare with"
    )
    parser.add_argument(
        "--bound",
        type=number(float, least=0.0),
        default=1e-6,
        help="largest relative difference of losses and weights from the reference run (default: %(default)s)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(parsed: Any) -> int:
    """Write the page and print its checks; return 1 where one fails."""
    folder = parsed.folder or newest_record()
    history = History.of(read_run(folder))
    reference = None if parsed.reference is None else History.of(read_run(parsed.reference))
    report = PageContent(
        title=str(folder),
        record=folder,
        run=history,
        reference=reference,
        verdict=look_over(history, reference, bound=parsed.bound),
        bound=parsed.bound,
        command=f"ntp report {folder}" + (f" --reference run {parsed.reference}" if parsed.reference else ""),
    )
    print(printable(write_page(report, folder)))
    for check in report.verdict.checks:
        print(printable(f"  {'ok  ' if check.holds else 'NO  '} {check.what}: {check.found}"))
    for line in report.verdict.left_out:
        print(printable(f"  left out: {line}"))
    return 0 if report.verdict.holds else 1
