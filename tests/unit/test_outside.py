"""Faults from outside, into a small job: real problems are found, and nothing else is."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ntp_plugin.chaos.outside import checkpoints, injector, leavings, processes
from ntp_plugin.chaos.outside.campaign import CampaignRequest, run_campaign, run_reference
from ntp_plugin.chaos.outside.drawing import draw
from ntp_plugin.chaos.outside.injector import Injected
from ntp_plugin.chaos.outside.job_run import Command, InjectionPace, JobRun, run_job
from ntp_plugin.chaos.outside.job_view import CompletedStep, JobView, Noticed
from ntp_plugin.chaos.outside.kinds import kinds
from ntp_plugin.chaos.outside.leavings import Leavings
from ntp_plugin.chaos.outside.verdict import NO_FAULT, Allowed, judge, rows
from ntp_plugin.cli.main import main
from ntp_plugin.errors import Refused
from ntp_plugin.membership.failure_detector import Thresholds

JOB = Path(__file__).with_name("outside_job.py")
THRESHOLDS = Thresholds()
SHORT = Thresholds(silent_s=1, hung_s=1, host_s=0.9, store_s=1, start_s=60)
KINDS = kinds(THRESHOLDS)
ALLOWED = Allowed(bound=1e-6, weights_bound=1e-6)


def asked(plant, *names, pace=None):
    return CampaignRequest(
        command=Command(words=(plant,), program=(sys.executable, str(JOB))),
        kinds=[KINDS[name] for name in names],
        faults=len(names),
        seed=5,
        pace=pace or InjectionPace(thresholds=THRESHOLDS, every_s=0.1, end_s=5.0),
        allowed=ALLOWED,
    )


def campaign(folder, plant, *names, **more):
    one = asked(plant, *names, **more)
    reference = run_reference(
        dataclasses.replace(one, pace=InjectionPace(thresholds=THRESHOLDS)), folder / "reference", wait=time.sleep
    )
    return run_campaign(one, folder, reference, wait=time.sleep)


# ---------------------------------------------------------------- a whole campaign


def test_a_job_that_survives_its_faults_is_neither_wrong_nor_hung(tmp_path):
    found = campaign(tmp_path, "nothing", "kill", "segv", "term", "stop-short")
    assert sorted(one.kind for one in found.judged) == ["kill", "segv", "stop-short", "term"]
    assert found.holds, found


def test_a_planted_wrong_loss_is_wrong(tmp_path):
    found = campaign(tmp_path, "wrong", "kill")
    assert not found.holds
    assert any("loss" in one.wrong for one in found.judged)


def test_a_planted_hang_is_hung_and_nothing_of_it_stays(tmp_path):
    pace = InjectionPace(thresholds=SHORT, every_s=0.1, end_s=5.0, beyond_thresholds_s=2.0)
    found = campaign(tmp_path, "hang", "kill", pace=pace)
    assert any("no new step" in one.hung for one in found.judged)
    assert not any(one.wrong for one in found.judged if one.hung)
    assert (tmp_path / "run-1" / "hung.txt").exists()


def test_a_planted_process_is_left_behind_and_killed(tmp_path):
    found = campaign(tmp_path, "process", "kill")
    left = [what for one in found.judged for what in one.left]
    assert len(left) == 2
    assert all("pid" in what for what in left)
    pids = [int(what.removeprefix("pid ").partition(",")[0]) for what in left]
    assert not any(processes.environment(pid).get("NTP_OUTSIDE") for pid in pids)


def test_a_planted_file_is_left_behind(tmp_path):
    found = campaign(tmp_path, "file", "kill")
    assert any("ntp-planted-0" in what for one in found.judged for what in one.left)


def test_folders_of_another_job_are_no_leavings_of_this_one(tmp_path):
    """It began and died in the meantime, and its copies may be its only state."""
    script = (
        "from ntp_plugin.launch.run_folder import *; folder = RunFolder('ntp-run-planted-'); print(folder.path);"
        " folder.leave()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    made = Path(other.communicate()[0].strip())

    def found(supervisor):
        left = leavings.look(
            ("NTP_NO_SUCH_MARK", "x"),
            supervisor=supervisor,
            before=(),
            temporary=tmp_path,
            limit_s=0.0,
            was_killed=False,
            ended_well=True,
            wait=time.sleep,
        )
        return str(made) in left.files

    assert (found(os.getpid()), found(other.pid)) == (False, True)
    leavings.remove([made])


def test_a_folder_of_another_program_is_not_kept_to_be_removed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(leavings, "files_there", lambda: frozenset({tmp_path}))
    found = leavings.look(
        ("NTP_NO_SUCH_MARK", "x"),
        supervisor=1,
        before=(),
        temporary=tmp_path,
        limit_s=0.0,
        was_killed=True,
        ended_well=False,
        wait=time.sleep,
    )
    assert not found.kept
    assert not found.files


def test_a_planted_exit_code_is_wrong(tmp_path):
    found = campaign(tmp_path, "code", "kill")
    assert any("ended with code 7" in one.wrong for one in found.judged)


def test_ranks_that_outlive_a_killed_supervisor_are_detected(tmp_path):
    """The ranks of this job continue without it, and end by themselves after some seconds: beyond this limit."""
    pace = InjectionPace(thresholds=THRESHOLDS, every_s=0.1, end_s=0.01)
    queue, command = [KINDS["supervisor-kill"]], asked("nothing").command
    found = run_job(command, tmp_path / "run", queue, pace=pace, chosen=random.Random(1), wait=time.sleep)
    assert found.code == -signal.SIGKILL
    assert not queue
    assert found.leavings.processes


def test_a_reference_run_without_losses_is_refused(tmp_path):
    one = dataclasses.replace(
        asked("nothing"), command=dataclasses.replace(asked("nothing").command, line=r"(?P<step>x)(?P<loss>y)")
    )
    with pytest.raises(Refused, match="reported no losses"):
        run_reference(one, tmp_path / "reference", wait=time.sleep)


# ---------------------------------------------------------------- drawing


def test_every_kind_is_drawn_before_one_repeats_and_a_seed_is_reproducible():
    every = list(KINDS.values())
    drawn = draw(every, 2 * len(every), seed=3)
    assert drawn == draw(every, 2 * len(every), seed=3)
    assert drawn != draw(every, 2 * len(every), seed=4)
    assert all(drawn.count(kind) == 2 for kind in every)


def test_kinds_that_end_the_job_have_others_before_them_and_are_not_last():
    drawn = draw(list(KINDS.values()), len(KINDS), seed=1)
    ends = [number for number, kind in enumerate(drawn) if kind.ends_job]
    assert len(ends) == 3
    assert all(not drawn[number - 1].ends_job for number in ends)
    assert not drawn[-1].ends_job


def test_the_kinds_of_the_issue_are_there():
    assert len(KINDS) >= 14
    assert {"hang-in-wait", "kill-then-hang", "stop-joiner", "supervisor-stop", "two-kills"} <= KINDS.keys()
    assert not KINDS["kill-then-stop"].needs_handlers
    assert KINDS["kill-then-hang"].needs_handlers


def test_a_short_stop_is_below_the_threshold_of_frozen():
    for frozen_s in (0.3, 1.0, 3.0):
        act = kinds(Thresholds(frozen_s=frozen_s))["stop-short"].acts[1]
        assert act.after[1] < 5 / 6 * frozen_s


# ---------------------------------------------------------------- the verdict


def fault(name, at, *lost):
    return Injected(kind=KINDS[name], at=at, step=1, lost_at=lost, words="")


def ran(*injected, reports=(), noticed=(), code=0, hung="", leavings=None):
    return JobRun(
        folder=Path(),
        injected=injected,
        missed=(),
        reports=tuple(reports),
        noticed=tuple(noticed),
        code=code,
        hung=hung,
        leavings=leavings or Leavings(ended_at=0.0),
    )


def report(at, step, loss, rank=0):
    return CompletedStep(at=at, rank=rank, step=step, loss=loss)


REFERENCE = {1: 1.0, 2: 0.5, 3: 0.25}
SOUND = [report(step, step, loss) for step, loss in REFERENCE.items()]


def judged_kinds(run):
    return [(one.kind, bool(one.wrong)) for one in judge(run, REFERENCE, weights_apart=None, allowed=ALLOWED)]


def test_a_wrong_loss_is_attributed_to_the_last_fault_before_it():
    reports = [*SOUND[:2], report(3.0, 3, 0.2501)]
    run = ran(fault("kill", 1.5), fault("stop", 2.5), fault("segv", 3.5), reports=reports)
    assert judged_kinds(run) == [("kill", False), ("stop", True), ("segv", False)]


def test_a_wrong_loss_before_every_fault_is_attributed_to_none():
    run = ran(fault("kill", 3.5), reports=[report(1.0, 1, 2.0), *SOUND[1:]])
    assert judged_kinds(run) == [("kill", False), (NO_FAULT, True)]


def test_each_report_counts_not_only_the_last_of_a_step():
    reports = [report(0.5, 3, 0.3, rank=1), *SOUND]
    assert judged_kinds(ran(fault("kill", 0.1), reports=reports)) == [("kill", True)]


def test_a_loss_that_is_no_number_is_wrong():
    reports = [*SOUND[:2], report(3.0, 3, float("nan"))]
    assert judged_kinds(ran(fault("kill", 1.0), reports=reports)) == [("kill", True)]


def test_a_job_that_is_done_and_lacks_a_step_is_wrong():
    assert judged_kinds(ran(fault("kill", 1.0), reports=SOUND[:2])) == [("kill", True)]


def test_a_job_that_was_ended_may_lack_steps():
    assert judged_kinds(ran(fault("supervisor-term", 1.0), reports=SOUND[:2], code=143)) == [("supervisor-term", False)]
    assert judged_kinds(ran(fault("supervisor-term", 1.0), reports=SOUND[:2], code=1)) == [("supervisor-term", True)]


def test_a_code_that_the_fault_does_not_explain_is_wrong():
    assert judged_kinds(ran(fault("kill", 1.0), reports=SOUND, code=1)) == [("kill", True)]
    for kind, code, wrong in (
        ("handler-raises", 9, False),
        ("handler-exits", 9, False),
        ("handler-raises", -11, True),
        ("handler-exits", 4, True),
        ("supervisor-kill", -9, False),
        ("supervisor-kill", 0, False),
        ("supervisor-kill", 1, True),
    ):
        assert judged_kinds(ran(fault(kind, 1.0), reports=SOUND, code=code)) == [(kind, wrong)], (kind, code)
    assert judged_kinds(ran(fault("two-kills", 1.0), reports=SOUND, code=4)) == [("two-kills", True)]


def test_two_losses_anywhere_may_take_all_that_held_some_state():
    run = ran(fault("two-kills", 1.0), reports=SOUND, code=4)
    allowed = dataclasses.replace(ALLOWED, loses_state=True)
    assert [one.wrong for one in judge(run, REFERENCE, weights_apart=None, allowed=allowed)] == [""]


@pytest.mark.parametrize(("apart", "wrong"), [(None, False), (1e-7, False), (1e-3, True), (float("nan"), True)])
def test_the_last_checkpoint_counts(apart, wrong):
    (one,) = judge(ran(fault("kill", 1.0), reports=SOUND), REFERENCE, weights_apart=apart, allowed=ALLOWED)
    assert bool(one.wrong) == wrong


def test_a_fault_that_ends_the_job_takes_effect_when_the_last_process_ends():
    """It does not count from the search for it, which is after `ntp run` has ended."""
    run = ran(fault("supervisor-int", 2.0), reports=SOUND, code=130, leavings=Leavings(ended_at=52.0))
    (one,) = judge(run, REFERENCE, weights_apart=None, allowed=ALLOWED)
    assert (one.noticed_s, one.wrong) == (50.0, "")


def test_detection_time_counts_from_the_signal_of_the_loss():
    run = ran(
        fault("two-kills", 1.0, (0, 1.0), (1, 1.02)),
        fault("stop-short", 5.0),
        reports=SOUND,
        noticed=[Noticed(at=0.5, rank=0), Noticed(at=1.3, rank=0), Noticed(at=1.52, rank=1)],
    )
    first, second, _ = judge(run, REFERENCE, weights_apart=None, allowed=ALLOWED)
    assert first.noticed_s == pytest.approx(0.5)
    assert second.noticed_s is None


LONG = {step: 1 / step for step in range(1, 21)}


def wrongs(*injected, noticed=(), code=0, steps=20, recorded=True, **more):
    """The judgement of a job of four ranks that completes a step each second; rank 0 reports."""
    reports = [report(step + 0.5, step, LONG[step]) for step in range(1, steps + 1)]
    reports += [report(2.5, 2, LONG[2], rank=rank) for rank in (1, 2, 3)]
    notices = [Noticed(at=at, rank=rank) for rank, at in noticed]
    run = dataclasses.replace(ran(*injected, reports=reports, noticed=notices, code=code), is_recorded=recorded, **more)
    return [(one.kind, one.wrong) for one in judge(run, LONG, weights_apart=None, allowed=ALLOWED)]


def test_a_loss_without_a_fault_is_wrong():
    kill, stop = fault("kill", 5.0, (1, 5.0)), fault("stop-short", 10.0)
    assert wrongs(kill, stop, noticed=[(1, 5.2)]) == [("kill", ""), ("stop-short", "")]
    innocent = wrongs(kill, stop, noticed=[(1, 5.2), (3, 5.4)])
    assert innocent == [("kill", "rank 3 was lost too"), ("stop-short", "")]
    evicted = wrongs(kill, stop, noticed=[(1, 5.2), (1, 10.3)])
    assert evicted == [("kill", ""), ("stop-short", "rank 1 was lost too")]
    before = wrongs(kill, noticed=[(2, 4.0), (1, 5.2)])
    assert before == [("kill", ""), (NO_FAULT, "rank 2 was lost too")]


def test_a_loss_that_has_a_cause_is_not_wrong():
    both = fault("two-kills", 5.0, (1, 5.0), (2, 5.01))
    assert wrongs(both, noticed=[(2, 5.1), (1, 5.2)]) == [("two-kills", "")]
    joiner = fault("kill-joiner", 5.0, (1, 5.0), (1, 6.0))
    assert wrongs(joiner, noticed=[(1, 5.1), (1, 6.2), (1, 7.0)]) == [("kill-joiner", "")]
    late = wrongs(fault("stop", 5.0, (1, 5.0)), fault("kill", 7.0, (2, 7.0)), noticed=[(2, 7.1), (1, 7.2)])
    assert late == [("stop", ""), ("kill", "")]
    busy = dataclasses.replace(fault("stop-short", 5.0), may_be_lost_at=((1, 5.0),))
    assert wrongs(busy, noticed=[(1, 5.9)]) == [("stop-short", "")]
    tried = wrongs(fault("kill", 5.0, (1, 5.0)), noticed=[(1, 5.1), (3, 9.1)], may_be_lost_at=((3, 9.0),))
    assert tried == [("kill", "")]


def test_a_leaving_replica_and_an_ending_job_take_other_ranks_along():
    left_out = Noticed(at=5.3, rank=3, left_out=True)
    run = ran(fault("kill", 1.0, (1, 1.0)), reports=SOUND, noticed=[Noticed(at=1.2, rank=1), left_out])
    assert judged_kinds(run) == [("kill", False)]
    ended = wrongs(fault("supervisor-term", 5.0), noticed=[(1, 5.1), (2, 5.1)], code=143, steps=5)
    assert ended == [("supervisor-term", "")]
    failed = wrongs(fault("handler-raises", 5.0, (1, 5.0)), noticed=[(1, 5.1), (2, 5.1)], code=9, steps=5)
    assert failed == [("handler-raises", "")]


def test_an_undetected_loss_is_wrong_when_others_continued():
    message = "rank 1 was lost, nobody noticed, and the others completed 15 further steps"
    kill = fault("kill", 6.0, (1, 6.0))
    assert wrongs(kill) == [("kill", message)]
    assert wrongs(kill, recorded=False) == [("kill", "")]
    assert wrongs(fault("kill", 17.0, (1, 17.0))) == [("kill", "")]  # the job was over before
    assert wrongs(fault("stop-long", 6.0, (0, 6.0))) == [("stop-long", "")]  # it continues
    joiner = fault("kill-joiner", 6.0, (1, 6.0), (1, 7.0))
    assert wrongs(joiner, noticed=[(1, 6.2)]) == [("kill-joiner", "")]
    assert wrongs(joiner) == [("kill-joiner", message)]


def test_an_overlong_stop_is_recorded():
    stop, go_on = KINDS["stop-short"].acts
    victim = processes.ProcessInfo(pid=7, started=1, parent=1, state="S")
    for ended_at, long in ((5.1, ()), (5.9, ((3, 5.0),))):
        sent = [(stop, victim, 5.0), (go_on, victim, ended_at)]
        assert injector._stopped_for_long(sent, {"victim": 3}, 0.6) == long


def test_an_excluded_rank_is_known_by_its_exit_code(tmp_path):
    lines = [
        {"at": 1.0, "slot": "host0", "event": "RankLost", "number": rank, "pid": 9, "kind": "ended", "reason": reason}
        for rank, reason in ((1, "its process ended with code 5"), (2, "its process ended with code -9"))
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    view = JobView(tmp_path, tmp_path / "log.txt")
    view.look()
    assert [(one.rank, one.left_out) for one in view.noticed] == [(1, True), (2, False)]
    assert not view.is_recorded


def test_rows_have_the_keys_of_the_evidence():
    run = ran(fault("kill", 1.0, (0, 1.0)), reports=SOUND, noticed=[Noticed(at=1.25, rank=0)], hung="no new step")
    (row,) = rows("a job", judge(run, REFERENCE, weights_apart=None, allowed=ALLOWED))
    assert row == {"job": "a job", "kind": "kill", "faults": 1, "wrong": 0, "hung": 1, "noticed_p50_s": 0.25}


# ---------------------------------------------------------------- what a job reports


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rank 3: step 7: loss 0.25", (3, 7, 0.25)),
        ("step 8: loss 1.5e-3, members (0, 1)", (None, 8, 1.5e-3)),
        (" iteration 10/ 20 | consumed samples: 80 | lm loss: 5.5E+00 | grad norm: 1.0 |", (None, 10, 5.5)),
    ],
)
def test_steps_and_losses_are_read_from_lines_of_several_shapes(tmp_path, line, found):
    log = tmp_path / "log.txt"
    view = JobView(tmp_path, log)
    log.write_text(line[:12])
    view.look()
    assert not view.reports  # a line that is not complete is left for later
    log.write_text(f"{line}\n")
    view.look()
    (one,) = view.reports
    assert (one.rank, one.step, one.loss) == found
    assert view.newest == found[1]


def test_a_summary_with_fewer_digits_does_not_count_beside_lines_of_ranks(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("rank 0: step 60: loss 0.3211885775445394\nstep 60: loss 0.321188577545, weights 63.3\n")
    view = JobView(tmp_path, log)
    view.look()
    assert [(one.rank, one.loss) for one in view.reports] == [(0, 0.3211885775445394)]


# ---------------------------------------------------------------- processes


def test_no_signal_goes_to_a_process_that_has_the_pid_of_another():
    with subprocess.Popen(["sleep", "3600"]) as sleeper:
        process = processes.read(sleeper.pid)
        assert not processes.send(dataclasses.replace(process, started=process.started - 1), signal.SIGKILL)
        assert sleeper.poll() is None
        assert processes.send(process, signal.SIGKILL)
        assert sleeper.wait() == -signal.SIGKILL
    assert not processes.send(process, signal.SIGKILL)


def test_processes_are_found_by_their_mark_in_a_session_of_their_own():
    environment = os.environ | {"NTP_OUTSIDE": "of this test"}
    with subprocess.Popen(["sleep", "3600"], env=environment, start_new_session=True) as sleeper:
        found = processes.marked("NTP_OUTSIDE", "of this test")
        assert [process.pid for process in found] == [sleeper.pid]
        processes.kill_all(found)


HANDLED = """
import sys, time
print(sys.argv, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGRTMIN + 1, 3), (signal.SIGUSR2, 1)])
def test_signal_handlers_of_a_script_run(tmp_path, number, code):
    script = tmp_path / "script.py"
    script.write_text(HANDLED)
    words = [sys.executable, "-m", "ntp_plugin.testing.signal_handlers", str(script), "--flag"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == f"{[str(script), '--flag']}\n"
        assert processes.handles(processes.read(process.pid), number)
        assert not processes.handles(processes.read(process.pid), signal.SIGALRM)
        process.send_signal(number)
        assert process.wait() == code


# ---------------------------------------------------------------- checkpoints


def test_checkpoints_of_the_newest_step_are_compared(tmp_path):
    for run, last in (("a", 1.0), ("b", 1.0 + 1e-3), ("c", 1.0)):
        for step, value in ((4, 9.0 if run == "a" else 5.0), (12, last)):
            folder = tmp_path / run / f"global_step{step}"
            folder.mkdir(parents=True)
            torch.save({"module": {"w": torch.tensor([value, 0.5])}, "step": 3}, folder / "mp_rank_00.pt")
    assert checkpoints.apart(tmp_path / "c", tmp_path / "a") == 0.0
    assert checkpoints.apart(tmp_path / "b", tmp_path / "a") == pytest.approx(1e-3, rel=1e-3)
    assert checkpoints.apart(tmp_path / "empty", tmp_path / "a") == float("inf")
    assert checkpoints.apart(tmp_path / "a", tmp_path / "empty") is None


class OfAFramework:
    """Must not be made when a checkpoint is read."""

    def __init__(self, says):
        self.says = says

    def __setstate__(self, state):
        raise AssertionError("it was read")


def test_tensors_are_read_from_a_checkpoint_with_framework_objects(tmp_path):
    saved = {"scaler": OfAFramework("x"), "kind": OfAFramework, "flat": [torch.tensor([1.5], requires_grad=True)]}
    torch.save(saved, tmp_path / "zero_pp_rank_0.pt")
    found = checkpoints.read(tmp_path)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"zero_pp_rank_0.pt//flat/0": [1.5]}


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "behind --, but nothing"),
        (["--", "torchrun", "x.py"], "behind --, but torchrun x.py"),
        (["--kinds", "kil", "--", "ntp", "run", "x.py"], "kil is not known"),
        (["--fault", "3", "--", "ntp", "run", "x.py"], "did you mean --faults"),
        (["--faults", "0", "--", "ntp", "run", "x.py"], "argument --faults: '0' is not a whole number from 1"),
        (["--", "ntp", "run", "--ntp-run-dir=x", "x.py"], "leave --ntp-run-dir out"),
        (["--line", "(", "--", "ntp", "run", "x.py"], "--line"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, message, capsys):
    assert main(["chaos", "outside", *words]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
