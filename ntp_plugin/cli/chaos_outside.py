"""`ntp chaos outside`: send signals to a job that is started by its own command line, and judge the result."""

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ntp_plugin.chaos.ending import ending_in_waits
from ntp_plugin.chaos.outside.campaign import CampaignRequest, CampaignResult, run_campaign, run_reference
from ntp_plugin.chaos.outside.job_run import Command, InjectionPace
from ntp_plugin.chaos.outside.job_view import LINE
from ntp_plugin.chaos.outside.kinds import FaultKind, kinds
from ntp_plugin.chaos.outside.verdict import Allowed, rows
from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.cli.plan import PIPED_WIDTH
from ntp_plugin.cli.run import thresholds_in
from ntp_plugin.errors import ConfigError
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.output_folders import require_new

_OURS = ("--ntp-run-dir", "--ntp-no-record")
_EXAMPLE = """\
example:
  ntp chaos outside --faults 20 --seed 7 -- \\
      ntp run --standalone --nproc-per-node=8 --ntp-respawn=100 pretrain.py --my-flags

The job runs once without a fault, as the reference, and then again until all faults are injected. In its command line
and its environment {run} is replaced by the folder of each run. A last checkpoint written below that folder is compared
as well.
"""


def run(words: Sequence[str]) -> int:
    """Run the campaign; returns 0 if every fault was survived, 1 if not."""
    parser = _parser()
    at = words.index("--") if "--" in words else len(words)
    parsed, unknown = parser.parse_known_args(list(words[:at]))
    parser.refuse_unknown(unknown)
    asked = _asked(parsed, _job(words[at + 1 :]))
    default = f"build/outside/{time.strftime('%Y%m%d-%H%M%S')}"
    folder = require_new(default if parsed.out is None else parsed.out, "--out").absolute()
    with ending_in_waits() as wait:
        print(f"seed {asked.seed}, {asked.faults} faults; the reference run is in {folder / 'reference'}", flush=True)
        reference = run_reference(asked, folder / "reference", wait=wait)
        found = run_campaign(asked, folder, reference, wait=wait, say=_say)
    (folder / "outside.json").write_text(json.dumps(summary(found, str(folder)), indent=2) + "\n")
    _print(found, folder)
    return 0 if found.holds else 1


def summary(found: CampaignResult, job: str) -> dict[str, Any]:
    """Return the result as the values of outside.json."""
    by_kind = rows(job, found.judged)
    return {
        "faults": sum(_number(row["faults"]) for row in by_kind),
        "wrong": sum(_number(row["wrong"]) for row in by_kind),
        "hung": sum(_number(row["hung"]) for row in by_kind),
        "left_behind": sum(len(one.left) for one in found.judged),
        "not_injected": list(found.not_injected),
        "rows": by_kind,
        "details": [dataclasses.asdict(one) for one in found.judged],
    }


def _number(value: object) -> int:
    assert isinstance(value, int), "it counts something"
    return value


def _job(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words behind `ntp run`; raise `ConfigError` where the command is another one."""
    if len(words) < 3 or Path(words[0]).name != "ntp" or words[1] != "run":
        raise ConfigError(
            f"there is no `ntp run` command behind --, but {' '.join(words[:2]) or 'nothing'}",
            fix="ntp chaos outside -- ntp run --standalone --nproc-per-node=4 train.py",
        )
    for word in words[2:]:
        if word.partition("=")[0] in _OURS:
            raise ConfigError(f"{word}: each run gets a folder of its own", fix=f"leave {_OURS[0]} out; see --out")
    return tuple(words[2:])


def _asked(parsed: argparse.Namespace, words: tuple[str, ...]) -> CampaignRequest:
    thresholds = thresholds_in(words)
    _refuse_pattern(parsed.line)
    bound = parsed.bound
    return CampaignRequest(
        command=Command(words=words, line=parsed.line),
        kinds=_chosen(parsed.kinds, kinds(thresholds)),
        faults=parsed.faults,
        seed=parsed.seed,
        pace=InjectionPace(thresholds=thresholds, every_s=parsed.every, blocks_of=parsed.together),
        allowed=Allowed(
            bound=bound,
            weights_bound=bound if parsed.weights_bound is None else parsed.weights_bound,
            loses_state=parsed.together is None,
        ),
    )


def _refuse_pattern(line: str) -> None:
    try:
        groups = re.compile(line).groupindex.keys()
    except re.error as error:
        raise ConfigError(f"--line {line}: {error}") from None
    if missing := {"step", "loss"} - groups:
        raise ConfigError(f"--line {line} has no group named {min(missing)}", fix="(?P<step>...) and (?P<loss>...)")


def _chosen(listed: str | None, known: Mapping[str, FaultKind]) -> list[FaultKind]:
    if listed is None:
        return [kind for kind in known.values() if not kind.needs_handlers]
    names = [name for name in listed.split(",") if name]
    if not names or (unknown := [name for name in names if name not in known]):
        raise ConfigError(
            f"--kinds: {unknown[0] if names else 'nothing'} is not known",
            fix=f"choose from {', '.join(known)}",
        )
    return [known[name] for name in names]


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="ntp chaos outside",
        usage="ntp chaos outside [flags] -- ntp run ... SCRIPT ARGUMENTS",
        description="Send signals to the processes of a job at random times, and compare it with a run without faults.",
        epilog=_EXAMPLE + "\n" + _glossary(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    some, bound = number(int, least=1, most=1_000_000), number(float, least=0.0)
    parser.add_argument("--faults", type=some, default=20, metavar="N", help="number of faults (default: 20)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the same seed draws the same faults")
    parser.add_argument(
        "--kinds", metavar="A,B", help="kinds of faults (default: all that need no handlers in the script, see below)"
    )
    parser.add_argument(
        "--every",
        type=number(float, least=0.0, most=1e6),
        default=2.0,
        metavar="S",
        help="mean seconds between the return of all ranks to training and the next fault (default: 2)",
    )
    parser.add_argument(
        "--together",
        type=some,
        metavar="N",
        help="choose two ranks that are lost at once from one block of N consecutive ranks: with N = the TP degree,"
        " from one replica (default: any two; the job may then end with code 3, 4 or 8)",
    )
    parser.add_argument(
        "--bound", type=bound, default=1e-6, metavar="X", help="largest relative difference of a loss (default: 1e-6)"
    )
    parser.add_argument(
        "--weights-bound", type=bound, metavar="X", help="the same for the last checkpoint (default: --bound)"
    )
    parser.add_argument(
        "--line",
        default=LINE,
        metavar="REGEX",
        help="pattern of an output line that shows a step and its loss, with groups named step, loss and, if wanted,"
        " rank; for scripts whose losses are not in the record of the run",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for all runs (default: build/outside/TIME)")
    return parser


def _glossary() -> str:
    lines = [f"  {kind.name:<18} {kind.text}{' *' * kind.needs_handlers}" for kind in kinds(Thresholds()).values()]
    return "kinds (*: for a script run by -m ntp_plugin.testing.signal_handlers):\n" + "\n".join(lines)


def _say(what: str) -> None:
    print(what, flush=True)


def _print(found: CampaignResult, folder: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    table = Table(box=None, padding=(0, 2))
    names = ("kind", "faults", "wrong", "hung", "noticed_p50_s")
    for name in names:
        table.add_column(name, header_style="dim")
    for row in rows("", found.judged):
        table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    console.print(table)
    for what in found.missed:
        console.print(f"  could not be injected at first, and was retried: {what}")
    if found.not_injected:
        console.print(
            f"  NO   not injected: {', '.join(found.not_injected)}; the job is too short, or give more respawns"
        )
    total = summary(found, "")
    console.print(
        f"  {'ok  ' if found.holds else 'NO  '} {total['faults']} faults: {total['wrong']} wrong, {total['hung']} hung,"
        f" {total['left_behind']} left behind ({folder}/outside.json)"
    )
