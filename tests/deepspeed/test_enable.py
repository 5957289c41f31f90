"""`ntp_plugin.deepspeed.enable`: a script that makes its own process group, and one that calls it too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.command import NTP, Command

ROOT = Path(__file__).parents[2]
TOO_LATE = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from ntp_plugin.deepspeed import enable
enable()
"""


@pytest.mark.short
def test_the_example_of_a_script_that_makes_its_process_group_runs(tmp_path):
    script = ROOT / "docs" / "examples" / "deepspeed_enable.py"
    command = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(script)]
    code, output = Command(command, tmp_path / "log", STEPS="5", DS_ACCELERATOR="cpu").end()
    assert code == 0, output
    assert "step 5: loss" in output


def test_a_late_call_is_one_line():
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TOO_LATE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "ntp: ntp_plugin.deepspeed.enable() is called too late: the process group is made. Fix" in done.stderr
    assert "Traceback" not in done.stderr
