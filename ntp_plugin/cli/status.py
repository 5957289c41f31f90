"""`ntp status`: what a running job looks like, by its record."""

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
        description="Show who is there, how wide and how far, until the job is over or dead (code 1), or Ctrl-C.",
        allow_abbrev=False,
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, once")
    parser.set_defaults(run=run, parser=parser)


def run(said: Any) -> int:
    """Follow it."""
    folder = said.folder or newest_record()
    job = job_of(folder)
    if said.json:
        known = {name: value for name, value in dataclasses.asdict(job).items() if not name.startswith("_")}
        print(json.dumps({**known, "goodput": job.goodput, "whole": job.whole}))
        return 0
    return follow(folder, Screen(str(folder)))


def follow(folder: Path, shown: Screen) -> int:
    """Until the job has told its end, or nobody is left who could."""
    state, follower = JobState(), Follower(folder)
    with shown as screen:
        while not state.ended:
            alone = nobody_is_left(state)  # before what they told at last is read
            news = follower.news()
            for told in news:
                state.hear(told)
            screen.show(state, news)
            if alone and not news:
                break
            time.sleep(_LOOK_S)
    if not state.ended:
        named = printable(folder)
        print(
            f"ntp: nobody is left: no process that {named} tells of is alive on this machine, and none has told the"
            f" job's end; step {state.step} was the last. See ntp report, and ntp copies for what there is of it"
        )
    return 0 if state.ended else _DEAD
