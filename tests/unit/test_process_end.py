"""A worker is killed together with the processes that it has started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ntp_plugin.launch.process_end import end
from tests.patience import PATIENCE_S, until


def started(*, leads):
    """A shell, and the pid of a sleeper that it waits for."""
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=leads
    )
    with shell.stdout as output:
        return shell, int(output.readline())


def is_there(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"  # it may be a zombie


@pytest.mark.parametrize("leads", [True, False])
def test_a_shell_that_leads_a_group_takes_its_script_with_it(leads):
    """A shell that leads no group is killed alone: its group may be ours."""
    shell, script = started(leads=leads)
    end(shell, signal.SIGKILL)
    assert shell.wait(PATIENCE_S) == -signal.SIGKILL
    if leads:
        until(lambda: not is_there(script))
    else:
        os.kill(script, signal.SIGKILL)


def test_signalling_an_ended_process_is_no_error():
    shell, _ = started(leads=True)
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(PATIENCE_S)
    end(shell, signal.SIGKILL)
