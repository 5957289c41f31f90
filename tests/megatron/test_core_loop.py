"""A hand-written loop over megatron.core, in `elastic`, against the same loop without the plugin and without faults."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ntp_plugin.testing.faults import kill
from tests.harness.parity.core_loop import STEPS, CoreJob, by_itself, within
from tests.ranks.command import NTP, Command, descendants

EXAMPLE = Path(__file__).parents[2] / "docs/examples/megatron_core_loop.py"
BOUND = 1e-12
JOB, SHARDED, PIPELINE = CoreJob(), CoreJob(sharded=True), CoreJob(pp=2)

reference = functools.cache(by_itself)


def worst_of(trained, of=JOB):
    """The largest relative difference of losses, and of weights on slots with their nominal part."""
    stock = reference(of)
    found = [0.0]
    for slot, one in trained.items():
        found += [abs(loss / stock[slot].losses[step] - 1) for step, loss in one.losses.items()]
        for name, weights in one.weights.items() if one.width == 2 else ():
            expected = stock[slot].weights[name]
            found.append(float(np.abs(weights - expected).max() / np.abs(expected).max()))
    return max(found)


def assert_all_steps(trained, slots):
    for slot in slots:
        assert sorted(trained[slot].losses) == list(range(1, STEPS + 1)), slot


def test_without_a_loss_it_is_the_loop_by_itself():
    trained = within(JOB)
    assert_all_steps(trained, range(4))
    assert worst_of(trained) <= BOUND


@pytest.mark.parametrize(
    "fault_point", ["forward", pytest.param("backward", marks=pytest.mark.short), "reduce", "vote", "apply", "applied"]
)
def test_a_rank_dies(fault_point):
    trained = within(JOB, faults=[kill(3, during=fault_point, step=3)])
    assert {slot: one.width for slot, one in trained.items()} == {0: 2, 1: 2, 2: 1}
    assert_all_steps(trained, range(3))
    assert worst_of(trained) <= BOUND


@pytest.mark.parametrize("slot", [0, 3])
def test_a_rank_comes_back(slot):
    """It asks in step 6, whose vote has the others admit it before the next."""
    trained = within(JOB, faults=[kill(slot, during="backward", step=3)], back={slot: 6})
    assert {slot: one.width for slot, one in trained.items()} == dict.fromkeys(range(4), 2)
    assert sorted(trained[slot].losses) == list(range(7, STEPS + 1)), "it counts the steps of the others"
    assert worst_of(trained) <= BOUND


def test_sharded_state_comes_from_copies():
    trained = within(SHARDED, faults=[kill(3, during="backward", step=3)])
    assert_all_steps(trained, range(3))
    assert worst_of(trained) <= BOUND


def test_a_stage_of_a_single_replica_goes_on_narrower():
    """The last stage is on slots 2 and 3."""
    trained = within(PIPELINE, faults=[kill(3, during="backward", step=3)])
    assert {slot: one.width for slot, one in trained.items()} == {0: 2, 1: 2, 2: 1}
    assert_all_steps(trained, [2])
    assert worst_of(trained, PIPELINE) <= BOUND


def test_the_layers_of_a_lost_stage_move():
    """The first stage, on slots 0 and 1, has all layers then, and learns the losses."""
    job = dataclasses.replace(PIPELINE, sharded=True, flags=("--untie-embeddings-and-output-weights",))
    trained = within(job, faults=[kill(slot, during="backward", step=3) for slot in (2, 3)])
    assert sorted(trained) == [0, 1]
    expected = reference(PIPELINE)[2].losses
    for one in trained.values():
        assert set(range(4, STEPS + 1)) <= set(one.losses)
        assert max(abs(loss / expected[step] - 1) for step, loss in one.losses.items()) <= BOUND


def test_a_wrong_weight_of_the_degraded_replica_is_noticed():
    """The negative control."""
    assert worst_of(within(CoreJob(spoil=True), faults=[kill(3, during="backward", step=3)])) > 1e-6


# ---------------------------------------------------------------- the example, as a user starts it


def start(tmp_path, *flags, **environment):
    command = [*NTP, "run", "--standalone", "--nproc-per-node=4", "--ntp-respawn=1", str(EXAMPLE), *flags]
    return Command(command, tmp_path / "log", NTP_CPU="1", PYTHONWARNINGS="ignore", **environment)


def worker(job, rank):
    """The process of a rank, by its environment."""
    wanted = f"RANK={rank}".encode()
    for pid in descendants(job.process.pid):
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process is rank {rank}")


def test_the_example_goes_on_when_a_worker_is_killed(tmp_path):
    job = start(tmp_path, STEPS="40")
    job.wait_for(r"step 3: loss")
    os.kill(worker(job, 3), signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "slot 3 is lost: its process ended with code -9" in output
    assert output.count("step 40: loss") == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--load", "x"], "--load with ntp_plugin.megatron.elastic()"),
        (["--save", "x"], "--save with ntp_plugin.megatron.elastic()"),
        (["--sequence-parallel"], "--sequence-parallel is given, and TransformerConfig.sequence_parallel is False"),
        (["--log-straggler"], "--log-straggler"),
    ],
)
def test_a_refusal_is_one_line(tmp_path, flags, line):
    code, output = start(tmp_path, "--transformer-impl", "local", *flags).end()
    assert code == 2, output
    assert line in output
    assert "Traceback" not in output, output


def test_without_ntp_run_it_is_one_line():
    environment = os.environ | {"NTP_CPU": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "in a process that `ntp run` did not start. Fix: ntp run takes torchrun's flags" in done.stderr
    assert "Traceback" not in done.stderr
