"""A fault hits the host of its slot and no other, and the host is not asked how the job ended."""

import subprocess
import sys

import pytest

from ntp_plugin.chaos.faults import OrderedFault
from ntp_plugin.chaos.hosting import SeveralMachines
from ntp_plugin.testing.machines import Machines, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are machines")
ENDS_ON_INPUT = "import sys; print('here', flush=True); sys.exit(int(input()))"


@pytest.fixture
def machines():
    with Machines(3) as made:
        yield made


@pytest.fixture
def processes(machines):
    def start(at):
        words = [*machines.prefix(at), sys.executable, "-c", ENDS_ON_INPUT]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    started = {at: start(at) for at in machines.numbers}
    for process in started.values():
        assert process.stdout.readline() == "here\n"
    yield started
    for process in started.values():
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def running(machines, processes):
    return SeveralMachines(machines, {1: processes[1], 2: processes[2]}, processes[3])


def pid_on(machines, at):
    return next(iter(machines.pids(at)))


def end(process, code):
    process.stdin.write(f"{code}\n")
    process.stdin.flush()
    process.wait()


def fault(what, seconds=0.0):
    return OrderedFault(name="1", what=what, slot="r0.s0.t0", seconds=seconds)


def test_a_host_is_killed_and_the_others_report_the_end_of_the_job(running, machines, processes):
    assert running.way_to(fault("node"), pid_on(machines, 2))() is None
    assert processes[2].wait() == -9
    assert machines.pids(2) == []
    assert not running.is_over
    end(processes[1], 3)
    assert running.is_over
    assert running.code == 3


def test_a_disconnected_host_is_not_waited_for(running, machines, processes):
    running.way_to(fault("cut"), pid_on(machines, 1))()
    end(processes[2], 0)
    assert running.is_over
    assert running.code == 0
    assert machines.pids(1), "it was not killed"


def test_a_short_disconnection_is_undone_and_its_host_counts(running, machines, processes):
    undo = running.way_to(fault("blink", 0.1), pid_on(machines, 1))()
    undo()
    end(processes[2], 0)
    assert not running.is_over
    end(processes[1], 5)
    assert running.code == 5


def test_the_store_is_on_no_host(running, processes):
    running.way_to(fault("store"), None)()
    assert processes[3].wait() == -9
    assert not running.is_over
    for at in (1, 2):
        end(processes[at], 6)
    assert running.code == 6


def test_a_process_that_has_ended_is_on_no_host(running, processes):
    assert running.way_to(fault("node"), 2**22 + 1) is None
    assert all(process.poll() is None for process in processes.values())
