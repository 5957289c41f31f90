"""A signal from another terminal: recorded before it is sent, and only if the sender can read the token of the run."""

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ntp_plugin.chaos import attach as attaching
from ntp_plugin.chaos import fault_injector
from ntp_plugin.chaos.attach import inject_now
from ntp_plugin.chaos.ending import ending_in_waits
from ntp_plugin.chaos.fault_injector import send
from ntp_plugin.chaos.faults import OrderedFault, Pending, orders_file, worker_words
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import look_over
from ntp_plugin.chaos.worker import FaultyWorker
from ntp_plugin.cli.main import main
from ntp_plugin.telemetry import Began, Committed, EventWriter, Follower, events_file
from tests.patience import PATIENCE_S, until

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
    answers, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    return bool(answers) and process.stdout.readline() == "here\n"


@pytest.fixture
def processes():
    """A worker by its command line, and an unrelated process."""
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
    event_writer = EventWriter(events_file(run), SLOT)
    event_writer.write(Began(pid=pid, number=1, joiner=False, replicas=2, stages=1, tp=2, micro_batches=[2, 2]))
    event_writer.write(Committed(step=5, epoch=0, seconds=0.1, losses={}, samples=[]))
    event_writer.close()
    return run


def injected(run):
    return History.of(Follower(run).news()).injected


def attach(run, what, *more, slot=SLOT):
    return main(["chaos", "attach", str(run), "--what", what, "--slot", slot, *more])


def test_a_signal_is_recorded_as_in_a_campaign(tmp_path, processes):
    run = recorded(tmp_path, processes["worker"].pid)
    assert attach(run, "sigkill") == 0
    assert processes["worker"].wait(PATIENCE_S) == -9
    (recorded_fault,) = injected(run)
    assert (recorded_fault.slot, recorded_fault.event.what, recorded_fault.event.whom, recorded_fault.event.step) == (
        "campaign",
        "sigkill",
        SLOT,
        6,
    )
    (outcome,) = look_over(History.of(Follower(run).news()), None, bound=0.0).outcomes
    assert (outcome.what, outcome.slot) == ("sigkill", SLOT), "ntp report has it among the faults"


def test_a_pause_is_over_when_the_command_is(tmp_path, processes):
    run = recorded(tmp_path, processes["worker"].pid)
    assert attach(run, "pause", "--seconds", "0.05") == 0
    assert runs(processes["worker"])
    assert [fault.event.what for fault in injected(run)] == ["pause"]


@pytest.mark.parametrize("orders", [None, b"", b"garbage\n"])
@pytest.mark.parametrize("what", ["sigkill", "sigstop", "pause"])
def test_without_the_token_no_signal_is_sent_or_recorded(what, orders, tmp_path, processes, capsys):
    run = recorded(tmp_path, processes["worker"].pid)
    orders_file(run).unlink()
    if orders is not None:
        orders_file(run).write_bytes(orders)
    assert attach(run, what) == 2
    output = capsys.readouterr().err
    assert "--ntp-chaos" in output
    assert output.count("\n") == 1
    assert runs(processes["worker"])
    assert injected(run) == []


def test_nothing_is_sent_to_an_unrelated_process_or_recorded(tmp_path, processes, capsys):
    run = recorded(tmp_path, processes["stranger"].pid)
    assert attach(run, "sigkill") == 2
    assert "no worker of ntp run" in capsys.readouterr().err
    assert runs(processes["stranger"])
    assert injected(run) == []


@contextlib.contextmanager
def training(run, monkeypatch, first=6):
    """The slot continues, step by step, and obeys orders."""
    monkeypatch.setenv("NTP_EVENTS", str(events_file(run)))
    victim, over = FaultyWorker(Pending(orders_file(run))), threading.Event()
    victim.is_here(SLOT, tuple)
    event_writer = EventWriter(events_file(run), SLOT)

    def train():
        step = first
        while not over.wait(0.02):
            victim.reached("vote", step)
            event_writer.write(Committed(step=step, epoch=0, seconds=0.02, losses={}, samples=[step]))
            step += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def attach_recipe(run, tmp_path, text):
    (tmp_path / "recipe.toml").write_text(text)
    code = main(["chaos", "attach", str(run), str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")])
    verdict = tmp_path / "out/verdict.json"
    return code, json.loads(verdict.read_text()) if verdict.exists() else None


TWO = """
[[fault]]
what = "slow"
slot = "r0.s0.t1"
during = "vote"
at_step = 4
[[fault]]
what = "pause"
slot = "r0.s0.t1"
at_step = 6
seconds = 0.05
"""


def test_a_recipe_counts_steps_of_a_running_job_from_now_on(tmp_path, processes, monkeypatch):
    run = recorded(tmp_path / "run", processes["worker"].pid)
    with training(run, monkeypatch):
        code, verdict = attach_recipe(run, tmp_path, TWO)
        again, once_more = attach_recipe(run, tmp_path, TWO)
    assert (code, again) == (0, 0)
    slow, paused = verdict["faults"]
    assert (slow["what"], slow["fault_point"]) == ("slow", "vote")
    assert slow["step"] >= 5 + 4, "not at once, though the job is past step 4"
    assert (paused["what"], paused["problem"]) == ("pause", "")
    assert runs(processes["worker"]), "the job is not ended"
    assert once_more["faults"][0]["step"] > slow["step"], "it is injected a second time as well"
    assert (tmp_path / "out/report.html").exists()


def test_a_recipe_whose_fault_point_is_never_reached_is_given_up_and_reported(tmp_path, processes, monkeypatch):
    """It is not injected later, after the command has ended."""
    run = recorded(tmp_path / "run", processes["worker"].pid)
    with training(run, monkeypatch):
        fault = '[[fault]]\nwhat = "slow"\nslot = "r0.s0.t1"\nduring = "save"\n'
        code, verdict = attach_recipe(run, tmp_path, "[job]\npatience_s = 1.0\n" + fault)
    assert code == 1
    assert "never injected" in verdict["faults"][0]["problem"]
    assert Pending(orders_file(run)).take(SLOT, "save", 1000, None) == []


PAUSED = "[[fault]]\nwhat = 'pause'\nslot = 'r0.s0.t1'\nseconds = 600.0\n"
TO_COME = "[[fault]]\nwhat = 'slow'\nslot = 'r0.s0.t1'\nduring = 'save'\n"


@pytest.mark.parametrize("by_recipe", [False, True])
def test_a_command_ended_during_a_pause_resumes_the_rank_first(by_recipe, tmp_path, processes):
    """It withdraws the faults that were still to come."""
    run, worker = recorded(tmp_path / "run", processes["worker"].pid), processes["worker"]
    (tmp_path / "recipe.toml").write_text(PAUSED + TO_COME)
    words = [tmp_path / "recipe.toml", "--out", tmp_path / "out"] if by_recipe else PAUSED_BY_HAND
    command = [sys.executable, "-m", "ntp_plugin.cli.main", "chaos", "attach", run, *words]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as attached:
        until(lambda: is_stopped(worker.pid))
        attached.send_signal(signal.SIGTERM)
        assert attached.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert runs(worker)
    assert Pending(orders_file(run)).take(SLOT, "save", 1000, None) == []


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def asked_beside(request, monkeypatch):
    """This process gets a signal right after it has stopped a rank, or right before it resumes it. A test runner may
    ignore that signal, as under nohup."""
    before = signal.signal(request.param, signal.SIG_DFL)

    def prepare(beside):
        def send_and_be_asked(pid, number):
            if number == beside == signal.SIGCONT:
                signal.raise_signal(request.param)
            send(pid, number)
            if number == beside == signal.SIGSTOP:
                signal.raise_signal(request.param)

        for module in (fault_injector, attaching):
            monkeypatch.setattr(module, "send", send_and_be_asked)
        return 128 + request.param

    yield prepare
    signal.signal(request.param, before)


@pytest.mark.parametrize("by_recipe", [False, True])
@pytest.mark.parametrize("beside", [signal.SIGSTOP, signal.SIGCONT])
def test_the_rank_resumes_whenever_the_command_is_ended(beside, by_recipe, tmp_path, processes, asked_beside):
    seconds = "600.0" if beside == signal.SIGSTOP else "0.05"
    run, worker = recorded(tmp_path / "run", processes["worker"].pid), processes["worker"]
    (tmp_path / "recipe.toml").write_text(PAUSED.replace("600.0", seconds) + TO_COME)
    words = [tmp_path / "recipe.toml", "--out", tmp_path / "out"] if by_recipe else [*PAUSED_BY_HAND[:-1], seconds]
    code = asked_beside(beside)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["chaos", "attach", str(run), *map(str, words)]))
    assert ended.value.code == code
    assert runs(worker)
    assert Pending(orders_file(run)).take(SLOT, "save", 1000, None) == []


def test_an_ignored_signal_does_not_end_the_command(tmp_path, processes):
    """The signal is ignored, as under nohup."""
    run = recorded(tmp_path, processes["worker"].pid)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_in_waits() as wait:
            signal.raise_signal(signal.SIGHUP)
            output = inject_now(run, OrderedFault(name="1", what="pause", slot=SLOT, seconds=0.05), wait=wait)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert output.startswith("done: pause")
    assert runs(processes["worker"])


PAUSED_BY_HAND = ["--what", "pause", "--slot", SLOT, "--seconds", "600"]


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("what = 'supervisor'\n", "supervisor is for jobs that a recipe starts"),
        ("what = 'kill'\nslot = 'r7.s0.t0'\n", "there is no slot r7.s0.t0"),
    ],
)
def test_a_recipe_that_does_not_fit_the_job_is_refused(fault, message, tmp_path, processes, capsys):
    run = recorded(tmp_path / "run", processes["worker"].pid)
    assert attach_recipe(run, tmp_path, "[[fault]]\n" + fault)[0] == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
