"""A DeepSpeed rank with other settings than the others is refused, with the names of the differences."""

import dataclasses
import os

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.recovery import same_settings
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from tests.harness.zero.compare import differences, used_once, within
from tests.harness.zero.job import Job, Play, have_deepspeed_imported, run
from tests.refused import assert_all_are_refused

LONG_S = 400


@dataclasses.dataclass(frozen=True)
class Deviating(Play):
    """One process with other settings: other keys, another data set, or other variables."""

    who: str = ""
    """Its incarnation."""
    keys: tuple[tuple[str, object], ...] = ()
    shifted: int = 0
    """Its samples are those of other numbers, of a data set as long."""
    variables: tuple[tuple[str, str], ...] = ()

    def _play(self, rank):
        if rank.member_id.incarnation != self.who:
            return super()._play(rank)
        os.environ |= dict(self.variables)
        if self.shifted:
            from tests.harness.zero.models import Samples  # noqa: PLC0415

            item = Samples.__getitem__
            Samples.__getitem__ = lambda samples, number: item(samples, number + self.shifted)
        return dataclasses.replace(self, job=dataclasses.replace(self.job, more=self.keys), who="")._play(rank)


WAYS = [
    pytest.param({"keys": (("seed", 7),)}, r"configuration seed \(arguments\) is 7 here and not set there", id="key"),
    pytest.param({"shifted": 1}, r"samples \(data\) is \w+", id="data"),
    pytest.param({"variables": (("NVTE_X", "1"),)}, r"NVTE_X \(environment\) is 1 here and not set", id="variable"),
]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("way", "named"), WAYS)
def test_a_joining_process_with_other_settings_is_refused_and_the_job_continues(stage, way, named):
    have_deepspeed_imported()
    trained = Job(stage=stage)
    with Ranks(4, Deviating(trained, who="3/1", **way), faults=[kill(3, during="backward", step=5)]) as ranks:
        ranks.wait_for_death(3, LONG_S)
        ranks.start_again(3)
        outcomes = ranks.wait(LONG_S, but=[3])
        with pytest.raises(Refused, match=named):
            ranks.wait(LONG_S, but=[0, 1, 2])
    assert within(differences(outcomes, ranks.rows, trained), trained.dtype)
    assert used_once(ranks.rows, trained)


@pytest.mark.short
@pytest.mark.parametrize(("way", "named"), WAYS)
def test_founders_with_other_settings_end_the_job_before_its_first_step(way, named):
    have_deepspeed_imported()
    match = rf"rank 2 \(here\) and rank 0 \(there\): {named}"
    with Ranks(4, Deviating(Job(), who="2/0", **way)) as ranks:
        assert_all_are_refused(ranks, 4, match)


@dataclasses.dataclass(frozen=True)
class NobodyCompares(Play):
    """The behaviour before ranks compared their settings: one has samples of its own, which is not reported."""

    def _play(self, rank):
        same_settings.require_same = lambda *_, **__: None
        return dataclasses.replace(Deviating(self.job, who="2/0", shifted=1))._play(rank)


def test_another_data_set_on_one_rank_is_not_detected_by_the_others():
    """A negative control: the replicas stay equal, and all of them are wrong."""
    outcomes, rows = run(Job(), play=NobodyCompares)
    assert not within(differences(outcomes, rows, Job()), Job().dtype)
