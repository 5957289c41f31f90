"""The table of refusals against the parser of the installed Megatron, in a process of its own: it changes torch."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import argparse, contextlib, io, json, types
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
with contextlib.redirect_stdout(io.StringIO()):
    from megatron.training.arguments import add_megatron_arguments
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
from ntp_plugin.megatron.unsupported import PLANNED, TABLE

class Watched:
    def __init__(self, args):
        self.args, self.missing = args, []

    def __getattr__(self, name):
        if not hasattr(self.args, name):
            self.missing.append(name)
        return getattr(self.args, name)

watched = Watched(parser.parse_args([]))
applies = [refusal.flag for refusal in (*TABLE, *PLANNED) if refusal.applies(watched)]
unknown = [refusal.flag for refusal in TABLE if refusal.flag.split()[0] not in parser._option_string_actions]
print(json.dumps({"missing": watched.missing, "unknown": unknown, "applies": applies}))
"""


@pytest.mark.short
def test_every_refusal_checks_an_argument_of_megatron():
    environment = {**os.environ, "NTP_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found["missing"] == found["unknown"] == []
    assert found["applies"] == ["--use-cpu-initialization"], "of Megatron's defaults, and in a planned layout alone"
