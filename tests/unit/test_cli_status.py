"""`ntp status`: the recorded view of a terminal; it ends with the job, or when no process of it is left."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from ntp_plugin.cli.main import main
from ntp_plugin.cli.screen import Screen
from ntp_plugin.cli.status import follow
from ntp_plugin.telemetry import Began, Committed, Ended, EventWriter, RankLost, Recovered, events_file
from ntp_plugin.telemetry.whereabouts import here, is_alive
from tests.patience import PATIENCE_S, until

SLOTS = ["r0.s0.t0", "r0.s0.t1", "r1.s0.t0", "r1.s0.t1"]
BEGAN = Began(
    number=0, pid=0, joiner=False, replicas=2, stages=1, tp=2, micro_batches=[2, 2], machine="another machine"
)
ENDED_LONG_AGO = 4_194_305
"""Above any that there is: no system has more processes."""


@pytest.fixture
def process():
    """A process that could be a worker."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as sleeping:
        yield sleeping
        sleeping.kill()


def write_events(folder, *events, slot=SLOTS[0]):
    with contextlib.closing(EventWriter(events_file(folder), slot)) as event_writer:
        for event in events:
            event_writer.write(event)


def write_beginning(folder, *, pids, machine):
    for number, (slot, pid) in enumerate(zip(SLOTS, pids, strict=True)):
        write_events(folder, dataclasses.replace(BEGAN, number=number, pid=pid, machine=machine), slot=slot)


def committed(step):
    return Committed(step=step, epoch=0, seconds=0.25, losses={"lm loss": 5.5 - step}, samples=[])


def test_the_terminal_view_has_members_widths_and_progress(tmp_path):
    write_beginning(tmp_path, pids=range(1, 5), machine="another machine")
    lost = RankLost(number=1, pid=2, kind="ended", reason="its process ended with code -9")
    went_on = Recovered(epoch=1, seconds=0.5, lost=["r0.s0.t1"], back=[], widths=[[1], [2]], micro_batches=[1, 3])
    write_events(tmp_path, committed(1), lost, went_on, committed(2), Ended())
    console = Console(record=True, force_terminal=True, width=120, highlight=False)
    assert follow(tmp_path, Screen("the run", console)) == 0
    seen = console.export_text()
    assert "the run" in seen
    rows = {line.split()[2]: line.split() for line in seen.splitlines() if " replica " in line}
    assert rows["0"][3:-1] == ["●", "alive", "✗", "lost", "1", "of", "2", "1"]
    assert rows["1"][3:-1] == ["●", "alive", "●", "alive", "2", "of", "2", "3"]
    for part in ("step 2", "lm loss 3.5000", "0.25 s a step", "slot 1 is lost: pid 2: its process ended with code -9"):
        assert part in seen
    assert "the job goes on (lost: r0.s0.t1): after 0.50 s; widths 1, 2; micro-batches 1, 3" in seen


def test_status_ends_with_its_job(tmp_path, process, capsys):
    write_beginning(tmp_path, pids=[process.pid] * 4, machine=here())
    ending = threading.Timer(1.0, write_events, (tmp_path, committed(1), Ended()))
    ending.start()
    assert main(["status", str(tmp_path)]) == 0
    assert not ending.is_alive()
    assert "the job is dead" not in capsys.readouterr().out


def test_a_job_without_living_processes_is_one_line_and_code_1(tmp_path, capsys):
    write_beginning(tmp_path, pids=[ENDED_LONG_AGO] * 4, machine=here())
    write_events(tmp_path, committed(7))
    assert main(["status", str(tmp_path)]) == 1
    (message,) = [line for line in capsys.readouterr().out.splitlines() if "the job is dead" in line]
    assert str(tmp_path) in message
    assert "its last step is 7" in message


def test_status_reports_a_dead_job_after_its_last_process(tmp_path, process):
    write_beginning(tmp_path, pids=[ENDED_LONG_AGO] * 3 + [process.pid], machine=here())
    died = []
    threading.Timer(1.0, lambda: (died.append(True), process.kill())).start()
    assert main(["status", str(tmp_path)]) == 1
    assert died, "it was waited for"


def test_a_replaced_process_is_not_polled(tmp_path, process):
    write_beginning(tmp_path, pids=[process.pid] + [ENDED_LONG_AGO] * 3, machine=here())
    for number in range(4):
        write_events(tmp_path, RankLost(number=number, pid=1, kind="ended", reason="code 1"))
    assert main(["status", str(tmp_path)]) == 1, "no process has a slot any more"


@pytest.mark.parametrize("elsewhere", [SLOTS, SLOTS[3:]])
def test_a_job_with_processes_on_another_machine_is_followed(tmp_path, elsewhere):
    write_beginning(tmp_path, pids=[ENDED_LONG_AGO] * 4, machine=here())
    for slot in elsewhere:
        write_events(tmp_path, dataclasses.replace(BEGAN, number=SLOTS.index(slot), pid=ENDED_LONG_AGO), slot=slot)
    words = [sys.executable, "-m", "ntp_plugin.cli.main", "status", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as looking:
        assert looking.stdout.readline().strip() == str(tmp_path), "it looks"
        with pytest.raises(subprocess.TimeoutExpired):
            looking.wait(2)
        write_events(tmp_path, Ended())
        assert looking.wait(PATIENCE_S) == 0


def test_a_zombie_process_is_not_alive(process):
    assert is_alive(process.pid)
    process.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(process.pid))
    assert process.returncode is None, "it is a zombie still"
