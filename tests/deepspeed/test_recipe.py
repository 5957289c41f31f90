"""The DeepSpeed recipe, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

RECIPES = Path(__file__).parents[2] / "recipes/deepspeed"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PAUSE_S": "0.05"}


def start(*words, **environment):
    launch = [sys.executable, "-m", "ntp_plugin.cli.main", "run", "--standalone"]
    return subprocess.Popen(
        [*launch, *words],
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_until(process, pattern):
    """The output until the pattern appears. As with `python -u`, workers may write within each other's lines."""
    output = ""
    for line in process.stdout:
        output += line
        if re.search(pattern, output):
            return output
    raise AssertionError(f"it never said {pattern}: {output[-3000:]}")


def pids_in(output):
    """Slot -> pid."""
    return {int(slot): int(pid) for slot, pid in re.findall(r"slot (\d+) is pid (\d+)", output)}


def last_of(process):
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output[-3000:]
    found = re.search(r"done: step (\d+), samples (\d+), loss ([\d.]+), weights here ([\d.]+), (\d) ranks", output)
    assert found, output[-3000:]
    step, samples, loss, weights, ranks = found.groups()
    return int(step), int(samples), (float(loss), float(weights)), int(ranks)


def with_block(folder, block, *, ranks=4, of="ds_config.json", stage=None):
    config = json.loads((RECIPES / of).read_text())
    path = folder / f"{'on' if block.get('enabled') else 'off'}.json"
    zero = {} if stage is None else {"zero_optimization": {"stage": stage}}
    path.write_text(json.dumps(config | zero | {"train_batch_size": 16 * ranks, "ntp": block}))
    return str(path)


@pytest.mark.parametrize("config", [pytest.param("ds_config.json", marks=pytest.mark.short), "ds_config_tp.json"])
def test_training_continues_when_a_worker_is_killed(tmp_path, config):
    words = ["--nproc-per-node=4", str(RECIPES / "train.py"), "--epochs=1", "--deepspeed_config"]
    undisturbed = last_of(start(*words, with_block(tmp_path, {"enabled": False}, of=config)))
    process = start(*words, str(RECIPES / config))
    output = output_until(process, r"step 8:")
    os.kill(pids_in(output)[2], signal.SIGKILL)
    reported = re.findall(r"copies take [1-9][\d.]* MB of the memory of host 0, which has 4 ranks", output)
    assert len(reported) == (config == "ds_config.json"), "without ZeRO nothing is copied"
    step, samples, numbers, ranks = last_of(process)
    assert (step, samples, ranks) == (*undisturbed[:2], 3)
    same = 1 if "tp" in config else 2  # where a replica has several slots, the first has more weights now
    assert numbers[:same] == pytest.approx(undisturbed[2][:same], rel=1e-6)


@pytest.mark.parametrize("back", [False, True])
def test_with_an_mpu_two_ranks_leave_and_two_rejoin(tmp_path, back):
    words = ["--nproc-per-node=4", str(RECIPES / "train_mpu.py"), "--epochs=1", "--deepspeed_config"]
    found = []
    for disturbed in (False, True):
        config = json.loads((RECIPES / "ds_config_mpu.json").read_text()) | {"ntp": {"enabled": disturbed}}
        path = tmp_path / f"{disturbed}.json"
        path.write_text(json.dumps(config))
        environment = {"PAUSE_S": "1.0"} if disturbed and back else {}
        process = start(*["--ntp-respawn=2"] * back, *words, str(path), **environment)
        if disturbed:
            os.kill(pids_in(output_until(process, r"step 8:"))[1], signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output[-3000:]
        found.append(re.search(r"done: step (\d+), samples (\d+), weights here ([\d.]+), (\d) ranks", output).groups())
    (undisturbed, disturbed), ranks = [one[:2] for one in found], [one[3] for one in found]
    assert disturbed == undisturbed == ("64", "1024")
    assert ranks == ["4", "4" if back else "2"]
    assert float(found[1][2]) == pytest.approx(float(found[0][2]), rel=1e-6)


@pytest.mark.parametrize(("config", "stage"), [("ds_config.json", None), ("ds_config_tp.json", 1)])
def test_a_job_resumes_from_the_copies_of_a_dead_run(tmp_path, config, stage):
    """The launcher and all workers are killed at once, and nothing was saved."""
    words = ["--nproc-per-node=4", str(RECIPES / "train.py"), "--epochs=1", "--deepspeed_config"]
    undisturbed = last_of(start(*words, with_block(tmp_path, {"enabled": False}, of=config, stage=stage)))
    switched_on = with_block(tmp_path, {"enabled": True}, of=config, stage=stage)
    process = start(*words, switched_on)
    for pid in (process.pid, *pids_in(output_until(process, r"step 16:")).values()):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    step, samples, numbers, ranks = last_of(start("--ntp-resume=latest", *words, switched_on))
    assert (step, samples, ranks) == (*undisturbed[:2], 4)
    assert numbers == pytest.approx(undisturbed[2], rel=1e-6)


def test_a_wrong_key_is_one_line(tmp_path):
    config = with_block(tmp_path, {"enable": True}, ranks=1)
    process = start("--nproc-per-node=1", str(RECIPES / "train.py"), "--deepspeed_config", config)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    (line,) = [line for line in output.splitlines() if line.startswith("ntp: ")]
    assert line.startswith('ntp: ntp.enable is not a known key. Fix: did you mean "enabled"?')
    assert "Traceback" not in output


PLAIN = """
import deepspeed, runpy
runpy.run_path({train!r}, run_name="__main__")
"""


def test_a_job_of_another_kind_may_import_deepspeed(tmp_path):
    """Its process group is made by its own adapter."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN.format(train=str(RECIPES.parent / "plain/train.py")))
    process = start("--nproc-per-node=2", str(script), STEPS="5", PAUSE_S="0")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output[-3000:]
    assert "step 5: loss" in output


NOT_SWITCHED_ON = """
import os, signal
import deepspeed, torch
model = torch.nn.Linear(2, 1)
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print("it has an engine", flush=True)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.alarm(60)
signal.pause()
"""


def test_a_replacement_without_the_plugin_does_not_train_alone(tmp_path):
    script = tmp_path / "off.py"
    script.write_text(NOT_SWITCHED_ON)
    process = start("--nproc-per-node=2", "--ntp-respawn=1", str(script))
    output = []
    for line in process.stdout:
        output.append(line)
        if "the configuration does not enable ntp" in line or len(output) > 500:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "takes the place of a lost one" in output[-1], "".join(output)[-3000:]
    assert sum("it has an engine" in line for line in output) == 2


BY_HAND = """
import ntp_plugin.deepspeed, runpy, sys
sys.argv = ["train.py", "--deepspeed_config", sys.argv[2]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_it_says_how_it_is_started(tmp_path):
    """The script is run by Python itself, which knows of no hook: the configuration alone switches nothing on."""
    config = with_block(tmp_path, {"enabled": True}, ranks=1)
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29481",
    }
    script = BY_HAND.replace("sys.argv[2]", repr(config)).replace("sys.argv[0]", repr(str(RECIPES / "train.py")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "was not started by `ntp run`. Fix: ntp run takes torchrun's flags" in done.stderr
    assert "Traceback" not in done.stderr
