"""A process with other settings than the others is refused, with the names of the differences."""

import os
import signal
from pathlib import Path

import pytest

from tests.ranks.command import NTP, PAUSED, RECIPES, Command, last_line

WAYS = [
    pytest.param("--seed=4", r"argument 1 (arguments) is '--seed=4' here and not set there", id="argument"),
    pytest.param("NVTE_X=1", "NVTE_X (environment) is 1 here and not set there", id="variable"),
    pytest.param("version=0.0.7", "ntp-plugin (versions) is 0.0.7 here and ", id="version"),
]


LONG_S = 300


def job(folder, deviant, *flags, recipe="train.py", **environment):
    words = {"RECIPE": str(RECIPES / recipe), "PLAYED": str(PAUSED), "STEPS": "200", "PAUSE_S": "0.5"} | environment
    script = Path(__file__).with_name("deviating.py")
    return Command([*NTP, "run", "--standalone", *flags, str(script)], folder / "log", DEVIANT=deviant, **words)


@pytest.mark.parametrize(("way", "named"), WAYS)
def test_a_joining_process_with_other_settings_is_refused_and_the_job_continues(tmp_path, way, named):
    """Each process that is started in its place is refused too; there are no more of them than --ntp-respawn says."""
    running = job(tmp_path, f"1:joining {way}", "--nproc-per-node=3", "--ntp-respawn=2")
    os.kill(int(running.wait_for(r"slot 1 is pid (\d+)")[1]), signal.SIGKILL)
    running.wait_for(
        r"slot 1 is lost: its process ended with code 2(.|\n)*slot 1 is lost: its process ended with code 2"
    )
    running.go_on()
    code, output = running.end()
    assert code == 0, output
    assert output.count("is not admitted, because its training would differ") == 2
    assert named.replace("'", "") in output.replace("'", "")
    assert output.count("slot 1 starts anew") == 2
    assert last_line(output)[-1] == "(0, 2)"


@pytest.mark.parametrize("recipe", ["train.py", "train_tp.py"])
def test_founders_with_other_settings_end_the_job_before_its_first_step(tmp_path, recipe):
    running = job(tmp_path, "2:founding --seed=4 NVTE_X=1", "--nproc-per-node=4", recipe=recipe)
    code, output = running.end()
    assert code == 2, output
    for name in ("argument 1 (arguments) is --seed=4 here", "NVTE_X (environment) is 1 here and not set there"):
        assert name in output.replace("'", "")
    assert "rank 2 (here) and rank 0 (there)" in output
    assert "step" not in output
