"""`ntp status`: shows a running job, from its record."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from ntp_plugin.chaos.attach import job_of
from ntp_plugin.cli.parser import OneLineParser, add_run
from ntp_plugin.cli.screen import Screen
from ntp_plugin.launch.records import newest_record
from ntp_plugin.telemetry import Follower
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.printable import printable
from ntp_plugin.telemetry.whereabouts import all_have_ended

_LOOK_S = 0.2
_DEAD = 1


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `status` to the commands of `ntp`."""
    parser = commands.add_parser(
        "status",
        help="watch a running job",
        description="Show the slots of a job, its widths and its step, until the job ends, dies (code 1), or Ctrl-C.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, once")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: Any) -> int:
    """Show the job until it ends, or print its state as JSON; return the exit code."""
    folder = parsed.folder or newest_record()
    job = job_of(folder)
    if parsed.json:
        known = {name: value for name, value in dataclasses.asdict(job).items() if not name.startswith("_")}
        print(json.dumps({**known, "goodput": job.goodput, "whole": job.whole}))
        return 0
    return follow(folder, Screen(str(folder)))


def follow(folder: Path, shown: Screen) -> int:
    """Show the job until its end is recorded (0), or no process is left that could record it (1)."""
    state, follower = JobState(), Follower(folder)
    with shown as screen:
        while not state.ended:
            alone = all_have_ended(state)  # asked before the last events are read
            news = follower.news()
            for event in news:
                state.receive(event)
            screen.show(state, news)
            if alone and not news:
                break
            time.sleep(_LOOK_S)
    if not state.ended:
        named = printable(folder)
        print(
            f"ntp: the job is dead: no process in the record {named} is alive on this machine, and the record has no"
            f" end; its last step is {state.step}. See ntp report, and ntp copies list for its copies"
        )
    return 0 if state.ended else _DEAD
