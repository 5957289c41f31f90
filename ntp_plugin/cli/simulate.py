"""`ntp simulate`: shows what losses cost, policy by policy, and searches schedules for errors of the protocol.

Reads a scenario from a file, from flags, or from both (flags win).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ntp_plugin.cli.configured import add_file, configured
from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.cli.simulate_tables import print_report
from ntp_plugin.config import schema
from ntp_plugin.errors import ConfigError
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.rules import PLANTED
from ntp_plugin.simulator.protocol.search import BrokenLaw, replay, search
from ntp_plugin.simulator.report import SimulationReport, simulate, work_of
from ntp_plugin.simulator.scenario import Scenario, Simulation

PIPED_WIDTH = 140
EXIT_FOUND = 1
SEEDS_AT_ONCE = 200
_LEAST = "write at least [parallel] and [model], and days or failed_up_to; recipes/simulate/ has examples"

_EXAMPLE = """\
examples:
  ntp simulate recipes/simulate/paper-480b.toml --plot build/paper.png
  ntp simulate recipes/simulate/h100-chooser.toml --days 90 --seed 7 --json
  ntp simulate --search 20000        the live protocol under 20,000 drawn schedules
"""


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `simulate` to the commands of `ntp`."""
    parser = commands.add_parser(
        "simulate",
        help="show what losses cost, policy by policy",
        description="Simulate a cluster that loses GPUs: throughput by policy, spares, and what the chooser would do.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_file(parser)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the report into this .png, .svg or .pdf")
    live = parser.add_argument_group("the live protocol under drawn schedules, in place of a cluster")
    seed, some = number(int, least=0), number(int, least=1)
    live.add_argument("--search", type=some, metavar="N", help="run N schedules, beginning with --seed")
    live.add_argument("--replay", type=seed, metavar="SEED", help="run one schedule again")
    live.add_argument("--planted", metavar="BUG", help=f"plant a bug: {', '.join(PLANTED)}")
    schema.add_flags(parser.add_argument_group("the scenario"), Simulation)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the simulation or the search, and print the result."""
    if parsed.search is not None or parsed.replay is not None:
        return _look_at_schedules(parsed)
    if parsed.planted is not None:
        raise ConfigError("--planted needs --search or --replay", fix="add one of them")
    scenario = Scenario(asked=configured(Simulation, parsed, least=_LEAST))
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    report = _last(simulate(scenario), of=work_of(scenario))
    if parsed.plot is not None:
        _plot(report, Path(parsed.plot))
    if parsed.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
        return 0
    print_report(scenario, report, console)
    return 0


def _last(reports: Iterable[SimulationReport], *, of: int) -> SimulationReport:
    """Return the complete report, and show a progress bar while it grows."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=of)
        report = None
        for report in reports:  # noqa: B007 - the last one is wanted
            progress.advance(task)
    assert report is not None, "there is one before any work"
    return report


def _plot(report: SimulationReport, path: Path) -> None:
    try:
        from ntp_plugin.cli.simulate_plots import draw  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}", fix="install ntp-plugin[plots], or use --json") from None
    draw(report, path)


# ---------------------------------------------------------------- schedules


def _look_at_schedules(parsed: argparse.Namespace) -> int:
    if parsed.replay is not None:
        return _replay(parsed.replay, parsed.planted)
    wanted = parsed.search
    first = int(schema.flag_values(Simulation, parsed).get("seed", 0))
    events = faults = 0
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("schedules", total=wanted)
        for seed in range(first, first + wanted, SEEDS_AT_ONCE):
            searched = search(range(seed, min(seed + SEEDS_AT_ONCE, first + wanted)), parsed.planted)
            progress.advance(task, searched.seeds)
            if searched.found is not None:
                print(searched.found)
                return EXIT_FOUND
            events, faults = events + searched.events, faults + searched.faults
    print(f"{wanted:,} schedules, {faults:,} faults, {events:,} events: no law is broken")
    return 0


def _replay(seed: int, planted: str | None) -> int:
    try:
        outcome = replay(seed, planted)
    except Violation as law:
        print(BrokenLaw(seed=seed, law=str(law), planted=planted))
        return EXIT_FOUND
    print(f"seed {seed}: {outcome.faults} faults, {outcome.epochs} epochs, {outcome.events} events: no law is broken")
    return 0
