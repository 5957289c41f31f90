"""`ntp status`: watch a running job, from its record."""

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
from ntp_plugin.telemetry.whereabouts import nobody_is_left

_LOOK_S = 0.2
_DEAD = 1


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `status` to the commands of `ntp`."""
    parser = commands.add_parser(
        "status",
        help="watch a running job",
        description="Show slots, widths of replicas and the step, until the job is over or dead (code 1), or Ctrl-C.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, once")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: Any) -> int:
    """Run the command; return its exit code."""
    folder = arguments.folder or newest_record()
    job = job_of(folder)
    if arguments.json:
        known = {name: value for name, value in dataclasses.asdict(job).items() if not name.startswith("_")}
        print(json.dumps({**known, "goodput": job.goodput, "whole": job.whole}))
        return 0
    return follow(folder, Screen(str(folder)))


def follow(folder: Path, shown: Screen) -> int:
    """Show the job until it records its end, or no process is left that could; return the exit code."""
    state, follower = JobState(), Follower(folder)
    with shown as screen:
        while not state.ended:
            no_process_left = nobody_is_left(state)  # before the last events are read
            news = follower.news()
            for recorded in news:
                state.hear(recorded)
            screen.show(state, news)
            if no_process_left and not news:
                break
            time.sleep(_LOOK_S)
    if not state.ended:
        named = printable(folder)
        print(
            f"ntp: no process is left: none that {named} records is alive on this machine, and none recorded the job's"
            f" end; step {state.step} was the last. See ntp report, and ntp copies for the copies of its state"
        )
    return 0 if state.ended else _DEAD
