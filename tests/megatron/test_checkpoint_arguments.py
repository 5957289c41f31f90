"""Arguments that Megatron takes from a checkpoint (`--use-checkpoint-args`).

A live job sees them, and a checkpoint that was saved while a rank was lost holds those of the nominal layout.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import COMMON, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, saving

FLOAT64 = BOUNDS["float64"]
MODEL = frozenset(
    {word for word in MODELS[BASE].split() if word.startswith("--")}
    | {"--num-layers", "--hidden-size", "--num-attention-heads", "--kv-channels", "--ffn-hidden-size", "--seq-length"}
    | {"--max-position-embeddings", "--attention-dropout", "--hidden-dropout"}
)
"""What the second run leaves to the checkpoint: all of the model."""
LAYOUT = frozenset({"--tensor-model-parallel-size", "--pipeline-model-parallel-size"})
FROM_CHECKPOINT = "--use-checkpoint-args"


@pytest.fixture(scope="module")
def degraded_checkpoint(tmp_path_factory):
    """Runs a live job up to its middle, where it saves without one of its ranks: what they saw, and where it saved."""

    @functools.cache
    def saved():
        folder = tmp_path_factory.mktemp("saved")
        job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=saving(folder))
        lived, _ = live(job, faults=[kill(3, during="backward", step=5)])
        return {slot: one.seen for slot, one in lived.items()}, folder

    return saved


def resumed(folder, *, enabled, left_out=MODEL, more=""):
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=enabled, left_out=left_out)
    return dataclasses.replace(job, more=f"--load {folder} {FROM_CHECKPOINT} {more}")


def assert_same_training(outcomes):
    worst = largest_differences(outcomes, run(uniform(BASE)))
    assert max(worst.values()) <= FLOAT64, worst


def test_a_live_job_takes_its_model_from_a_checkpoint_and_survives(tmp_path, degraded_checkpoint):
    """The process that rejoins reads a checkpoint by itself: the newest, which this job has saved."""
    first, saved = degraded_checkpoint()
    folder = shutil.copytree(saved, tmp_path / "saved")
    job = resumed(folder, enabled=True, more=f"--save {folder} --save-interval 2")
    assert not set(job.words) & MODEL
    lived, _ = live(job, faults=[kill(1, during="backward", step=4)], back={1: 8})  # two steps, a save, and so on
    assert {one.width for one in lived.values()} == {2}
    assert_same_training(joined(first, as_if_always_there(lived)))


def test_stock_megatron_takes_model_and_layout_from_a_checkpoint_of_a_degraded_job(degraded_checkpoint):
    first, folder = degraded_checkpoint()
    stock = resumed(folder, enabled=False, left_out=MODEL | LAYOUT, more="--use-mp-args-from-checkpoint-args")
    assert not set(stock.words) & (MODEL | LAYOUT)
    assert_same_training(joined(first, run(stock)))


PROBE = """
import json, sys
from ntp_plugin.errors import ConfigError
from ntp_plugin.megatron import job_check
from ntp_plugin.planning.job_check import StartedRanks

few, folder = sys.argv[2:], sys.argv[1]
from_checkpoint = ["--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--ntp-enable"]

def checked(*more):
    found = job_check.check_job([*few, *from_checkpoint, *more], StartedRanks())
    return {"notes": found.notes, "tp": found.topology.tp, "unsupported": [option.flag for option in found.unsupported]}

def refused(*more):
    try:
        return checked(*more)
    except ConfigError as error:
        return str(error)

from megatron.core import dist_checkpointing
saved = dist_checkpointing.load_common_state_dict(f"{folder}/iter_0000010")["args"]
print(json.dumps({
    "checked": checked("--load", folder),
    "refused": refused("--load", folder, "--multi-latent-attention", "--transformer-impl", "local"),
    "nowhere": refused(),
    "empty": refused("--load", folder + "/none"),
    "saved": [saved.world_size, saved.data_parallel_size, saved.tensor_model_parallel_size],
}))
"""


def test_a_check_reads_the_checkpoint(degraded_checkpoint):
    _, folder = degraded_checkpoint()
    job = Job(model=MODELS[BASE], tp=2, dp=2, left_out=MODEL | LAYOUT)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, str(folder), *job.words],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    found = json.loads(found.stdout.splitlines()[-1])
    assert found["checked"]["tp"] == 2
    assert not found["checked"]["unsupported"]
    assert f"{FROM_CHECKPOINT}: read from the checkpoint in {folder}" in found["checked"]["notes"]
    assert "--multi-latent-attention with --transformer-impl local" in found["refused"]["unsupported"]
    assert "without a checkpoint" in found["nowhere"]
    assert "--num-layers, --hidden-size" in found["empty"], "there is no checkpoint, so flags are missing"
    assert found["saved"] == [4, 2, 2]


def test_the_flags_that_are_left_out_are_those_of_the_model():
    words = COMMON.split()
    assert {flag for flag in MODEL if flag in words} == {
        *("--hidden-size", "--num-attention-heads", "--kv-channels", "--ffn-hidden-size", "--seq-length"),
        *("--max-position-embeddings", "--attention-dropout", "--hidden-dropout"),
    }
