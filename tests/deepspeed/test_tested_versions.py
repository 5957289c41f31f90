"""A DeepSpeed whose functions are not the tested ones is refused at the real start, and an unknown version reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.command import NTP, Command

RECIPES = Path(__file__).parents[2] / "recipes/deepspeed"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
ALTER = """
from ntp_plugin.launch.script import after_import

def alter():
    import deepspeed.runtime.engine as engine
    import deepspeed.utils.bwc as bwc
    engine.DeepSpeedEngine._flush_coalesced_reduction_zero12 = lambda self, optimizer, shards: None
    del bwc.bwc_pipeline_parallel_world_size

after_import("deepspeed.runtime.engine", alter)
"""
UNKNOWN = """
from ntp_plugin.launch.script import after_import

def rename():
    import deepspeed.git_version_info as info
    info.version = "0.21.0"

after_import("deepspeed.git_version_info", rename)
"""
RUN = f"""
import runpy
runpy.run_path({str(RECIPES / "train.py")!r}, run_name="__main__")
"""
CHECK = """
import sys
{alter}
from ntp_plugin.cli import main
sys.exit(main.main(["check", *sys.argv[1:]]))
"""


def start(tmp_path, alter, *, enabled=True, ranks=2):
    script, config = tmp_path / "script.py", tmp_path / "ds_config.json"
    script.write_text(alter + RUN)
    block = {"train_batch_size": 16 * ranks, "ntp": {"enabled": enabled}}
    config.write_text(json.dumps(json.loads((RECIPES / "ds_config.json").read_text()) | block))
    command = [*NTP, "run", "--standalone", f"--nproc-per-node={ranks}", str(script), "--epochs=1"]
    return Command([*command, "--deepspeed_config", str(config)], tmp_path / "log", **ENVIRONMENT).end()


@pytest.mark.short
def test_changed_functions_are_refused_by_name_where_the_configuration_enables_the_plugin(tmp_path):
    code, output = start(tmp_path, ALTER, ranks=1)
    assert code == 2, output
    assert "_flush_coalesced_reduction_zero12 is (self, optimizer, shards), tested as (self, optimizer)" in output
    assert "deepspeed.utils.bwc:bwc_pipeline_parallel_world_size is missing" in output
    assert "deepspeed 0.19.8 (tested: 0.19.8): " in output
    assert "Fix: pip install 'deepspeed==0.19.8'" in output
    assert "Traceback" not in output, output
    assert "step 1:" not in output


def test_without_the_plugin_a_changed_function_is_nobodys_concern(tmp_path):
    code, output = start(tmp_path, ALTER, enabled=False)
    assert code == 0, output
    assert "done: step" in output


def test_an_unknown_version_trains_after_one_line_of_warning(tmp_path):
    code, output = start(tmp_path, UNKNOWN)
    assert code == 0, output
    assert output.count("ntp_plugin was not tested with deepspeed 0.21.0 (tested: 0.19.8)") == 1, output
    assert "done: step" in output


@pytest.mark.parametrize("alter", [ALTER, UNKNOWN], ids=["changed", "unknown"])
def test_the_check_reports_it(alter):
    command = [sys.executable, "-W", "ignore", "-c", CHECK.format(alter=alter), str(RECIPES / "ds_config.json")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if alter is UNKNOWN:
        assert done.returncode == 0, done.stderr
        assert "note ntp_plugin was not tested with deepspeed 0.21.0" in " ".join(done.stdout.split())
    else:
        assert done.returncode == 2, done.stderr  # the check itself needs what is missing
        assert "deepspeed.utils.bwc:bwc_pipeline_parallel_world_size is missing" in done.stderr
        assert "Traceback" not in done.stderr
