"""A rank fails or is killed after the loop of a DeepSpeed script and before the end of the script."""

import re

import pytest

from ntp_plugin.errors import StateLost
from ntp_plugin.testing.faults import kill
from tests.deepspeed.test_recipe import ENVIRONMENT, RECIPES, with_block
from tests.harness.zero.job import STEPS, Job, run
from tests.ranks.command import NTP, Command, assert_all_end, descendants_of, wait_until

SECONDS = 600.0
"""Far above what it takes."""
AFTERWARDS = """
import os, runpy, sys
sys.argv[0] = {recipe!r}
runpy.run_path({recipe!r}, run_name="__main__")
if os.environ["RANK"] == "0":
    None.config
"""


def job(folder, *flags, config, script=RECIPES / "train.py", **environment):
    words = [*NTP, "run", "--standalone", "--nproc-per-node=4", *flags, str(script), "--deepspeed_config", config]
    return Command([*words, "--epochs", "1"], folder / "log", **ENVIRONMENT | environment)


@pytest.mark.short
def test_an_error_of_the_script_ends_the_job(tmp_path):
    """The error is reported as without the plugin."""
    script = tmp_path / "train.py"
    script.write_text(AFTERWARDS.format(recipe=str(RECIPES / "train.py")))
    config = with_block(tmp_path, {"enabled": True}, stage=2)
    code, output = job(tmp_path, "--ntp-respawn=1", config=config, script=script, PAUSE_S="0").end()
    assert code == 9, output
    assert "done: step 32" in output
    assert re.search(r"ntp run: slot 0 \(pid \d+\) failed:\nTraceback (.|\n)*    None.config\n", output)
    assert "slot 0 ended by an error of its own script: AttributeError: 'NoneType' object has no attribute" in output
    assert "starts anew" not in output


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.short)])
def test_a_rank_killed_after_the_loop_loses_its_last_step(stage):
    """The survivors fail: they are not at the step that they reported."""
    with pytest.raises(StateLost, match=f"a rank was lost after the script's last step, {STEPS}, and its part"):
        run(Job(stage=stage), faults=[kill(0, during="between", step=STEPS)])


@pytest.mark.short
def test_no_process_outlives_a_killed_supervisor(tmp_path):
    config = with_block(tmp_path, {"enabled": True}, stage=2)
    running = job(tmp_path, config=config, PAUSE_S="3600")
    try:
        wait_until(lambda: running.output.count("is pid") == 4, lambda: running.output, SECONDS)
    finally:
        pidfds = descendants_of(running.process.pid)
        running.process.kill()
    assert_all_end(pidfds)
    running.process.wait()
