"""Replicas of a Megatron job are compared: what has become corrupt in silence is found, named, and not gone on from."""

import pytest

from benchmarks.parity.job import STEPS
from benchmarks.parity.layouts import MODELS
from benchmarks.parity.live import live
from ntp_plugin.copies.store import Store
from ntp_plugin.errors import SilentCorruption
from ntp_plugin.telemetry import Compared, Corrupted
from ntp_plugin.testing.faults import kill
from tests.megatron.test_live import SHARDED, assert_same_training, job, told, widths


@pytest.mark.parametrize("more", ["", f"{SHARDED} --overlap-grad-reduce"])
def test_a_flipped_bit_stops_the_job(more):
    """Of two replicas nobody can say which is wrong."""
    with pytest.raises(
        SilentCorruption, match=r"_embeddings.weight \(weight\) differs between 2 replicas after step 6"
    ):
        live(job(spoil="a_bit_flips", more=f"{more} --ntp-watch-steps 3"))


@pytest.mark.parametrize(("every", "left"), [(1, {4, 5}), (3, set())])
def test_nobody_begins_from_copies_that_were_made_since_all_were_alike(every, left, tmp_path):
    more = f"--use-distributed-optimizer --ntp-watch-steps {every}"
    with pytest.raises(SilentCorruption, match=f"at step {5 if every == 1 else 3} all were alike"):
        live(job(spoil="a_bit_flips", more=more, copies=str(tmp_path)))
    assert {manifest.version.step for _, manifest in Store(tmp_path / "host-0").found()} == left


@pytest.mark.parametrize("more", ["", f"{SHARDED} --overlap-grad-reduce"])
def test_a_flipped_bit_is_healed(more, tmp_path):
    """Of three replicas two agree: the slot that has other bits leaves, and its units come from the others."""
    more = f"{more} --ntp-watch-steps 3 --ntp-on-sdc heal --ntp-events {tmp_path / 'events'}"
    lived, _ = live(job(spoil="a_bit_flips", dp=3, more=more), leaving=[3])
    assert widths(lived) == {0: 2, 1: 2, 2: 1, 4: 2, 5: 2}
    assert_same_training(lived)
    (found,) = {event.what for event in told(tmp_path / "events", Corrupted)}
    assert "in r1.s0.t1 is not what the other replicas have after step 6" in found


def test_no_copy_is_made_of_what_is_corrupt(tmp_path):
    """The slot that leaves had the only live holding of what has flipped, and its copies are what the others go on
    from: the newest is of the step before."""
    more = f"--use-distributed-optimizer --ntp-watch-steps 3 --ntp-on-sdc heal --ntp-events {tmp_path / 'events'}"
    lived, _ = live(job(spoil="a_bit_flips_in_its_own_shard", dp=3, more=more), leaving=[3])
    assert widths(lived) == {0: 2, 1: 2, 2: 1, 4: 2, 5: 2}
    assert_same_training(lived)
    (found,) = {event.what for event in told(tmp_path / "events", Corrupted)}
    assert "in r1.s0.t1 is not what the other replicas have after step 6" in found


@pytest.mark.parametrize("moment", ["backward", "compare"])
def test_nothing_is_taken_for_corrupt_that_is_not(moment, tmp_path):
    """Whole, hurt and whole again, compared before every step; also where the loss is in the comparison."""
    more = f"--ntp-watch-steps 1 --ntp-events {tmp_path / 'events'}"
    watched = job(spoil="nobody_tells_all_digests", more=more)
    lived, _ = live(watched, faults=[kill(3, during=moment, step=5)], back={3: 10})
    assert_same_training(lived)
    assert not told(tmp_path / "events", Corrupted)


@pytest.mark.parametrize("slot", [0, 7])
def test_sums_do_where_two_stages_have_an_embedding_in_common(slot, tmp_path):
    more = f"--ntp-watch-steps 1 --ntp-events {tmp_path / 'events'}"
    watched = job(model=MODELS["tied embeddings"], pp=2, spoil="nobody_tells_all_digests", more=more)
    live(watched, faults=[kill(slot, during="backward", step=5)])
    compared = told(tmp_path / "events", Compared)
    assert {event.step for event in compared} == set(range(1, STEPS)) and not any(event.odd for event in compared)
