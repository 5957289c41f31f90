"""A Megatron rank with other settings than the others is refused, with the names of the differences."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from tests.harness.parity.job import RECIPES, have_megatron_imported
from tests.harness.parity.live import Play
from tests.megatron.test_live import assert_same_training, job
from tests.refused import assert_all_are_refused

LONG_S = 400


@dataclasses.dataclass(frozen=True)
class Deviating(Play):
    """One process with other settings: other arguments, variables, or another version of the plugin."""

    who: str = ""
    """Its incarnation."""
    words: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    version: str = ""

    def _play(self, rank):
        if rank.member_id.incarnation == self.who:
            import ntp_plugin  # noqa: PLC0415

            os.environ |= dict(self.variables)
            ntp_plugin.__version__ = self.version or ntp_plugin.__version__
            return dataclasses.replace(self, job=_with_words(self.job, self.words), who="")._play(rank)
        return super()._play(rank)


def _with_words(of, words):
    return dataclasses.replace(of, more=" ".join([of.more, *words]))


WAYS = [
    pytest.param({"words": ("--seed", "4321")}, r"seed \(arguments\) is 4321 here and 1234 there", id="seed"),
    pytest.param(
        {"variables": (("NVTE_X", "1"),)}, r"NVTE_X \(environment\) is 1 here and not set there", id="variable"
    ),
    pytest.param({"version": "0.0.7"}, r"ntp-plugin \(versions\) is 0\.0\.7 here and ", id="version"),
    pytest.param({"words": ("--ntp-min-tp-width=2",)}, r"min_tp_width \(policy\) is 2 here and 1 there", id="policy"),
]


@pytest.mark.parametrize(
    ("way", "named"),
    [pytest.param(*way.values, id=way.id, marks=[pytest.mark.short] * (way.id == "seed")) for way in WAYS],
)
def test_a_joining_process_with_other_settings_is_refused_and_the_job_continues(way, named):
    have_megatron_imported()
    play = Deviating(job(), who="3/1", **way)
    with Ranks(4, play, faults=[kill(3, during="backward", step=5)], fault_points=FAULT_POINTS) as ranks:
        ranks.wait_for_death(3, LONG_S)
        ranks.start_again(3)
        with pytest.raises(Refused, match=named) as refused:
            ranks.wait(LONG_S, but=[0, 1, 2])
        lived = ranks.wait(LONG_S, but=[3])
    assert refused.value.exit_code == 2
    assert_same_training(lived)


@pytest.mark.parametrize(("way", "named"), WAYS)
def test_founders_with_other_settings_end_the_job_before_its_first_step(way, named):
    have_megatron_imported()
    match = rf"rank 2 \(here\) and rank 0 \(there\): {named}"
    with Ranks(4, Deviating(job(), who="2/0", **way), fault_points=FAULT_POINTS) as ranks:
        assert_all_are_refused(ranks, 4, match)


@pytest.fixture
def corpora(tmp_path):
    """Two folders with a corpus of one name and one size each, which is not the same."""
    for folder, factor in (("one", 1), ("other", 3)):
        (tmp_path / folder).mkdir()
        text = tmp_path / folder / "text"
        text.write_text("".join(f"{number % 97:02d} {factor * number % 97:02d} 1\n" for number in range(1, 200)))
        command = [sys.executable, RECIPES / "tokenize_text.py", text, tmp_path / folder / "tokens"]
        subprocess.run(command, check=True, capture_output=True)
    return [str(tmp_path / folder / "tokens") for folder in ("one", "other")]


def test_another_data_set_on_one_rank_ends_the_job_before_its_first_step(corpora):
    """Its files have the same names and sizes."""
    one, other = corpora
    have_megatron_imported()
    play = Deviating(job(more=f"--data-path {one}"), who="2/0", words=("--data-path", other))
    match = r"rank 2 \(here\) and rank 0 \(there\): part 1\.bin \(data_path\) is \d+ bytes, "
    with Ranks(4, play, fault_points=FAULT_POINTS) as ranks:
        assert_all_are_refused(ranks, 4, match)


def test_the_same_data_set_may_lie_in_another_folder(corpora, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for ending in (".bin", ".idx"):
        shutil.copy(corpora[0] + ending, moved / f"tokens{ending}")
    have_megatron_imported()
    play = Deviating(job(more=f"--data-path {corpora[0]}"), who="2/0", words=("--data-path", str(moved / "tokens")))
    with Ranks(4, play, fault_points=FAULT_POINTS) as ranks:
        assert len(ranks.wait(LONG_S)) == 4
