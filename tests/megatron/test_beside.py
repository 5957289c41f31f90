"""Two jobs on one host, each with its copies in the same memory."""

import shutil

from ntp_plugin.telemetry import Committed, CopyTrouble, Follower, Recovered
from tests.harness.parity.job import Job
from tests.harness.parity.layouts import BASE, MODELS
from tests.megatron.test_export import SHARDED, run_of
from tests.megatron.test_hosts import ENVIRONMENT, training, wait_for_step
from tests.ranks.command import NTP, Command
from tests.ranks.machines import machines


def words(folder, name, steps):
    job = Job(
        model=MODELS[BASE],
        tp=1,
        dp=2,
        enabled=True,
        more=f"{SHARDED} --train-iters {steps} --lr-decay-iters {steps} --ntp-events={folder / name}",
    )
    return [
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--ntp-copies-keep",
        "0",
        *training(job, folder / f"of {name}"),
    ]


def events_of(path, *kinds):
    return [one.event for one in Follower(path).news() if isinstance(one.event, kinds)]


def test_the_next_job_removes_copies_of_a_killed_one_and_leaves_those_of_a_living_one(tmp_path):
    living = Command([*NTP, *words(tmp_path, "living", 4000)], tmp_path / "log of the living", **ENVIRONMENT)
    try:
        with machines(1, tmp_path) as hosts:
            killed = hosts.run(1, *words(tmp_path, "killed", 4000), **ENVIRONMENT)
            wait_for_step(4, tmp_path / "killed", killed)
            wait_for_step(4, tmp_path / "living", living)
            left, kept = run_of(tmp_path / "killed"), run_of(tmp_path / "living")
            hosts.kill(1)
        assert left != kept
        assert any(left.rglob("near-*.json"))
        code, output = Command([*NTP, *words(tmp_path, "next", 3)], tmp_path / "log", **ENVIRONMENT).end()
        assert code == 0, output[-4000:]
        assert f"removing {left}: its run has been dead" in output
        assert str(kept) not in output
        assert not left.exists()
        assert any(kept.rglob("near-*.json"))
        now = max(event.step for event in events_of(tmp_path / "living", Committed))
        wait_for_step(now + 5, tmp_path / "living", living)
        assert not events_of(tmp_path / "living", CopyTrouble, Recovered)
    finally:
        living.process.terminate()
        living.end()
    shutil.rmtree(kept)  # a job that did not end by itself leaves them
