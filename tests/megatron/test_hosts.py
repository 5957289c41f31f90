"""`ntp run` on two machines, as a user types it: one of them loses its power and its shared memory."""

import time
from pathlib import Path

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.telemetry import Committed, Copied, Follower, Recovered, Restored
from ntp_plugin.testing.machines import why_not
from tests.harness.parity.job import Job
from tests.harness.parity.layouts import BASE, MODELS
from tests.patience import PATIENCE_S
from tests.ranks.command import NTP, Command
from tests.ranks.machines import machines

PORT, STEPS = 29400, 40
ENVIRONMENT = {"NTP_CPU": "float64", "TORCHDYNAMO_DISABLE": "1"}
LIMITS = "host_s=10,store_s=30,hung_s=30"
ITERATIONS = f"--train-iters {STEPS} --lr-decay-iters {STEPS}"
MORE = f"{ITERATIONS} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.fixture
def two_hosts(tmp_path):
    with machines(2, tmp_path) as hosts:
        yield hosts


def start(hosts, at, folder):
    events = folder / f"events{at}"
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=f"{MORE} --ntp-events={events}")
    flags = [
        *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
        *("--rdzv-endpoint", f"{hosts.address(1)}:{PORT}", "--rdzv-conf", f"is_host={int(at == 1)}"),
        *("--local-addr", hosts.address(at), "--ntp-thresholds", LIMITS),
        *("--ntp-copies-keep", "0"),
    ]
    return hosts.run(at, "run", *flags, *training(job, folder), **ENVIRONMENT), events


def training(job, folder):
    return ["-m", "ntp_plugin.megatron", str(job.recipe), *job.words, "--data-cache-path", str(folder / "samples")]


def losses(events):
    committed = [one.event for one in Follower(events).news() if isinstance(one.event, Committed)]
    return [event.losses["lm loss"] for event in sorted(committed, key=lambda event: event.step) if event.samples]


def undisturbed(folder):
    """On one machine, and without copies."""
    events = folder / "calm"
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=f"{ITERATIONS} --ntp-events={events}")
    words = [*NTP, "run", "--standalone", "--nproc-per-node", "4", *training(job, folder)]
    code, output = Command(words, folder / "calm log", **ENVIRONMENT).end()
    assert code == 0, output[-4000:]
    return losses(events)


def copies_left():
    return set(Path("/dev/shm").glob("ntp-copies-*"))


def wait_for_step(step, events, agent, timeout_s=PATIENCE_S):
    deadline, follower = time.monotonic() + timeout_s, Follower(events)
    while not any(isinstance(one.event, Committed) and one.event.step >= step for one in follower.news()):
        assert agent.process.poll() is None, agent.output
        assert time.monotonic() < deadline, agent.output
        time.sleep(0.02)


def test_a_machine_is_lost_with_the_copies_on_it(two_hosts, tmp_path):
    """Its ranks' parts of the optimizer come from the copies on the other machine, and no step is missing."""
    before = copies_left()
    (agent, events), _ = (start(two_hosts, at, tmp_path) for at in (1, 2))
    wait_for_step(8, events, agent)
    two_hosts.kill(2)
    code, output = agent.end()
    assert code == 0, output[-4000:]
    recorded = Follower(events).news()
    restored = [one.event for one in recorded if isinstance(one.event, Restored)]
    assert restored, output[-4000:]
    assert max(event.again for event in restored) <= 1
    assert all(event.own and event.here for event in restored), "its own part, and those of the lost host"
    assert {event.far for one in recorded if isinstance(event := one.event, Copied) and event.step < 5} == {1}
    lost = {tuple(event.lost) for one in recorded if isinstance(event := one.event, Recovered)}
    assert lost & {("r0.s0.t0", "r0.s0.t1"), ("r1.s0.t0", "r1.s0.t1")}, lost
    assert len(copies_left() - before) == 1, "those of the killed agent, which would be lost with its machine"
    expected = dict(enumerate(undisturbed(tmp_path)[::2], start=1))
    found = {event.step: event.losses["lm loss"] for one in recorded if isinstance(event := one.event, Committed)}
    assert found == pytest.approx(expected, rel=1e-12)
    assert not copies_left() - before, "the next run removes what a dead one has left"


def test_a_run_that_is_dead_is_resumed_from_memory_in_another_layout(tmp_path):
    """Only the job loses its power: TP2 x DP2 with shards is lost, and TP4 resumes from its copies."""
    before, events = copies_left(), [tmp_path / "first", tmp_path / "second"]
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=f"{MORE} --ntp-events={events[0]}")
    with machines(1, tmp_path) as hosts:
        words = ["run", "--standalone", "--nproc-per-node", "4", *training(job, tmp_path)]
        wait_for_step(8, events[0], hosts.run(1, *words, **ENVIRONMENT))
        hosts.kill(1)
    (left,) = copies_left() - before
    assert Command([*NTP, "copies", "verify", str(left)], tmp_path / "verified").end()[0] == 0
    job = Job(model=MODELS[BASE], tp=4, enabled=True, more=f"{MORE} --ntp-events={events[1]}")
    flags = ["--standalone", "--nproc-per-node", "4", "--ntp-resume", "latest"]
    code, output = Command([*NTP, "run", *flags, *training(job, tmp_path)], tmp_path / "again", **ENVIRONMENT).end()
    assert code == 0, output[-4000:]
    recorded = [one.event for one in Follower(events[1]).news()]
    (begun,) = {event.step for event in recorded if isinstance(event, Restored)}
    assert begun >= 7
    found = {event.step: event.losses["lm loss"] for event in recorded if isinstance(event, Committed)}
    expected = dict(enumerate(undisturbed(tmp_path)[::2], start=1))
    assert found == pytest.approx({step: loss for step, loss in expected.items() if step > begun}, rel=1e-12)
    assert not copies_left() - before


def test_a_resume_without_copies_is_refused(tmp_path):
    code, output = Command([*NTP, "run", "--ntp-resume", str(tmp_path), "train.py"], tmp_path / "log").end()
    assert code == 2, output
    assert "no copies of a dead run there" in output


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are machines")
@pytest.mark.parametrize("recipe", ["host-killed", "link-cut", "link-blinks", "store-gone"])
def test_a_recipe_injects_faults_into_hosts(recipe, tmp_path, capsys):
    assert main(["chaos", f"recipes/chaos/{recipe}.toml", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().out
