"""Replicas of a Megatron job are compared: silent corruption is found, named, and never resumed from."""

import pytest

from ntp_plugin.copies.store import Store
from ntp_plugin.errors import NotFinite, SilentCorruption
from ntp_plugin.telemetry import Compared, Corrupted
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS
from tests.harness.parity.layouts import MODELS
from tests.harness.parity.live import live
from tests.megatron.test_live import SHARDED, assert_same_training, events_of, job, widths


@pytest.mark.parametrize("more", ["", f"{SHARDED} --overlap-grad-reduce"])
def test_a_flipped_bit_stops_the_job(more):
    """With two replicas it is not known which is wrong."""
    with pytest.raises(
        SilentCorruption, match=r"_embeddings.weight \(weight\) differs between 2 replicas after step 6"
    ):
        live(job(spoil="a_bit_flips", more=f"{more} --ntp-watch-steps 3"))


@pytest.mark.short
def test_a_flipped_bit_is_found_by_the_usual_settings_also_in_a_short_job(tmp_path):
    """Replicas are compared before the job ends, at the latest."""
    more = f"--ntp-events {tmp_path / 'events'}"
    with pytest.raises(SilentCorruption, match=r"_embeddings.weight \(weight\) differs between 2 replicas"):
        live(job(spoil="a_bit_flips", more=more))
    assert min(event.step for event in events_of(tmp_path / "events", Compared)) == 1


def test_no_checkpoint_is_written_of_differing_state(tmp_path):
    """They are compared before it is written, whatever else is due."""
    more = f"--ntp-watch-steps 1000 --save {tmp_path / 'saved'} --save-interval 8"
    with pytest.raises(SilentCorruption, match="differs between 2 replicas after step 8"):
        live(job(spoil="a_bit_flips", more=more))
    assert not list((tmp_path / "saved").rglob("*.distcp"))


@pytest.mark.parametrize(
    "more", [pytest.param("", marks=pytest.mark.short), "--rerun-mode disabled", f"{SHARDED} --rerun-mode disabled"]
)
def test_a_weight_that_is_not_finite_is_named_with_two_replicas(more):
    """Megatron finds it in the loss, or in the gradients, of that replica alone; the other one waits for it."""
    with pytest.raises(
        SilentCorruption, match=r"\(weight\) in r1\.s0\.t1 is not finite after step 6, and in other replicas it is"
    ):
        live(job(spoil="a_number_is_lost", more=more))


def test_a_replica_that_is_not_finite_is_healed(tmp_path):
    more = f"--ntp-on-sdc heal --ntp-events {tmp_path / 'events'}"
    lived, _ = live(job(spoil="a_number_is_lost", more=more), leaving=[3])
    assert widths(lived) == {0: 2, 1: 2, 2: 1}
    assert_same_training(lived)


def test_a_job_with_no_finite_replica_ends_with_its_own_error():
    with pytest.raises(NotFinite, match=r"not finite in the step after step 6 .*all replicas hold the same weights"):
        live(job(spoil="all_lose_a_number"))


@pytest.mark.parametrize(("every", "left"), [(1, {4, 5}), (3, set())])
def test_copies_newer_than_the_last_comparison_are_not_restored(every, left, tmp_path):
    more = f"--use-distributed-optimizer --ntp-watch-steps {every}"
    with pytest.raises(SilentCorruption, match=f"at step {5 if every == 1 else 3} all were alike"):
        live(job(spoil="a_bit_flips", more=more, copies=str(tmp_path)))
    assert {manifest.version.step for _, manifest in Store(tmp_path / "host-0").found()} == left


@pytest.mark.parametrize("more", ["", f"{SHARDED} --overlap-grad-reduce"])
def test_a_flipped_bit_is_healed(more, tmp_path):
    """Two of three replicas agree: the slot that has other bits leaves, and its units come from the others."""
    more = f"{more} --ntp-watch-steps 3 --ntp-on-sdc heal --ntp-events {tmp_path / 'events'}"
    lived, _ = live(job(spoil="a_bit_flips", dp=3, more=more), leaving=[3])
    assert widths(lived) == {0: 2, 1: 2, 2: 1, 4: 2, 5: 2}
    assert_same_training(lived)
    (found,) = {event.what for event in events_of(tmp_path / "events", Corrupted)}
    assert "in r1.s0.t1 is not what the other replicas have after step 6" in found


def test_corrupt_state_is_not_copied(tmp_path):
    """The leaving slot had the only live copy of the flipped state, and the others resume from its copies: the newest
    is of the step before."""
    more = f"--use-distributed-optimizer --ntp-watch-steps 3 --ntp-on-sdc heal --ntp-events {tmp_path / 'events'}"
    lived, _ = live(job(spoil="a_bit_flips_in_its_own_shard", dp=3, more=more), leaving=[3])
    assert widths(lived) == {0: 2, 1: 2, 2: 1, 4: 2, 5: 2}
    assert_same_training(lived)
    (found,) = {event.what for event in events_of(tmp_path / "events", Corrupted)}
    assert "in r1.s0.t1 is not what the other replicas have after step 6" in found


@pytest.mark.parametrize("fault_point", ["backward", "compare"])
def test_sound_state_is_not_reported_corrupt(fault_point, tmp_path):
    """Nominal, degraded and nominal again, compared before every step; also with the loss in the comparison."""
    more = f"--ntp-watch-steps 1 --ntp-events {tmp_path / 'events'}"
    watched = job(spoil="replicas_compared_by_sums_alone", more=more)
    lived, _ = live(watched, faults=[kill(3, during=fault_point, step=5)], back={3: 10})
    assert_same_training(lived)
    assert not events_of(tmp_path / "events", Corrupted)


@pytest.mark.parametrize("slot", [0, 7])
def test_sums_do_where_two_stages_have_an_embedding_in_common(slot, tmp_path):
    more = f"--ntp-watch-steps 1 --ntp-events {tmp_path / 'events'}"
    watched = job(model=MODELS["tied embeddings"], pp=2, spoil="replicas_compared_by_sums_alone", more=more)
    live(watched, faults=[kill(slot, during="backward", step=5)])
    compared = events_of(tmp_path / "events", Compared)
    assert {event.step for event in compared} == set(range(1, STEPS + 1)) and not any(event.odd for event in compared)
