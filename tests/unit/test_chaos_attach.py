"""A signal from another terminal: told before it is sent, and only by who can read the token of the run's orders."""

import select
import subprocess
import sys

import pytest

from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.strikes import orders_file, worker_words
from ntp_plugin.chaos.verdict import look_over
from ntp_plugin.cli.main import main
from ntp_plugin.telemetry import Began, Committed, Follower, Teller, events_file

SLOT = "r0.s0.t1"
ANSWERS = "while True: print('here', flush=True), input()"


def answering(*words):
    command = [sys.executable, "-c", ANSWERS, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    return process


def runs(process):
    """Neither ended nor stopped: it answers once more."""
    process.stdin.write("\n")
    process.stdin.flush()
    answers, _, _ = select.select([process.stdout], [], [], 10)
    return bool(answers) and process.stdout.readline() == "here\n"


@pytest.fixture
def processes():
    """A worker by its words, and a stranger."""
    found = {"worker": answering("ntp_plugin.launch"), "stranger": answering()}
    yield found
    for process in found.values():
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def recorded(run, pid):
    """A job whose slot this process has, in its sixth step."""
    worker_words(run)
    teller = Teller(events_file(run), SLOT)
    teller.tell(Began(pid=pid, number=1, newcomer=False, replicas=2, stages=1, tp=2, micro_batches=[2, 2]))
    teller.tell(Committed(step=5, epoch=0, seconds=0.1, losses={}, samples=[]))
    teller.close()
    return run


def struck(run):
    return History.of(Follower(run).news()).struck


def attach(run, what, *more, slot=SLOT):
    return main(["chaos", "attach", str(run), "--what", what, "--slot", slot, *more])


def test_a_signal_is_told_as_a_campaign_tells_it(tmp_path, processes):
    run = recorded(tmp_path, processes["worker"].pid)
    assert attach(run, "sigkill") == 0
    assert processes["worker"].wait(10) == -9
    (said,) = struck(run)
    assert (said.slot, said.event.what, said.event.whom, said.event.step) == ("campaign", "sigkill", SLOT, 6)
    (outcome,) = look_over(History.of(Follower(run).news()), None, bound=0.0).outcomes
    assert (outcome.what, outcome.slot) == ("sigkill", SLOT), "ntp report has it among the strikes"


def test_a_pause_is_over_when_the_command_is(tmp_path, processes):
    run = recorded(tmp_path, processes["worker"].pid)
    assert attach(run, "pause", "--seconds", "0.05") == 0
    assert runs(processes["worker"])
    assert [said.event.what for said in struck(run)] == ["pause"]


@pytest.mark.parametrize("orders", [None, b"", b"garbage\n"])
@pytest.mark.parametrize("what", ["sigkill", "sigstop", "pause"])
def test_without_the_token_no_signal_is_sent_or_told(what, orders, tmp_path, processes, capsys):
    run = recorded(tmp_path, processes["worker"].pid)
    orders_file(run).unlink()
    if orders is not None:
        orders_file(run).write_bytes(orders)
    assert attach(run, what) == 2
    said = capsys.readouterr().err
    assert "--ntp-chaos" in said
    assert said.count("\n") == 1
    assert runs(processes["worker"])
    assert struck(run) == []


def test_to_a_stranger_nothing_is_sent_or_told(tmp_path, processes, capsys):
    run = recorded(tmp_path, processes["stranger"].pid)
    assert attach(run, "sigkill") == 2
    assert "no worker of ntp run" in capsys.readouterr().err
    assert runs(processes["stranger"])
    assert struck(run) == []
