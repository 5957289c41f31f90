"""`ntp chaos`: run a job with the faults of a recipe and judge the result, or inject faults into a running job."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp_plugin.chaos.attach import inject_by, inject_now, job_of
from ntp_plugin.chaos.campaign import Campaign, Look, run_campaign
from ntp_plugin.chaos.ending import Wait, ending_in_waits
from ntp_plugin.chaos.faults import KINDS, OrderedFault
from ntp_plugin.chaos.page import PageContent, write_page
from ntp_plugin.chaos.recipe import Recipe, read_recipe
from ntp_plugin.chaos.verdict import CampaignVerdict
from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.cli.plan import PIPED_WIDTH
from ntp_plugin.cli.screen import Screen
from ntp_plugin.config.schema import read
from ntp_plugin.errors import ConfigError
from ntp_plugin.output_folders import require_new, require_usable
from ntp_plugin.recovery.fault_points import RECOVERY_FAULT_POINTS, STEP_FAULT_POINTS
from ntp_plugin.telemetry.printable import printable

_EXAMPLE = """\
examples:
  ntp chaos recipes/chaos/kill-in-backward.toml
  ntp chaos recipes/chaos/kill-in-backward.toml --job recipes/chaos/jobs/deepspeed.toml
  ntp chaos recipes/chaos/kill-in-backward.toml -- --standalone --nproc-per-node=8 my_pretrain.py ...
    (what follows -- are arguments of ntp run, in place of those of the recipe's job)
  ntp chaos attach my-run --what sigkill --slot r0.s0.t1
  ntp chaos attach my-run recipes/chaos/kill-in-backward.toml
  ntp chaos outside -- ntp run --standalone ...   (see ntp chaos outside --help)
"""


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `chaos` to the commands of `ntp`."""
    parser = commands.add_parser(
        "chaos",
        help="inject faults into a job, and check that it recovers",
        description="Run the job of a recipe, inject the recipe's faults, and compare it with a reference run.",
        epilog=_EXAMPLE + "\n" + _glossary(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.takes_command = True
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a file of recipes/chaos/; or `attach`, followed by the folder of a run and, if wanted, a recipe",
    )
    parser.add_argument("rest", nargs="*", default=(), metavar="RUN_DIR [RECIPE]", help="after `attach`")
    parser.add_argument("--job", metavar="FILE", help="use the job of this file instead of the recipe's")
    parser.add_argument(
        "--reference", metavar="DIR", help="compare with this run, instead of running the job without faults"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the runs and the report (default: build/chaos/RECIPE-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    order = parser.add_argument_group("with attach")
    order.add_argument("--what", choices=tuple(KINDS), metavar="KIND", help="the kind of fault")
    order.add_argument("--slot", help="the slot to inject it into, such as r0.s0.t1")
    order.add_argument("--during", help="the fault point (default: the next one)")
    order.add_argument("--seconds", type=number(float, least=-1e9, most=1e9), help="how long, or how much")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: Any) -> int:
    """Run the campaign of a recipe, or attach to a running job."""
    if parsed.recipe == "attach":
        with ending_in_waits() as wait:
            return _attach(parsed, wait)
    for flag in ("what", "slot", "during", "seconds"):
        if getattr(parsed, flag) is not None:
            raise ConfigError(f"--{flag} needs a job that runs already", fix="ntp chaos attach FOLDER --what ...")
    if parsed.rest:
        raise ConfigError(f"{parsed.rest[0]} is one word too many", fix="write -- before the arguments of ntp run")
    recipe = read_recipe(
        Path(parsed.recipe), job=None if parsed.job is None else Path(parsed.job), run=tuple(parsed.command)
    )
    folder = require_new(_folder(parsed, recipe), "--out")
    with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout), ending_in_waits() as wait:
        reference = None if parsed.reference is None else Path(parsed.reference)
        campaign = run_campaign(recipe, folder, look=_looking, reference=reference, wait=wait)
        page = write_page(_report(campaign, f"ntp chaos {parsed.recipe}"), folder)
    return _show(campaign.verdict, page, parsed, log=campaign.broken.log)


def _folder(parsed: Any, recipe: Recipe) -> Path:
    default = f"build/chaos/{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return require_usable(default if parsed.out is None else parsed.out, "--out")


def _show(verdict: CampaignVerdict, page: Path, parsed: Any, *, log: Path | None) -> int:
    if parsed.json:
        print(page.with_name("verdict.json").read_text())
    else:
        _print(verdict, page, log)
    return 0 if verdict.holds else 1


def _report(campaign: Campaign, command: str) -> PageContent:
    return PageContent(
        title=campaign.recipe.name,
        record=campaign.broken.folder,
        run=campaign.broken.history,
        reference=None if campaign.reference is None else campaign.reference.history,
        verdict=campaign.verdict,
        bound=campaign.recipe.job.bound,
        command=command,
        job=" ".join(campaign.recipe.job.run),
    )


@contextlib.contextmanager
def _looking(name: str) -> Iterator[Look]:
    titles = {"broken": "the job, with faults", "reference": "the same job, without faults"}
    with Screen(titles[name]) as screen:
        yield screen.show


def _attach(parsed: Any, wait: Wait) -> int:
    if parsed.command:
        raise ConfigError("attach takes no arguments of ntp run", fix="see ntp chaos --help")
    if len(parsed.rest) == 2:
        return _attach_recipe(parsed, wait)
    if len(parsed.rest) != 1 or parsed.what is None or parsed.slot is None:
        raise ConfigError(
            "attach takes the folder of a run, and a recipe or --what and --slot", fix="see ntp chaos --help"
        )
    given = {
        name: value for name in ("what", "slot", "during", "seconds") if (value := getattr(parsed, name)) is not None
    }
    fault = read(OrderedFault, {"name": f"attached-{time.time_ns()}", **given}, where="--")
    print(inject_now(Path(parsed.rest[0]), fault, wait=wait))
    return 0


def _attach_recipe(parsed: Any, wait: Wait) -> int:
    run, path = map(Path, parsed.rest)
    recipe = read_recipe(path, run=("a job that is there",))  # in place of the job that the recipe names
    folder = _folder(parsed, recipe)
    job_of(run)  # refuses a folder without a record before any folder is made
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout), Screen(f"{run}, with faults") as screen:
        history, verdict = inject_by(recipe, run, look=screen.show, wait=wait)
        report = PageContent(
            title=recipe.name,
            record=run,
            run=history,
            reference=None,
            verdict=verdict,
            bound=0.0,
            command=f"ntp chaos attach {run} {path}",
            job=str(run),
        )
        page = write_page(report, folder)
    return _show(verdict, page, parsed, log=None)


def _print(verdict: CampaignVerdict, page: Path, log: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    table = Table(box=None, padding=(0, 2))
    for heading in ("fault", "kind", "slot", "when", "detected after", "next step after", ""):
        table.add_column(heading, header_style="dim")
    for outcome in verdict.outcomes:
        when = f"step {outcome.step}" + f", {outcome.fault_point}" * bool(outcome.fault_point)
        cells = (
            outcome.name,
            outcome.what,
            outcome.slot,
            when if outcome.step or outcome.fault_point else "",
            _seconds(outcome.detected_s),
            _seconds(outcome.recovered_s),
            outcome.problem or ("ok" if outcome.injected_at else "never injected"),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells), style="bright_red" if outcome.problem else "")
    console.print(table)
    for check in verdict.checks:
        console.print(Text(printable(f"  {'ok  ' if check.holds else 'NO  '} {check.what}: {check.found}")))
    if log is not None and not verdict.holds:
        console.print(f"  log of the job: {log}")
    console.print(f"  report: {page}")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _glossary() -> str:
    parts = (
        ("kinds", KINDS),
        ("fault points of a step", STEP_FAULT_POINTS),
        ("fault points of a recovery", RECOVERY_FAULT_POINTS),
    )
    return "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<12} {text}" for name, text in known.items()) for title, known in parts
    )
