"""A live job is watched: one run in wandb whichever rank dies, faults from another terminal, and its status."""

import json

import pytest

from ntp_plugin.chaos.history import History
from ntp_plugin.cli.main import main
from ntp_plugin.telemetry import Began, Follower
from tests.harness.parity.job import RECIPES
from tests.ranks.command import NTP, Command
from tests.unit.wandb_file import records

OWNER = "r1.s0.t1"
"""The last rank, which writes Megatron's own wandb run."""


def job(tmp_path, steps):
    words = tmp_path / "words"
    words.write_text(
        f"{(RECIPES / 'tiny.args').read_text()} --ntp-enable --tensor-model-parallel-size=2 --global-batch-size=4"
        f" --train-iters={steps} --wandb-project=users --wandb-exp-name=own --wandb-save-dir={tmp_path / 'users'}"
    )
    ours = [f"--ntp-run-dir={tmp_path / 'run'}", "--ntp-chaos", "--ntp-wandb=ours", "--ntp-spares=1"]
    command = [*NTP, "run", *ours, "--standalone", "--nproc-per-node=4", str(RECIPES / "pretrain_gpt.py"), f"@{words}"]
    environment = {"NTP_CPU": "float64", "PYTHONWARNINGS": "ignore", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    return Command(command, tmp_path / "log", **environment, NTP_PRELOAD="megatron.training.training")


def numbers(path):
    """Run and, for each line of its history, the names in it with their values."""
    found = records(path)
    (run,) = {record.run.run_id for record in found if record.WhichOneof("record_type") == "run"}
    lines = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    return run, [{_name(item): json.loads(item.value_json) for item in line.item} for line in lines]


def _name(item):
    return item.key or "/".join(item.nested_key)


@pytest.mark.short
def test_wandb_has_one_run_although_its_writer_is_killed_and_rejoins(tmp_path, capsys):
    running = job(tmp_path, steps=60)
    record = tmp_path / "run"
    running.wait_for(r"iteration +4/")
    assert main(["chaos", "attach", str(record), "--what", "kill", "--slot", OWNER, "--during", "backward"]) == 0
    assert "ordered: kill" in capsys.readouterr().out
    running.wait_for("slot 3 is lost")
    assert main(["status", str(record), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (seen["tp"], seen["replicas"]) == (2, 2)
    code, output = running.end()
    assert code == 0, output

    history = History.of(Follower(record).news())
    (injected,) = history.injected
    assert (injected.event.whom, injected.event.fault_point) == (OWNER, "backward")
    back = [output for output in history.began if output.slot == OWNER and output.event.joiner]
    assert back, "the owner of the run has rejoined in time"
    assert sorted(history.commits) == list(range(1, 61))

    (ours,) = record.glob("wandb/offline-run-*/run-*.wandb")
    theirs = sorted(tmp_path.glob("users/wandb/offline-run-*/run-*.wandb"))
    assert len(theirs) == 2, "of the rank that was killed, and of the one that came back"
    run, lines = numbers(ours)
    assert {numbers(path)[0] for path in theirs} == {run}, "all of it is one run"
    steps = [line["ntp/step"] for line in lines if "ntp/step_s" in line]
    assert steps == list(range(1, 61)), "each step once, and in order"
    assert sum("ntp/recovery_s" in line for line in lines) == 2
    written_there = [line for path in theirs for line in numbers(path)[1] if "ntp/epoch" in line]
    assert written_there, "Megatron's own run hears of the recovery in which its writer came back"


def test_a_signal_is_recorded_and_goes_to_workers_only(tmp_path, capsys):
    running = job(tmp_path, steps=30)
    record = tmp_path / "run"
    running.wait_for(r"iteration +2/")
    assert main(["chaos", "attach", str(record), "--what", "sigkill", "--slot", "r0.s0.t0"]) == 0
    code, output = running.end()
    assert code == 0, output
    began = [one.event for one in Follower(record).news() if isinstance(one.event, Began) and one.slot == "r0.s0.t0"]
    assert f"pid {began[0].pid}" in capsys.readouterr().out
    (injected,) = History.of(Follower(record).news()).injected
    assert (injected.event.what, injected.event.whom) == ("sigkill", "r0.s0.t0")
    assert main(["chaos", "attach", str(record), "--what", "sigkill", "--slot", "r1.s0.t0"]) == 2
    assert "no worker of ntp run" in capsys.readouterr().err


def test_a_recipe_injects_faults_into_a_running_job(tmp_path):
    """Its steps count from then on, and the job continues to its end."""
    running = job(tmp_path, steps=60)
    running.wait_for(r"iteration +20/")
    recipe = "recipes/chaos/kill-in-backward.toml"
    out = tmp_path / "out"
    assert main(["chaos", "attach", str(tmp_path / "run"), recipe, "--out", str(out)]) == 0
    code, output = running.end()
    assert code == 0, output
    (fault,) = json.loads((out / "verdict.json").read_text())["faults"]
    assert (fault["what"], fault["moment"], fault["problem"]) == ("kill", "backward", "")
    assert fault["step"] > 20
