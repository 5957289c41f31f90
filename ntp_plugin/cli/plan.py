"""`ntp plan`: shows what every survivor would do if some slots were lost.

Reads a job from a file, from flags, or from both (flags win). It needs no GPU and starts nothing.
"""

import argparse
import sys

from rich.console import Console

from ntp_plugin.cli.configured import add_file, configured
from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.cli.plan_tables import print_plan
from ntp_plugin.config import schema
from ntp_plugin.config.sections import Job
from ntp_plugin.planning import job_plan
from ntp_plugin.planning.recovery_plan import as_json

PIPED_WIDTH = 140
_LEAST = "write at least [parallel] and [model]; recipes/plan/ has examples"

_EXAMPLE = """\
example:
  ntp plan --tp 8 --pp 4 --dp 32 --heads 64 --groups 8 --ffn 28672 --vocab 128256 \\
           --layers 80 --hidden 8192 --lose r3.s1.t5
  ntp plan recipes/plan/llama-70b.toml --lose r3.s1.t5 --json
"""


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `plan` to the commands of `ntp`."""
    parser = commands.add_parser(
        "plan",
        help="show what would happen if slots were lost",
        description="Show what every survivor would do if slots were lost: widths, who gets what, lanes, batch, bytes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_file(parser)
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    schema.add_flags(parser.add_argument_group("the job, the policy and the losses"), Job)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Make the plan and print it."""
    plan = job_plan.plan(configured(Job, parsed, least=_LEAST))
    if parsed.json:
        print(as_json({"digest": plan.digest, "plan": plan}))
        return 0
    print_plan(plan, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False))
    return 0
