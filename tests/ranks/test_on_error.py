"""An exception of the script's own, in a real `ntp run`, is no lost rank, unless the user asks for that."""

import re

import pytest

from tests.ranks.command import NTP, Command

TRAINS = """
import os, signal, time, torch
from ntp_plugin.plain.job import elastic_job

torch.manual_seed(0)
rank, is_founder = int(os.environ["RANK"]), "NTP_INCARNATION" not in os.environ
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def loss_of(step, samples):
    drawn = [torch.randn(4, generator=torch.Generator().manual_seed(1000 * step + one)) for one in samples]
    return model(torch.stack(drawn)).square().sum()

def fail():
    raise ValueError("the script is wrong")

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
"""
LOOP = """
with elastic_job(model, optimizer, loss_of, per_rank=2) as job:
    while job.steps_done < steps:
        job.step()
        if rank == 1 and job.steps_done >= 3:
            at_step_three()
        while job.steps_done == 5 and not os.path.exists(waits_for):  # the same step on all: none waits for another
            time.sleep(0.02)
    if rank == job.members[0]:
        print(f"ends at step {job.steps_done} with members {job.members}", flush=True)
"""


def run(folder, body, *flags):
    (folder / "train.py").write_text(body)
    words = [*NTP, "run", "--standalone", "--nproc-per-node=3", *flags, str(folder / "train.py")]
    return Command(words, folder / "log").end()


def trains(*, at_step_three, before="", steps="8", waits_for="/"):
    """A script; at step 5 it waits for a file."""
    return f"{TRAINS}\n{before}\nat_step_three, steps, waits_for = {at_step_three}, {steps}, {waits_for!r}\n{LOOP}"


@pytest.mark.parametrize("how", [(), ("--ntp-fork",)], ids=["started", "forked"])
def test_an_error_of_one_rank_ends_the_job_with_its_traceback_and_a_code_of_its_own(tmp_path, how):
    code, output = run(tmp_path, trains(at_step_three="fail"), *how, "--ntp-respawn=3")
    assert code == 9, output
    assert re.search(
        r"ntp run: slot 1 \(pid \d+\) failed:\nTraceback (.|\n)*in fail\n(.|\n)*the script is wrong", output
    )
    assert re.search(r"ntp run: slot 1 ended by an error of its own script: ValueError: the script is wrong \(", output)
    assert "is lost" not in output
    assert "ends at step" not in output


def test_evict_on_error_lets_the_others_continue(tmp_path):
    code, output = run(tmp_path, trains(at_step_three="fail"), "--ntp-on-error=evict")
    assert code == 0, output
    assert "slot 1 failed, and is taken for lost: ValueError: the script is wrong (" in output
    assert "ends at step 8 with members (0, 2)" in output


def test_an_error_repeated_on_the_replacement_ends_the_job(tmp_path):
    body = trains(at_step_three="fail", steps="float('inf')")
    code, output = run(tmp_path, body, "--ntp-on-error=retry", "--ntp-respawn=3")
    assert code == 9, output
    assert output.count("starts anew") == 1
    assert "slot 1 ended by an error of its own script, which another process had before: ValueError" in output


def test_a_replacement_that_fails_before_it_joins_does_not_end_the_job(tmp_path):
    """On another node a file may be missing; the others do without it."""
    has_failed = str(tmp_path / "failed")
    before = f"if not is_founder:\n    open({has_failed!r}, 'w')\n    fail()\n"
    body = trains(at_step_three="kill", before=before, waits_for=has_failed)
    code, output = run(tmp_path, body, "--ntp-respawn=1")
    assert code == 0, output
    assert "slot 1 failed, and is taken for lost: ValueError: the script is wrong (" in output
    assert "ends at step 8 with members (0, 2)" in output


@pytest.mark.parametrize("ends", ["sys.exit(3)", "sys.exit('no data')"])
def test_an_exit_with_a_code_is_an_error_of_the_script(tmp_path, ends):
    """The script need not know the plugin."""
    code, output = run(tmp_path, f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ends}\ntime.sleep(3600)")
    assert code == 9, output
    assert re.search(r"slot 1 ended by an error of its own script: SystemExit: exited with (3|no data) \(", output)
