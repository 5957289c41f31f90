"""A joining rank skips past data epochs by itself, also when one begins while it waits for admission."""

import dataclasses
import math
import time
from pathlib import Path

import pytest
import torch

from ntp_plugin.errors import Excluded
from ntp_plugin.membership import admission
from ntp_plugin.testing.faults import kill
from tests.harness.zero.compare import assert_same_training
from tests.harness.zero.job import Job, Play, run


class OpensAtOnce(Play):
    """Its members poll for admission with each vote: steps are short here."""

    def _play(self, rank):
        admission._LOOK_S = 0.0
        return super()._play(rank)


def together_in_turns(rows, slot):
    """After each turn, with how many it was."""
    return [ranks for kind, _, who, ranks in (row for row in rows if row[0] == "turn") if who == slot]


@pytest.mark.parametrize("started_at", [10, 13])
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 0, "tp": 2, "ranks": 4}])
def test_a_joining_rank_skips_collectives_after_past_data_epochs(options, started_at, tmp_path):
    """It skips them alone, before it is admitted: it receives nothing, and nobody waits for it. It also skips a data
    epoch that the others begin while it waits for admission."""
    job = Job(**options, gathers_turns=True, folder=str(tmp_path))
    faults, started = [kill(2, during="vote", step=6)], {2: started_at}
    outcomes, rows = run(job, faults=faults, back={2: 14}, before_admission=started, play=OpensAtOnce)
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, dataclasses.replace(job, gathers_turns=False, folder=""))
    mine = [path.name for path in tmp_path.glob("2-*.pt")]
    assert sorted(mine) == ["2-0.pt", "2-3.pt", "2-4.pt"], "of turns that it was there for"
    if job.tp == 1:
        for turn in (0, 3, 4):
            written, others = (torch.load(tmp_path / f"{slot}-{turn}.pt") for slot in (2, 3))
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(written, others, strict=True))
    assert together_in_turns(rows, 2) == [4, 1, 1, 1, 4, 4]


@pytest.mark.parametrize(
    "options", [{"stage": 1}, pytest.param({"stage": 0, "tp": 2, "ranks": 4}, marks=pytest.mark.short)]
)
def test_admission_opens_at_the_start_of_a_data_epoch(options):
    """Admission waits for the first step of the fourth data epoch: a rank that asked in the third has to skip that
    first."""
    job = Job(**options, gathers_turns=True)
    faults, started = [kill(2, during="vote", step=6)], {2: 10}
    outcomes, rows = run(job, faults=faults, back={2: 12}, before_admission=started, play=OpensAtOnce)
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, dataclasses.replace(job, gathers_turns=False))
    assert together_in_turns(rows, 2) == [4, 1, 1, 1, 4, 4]


class IsHeldUp(OpensAtOnce):
    """The joining rank is admitted when the others, who have opened admission, are already at step 18."""

    def _play(self, rank):
        from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415
        from ntp_plugin.recovery.elastic_rank import ElasticRank  # noqa: PLC0415

        went_on, begin, drive = Path(rank.folder) / "gone-on", AccumulationWindow._begin, ElasticRank.drive

        def begun(window):
            begin(window)
            driver = window._loop.driver
            if window.step == 18 and driver.target_epoch == 1:  # since the loss
                went_on.touch()
                while not driver._agreement.newer_view_exists():
                    time.sleep(0.01)

        def held_up(self, trainer):
            while rank.joining and not went_on.exists():
                time.sleep(0.01)
            return drive(self, trainer)

        AccumulationWindow._begin, ElasticRank.drive = begun, held_up
        try:
            return super()._play(rank)
        except Excluded as error:
            rank.write([["late", str(error)]])
            raise


def test_a_rank_that_joins_behind_a_data_epoch_ends_and_the_others_continue():
    job = Job(stage=1)
    outcomes, rows = run(job, faults=[kill(2, during="vote", step=6)], back={2: 14}, leaving=[2], play=IsHeldUp)
    assert sorted(outcomes) == [0, 1, 3]
    assert_same_training(outcomes, rows, job)
    (error,) = (row[1] for row in rows if row[0] == "late")
    assert "joins at step 18, in a data epoch that its script has not reached" in error


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_joining_rank_evaluates_is_no_number(stage):
    """Before its first step, as its script does: it has the weights that it was built with."""
    job = Job(stage=stage, ranks=4, evaluates=0)
    outcomes, rows = run(job, faults=[kill(3, during="vote", step=6)], back={3: 12})
    assert_same_training(outcomes, rows, job)
    losses = [row[2] for row in rows if row[0] == "evaluated"]
    assert [math.isnan(value) for value in losses] == [False] * 12 + [True] * 3
