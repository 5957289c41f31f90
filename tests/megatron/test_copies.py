"""Ranks die with state that only they held, and the job resumes from copies of it.

As in `test_live.py` the reference is stock Megatron: one full-width replica that computes the whole batch.
"""

import numpy as np
import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of
from ntp_plugin.errors import Excluded, Refused, StateLost
from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.telemetry import Committed, Copied, CopyTrouble, Follower, Restored
from ntp_plugin.testing.faults import freeze, kill
from ntp_plugin.testing.ranks import Ranks
from tests.harness.parity.job import Job, have_megatron_imported, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, OLD, degraded, uniform
from tests.harness.parity.live import Play, as_if_always_there, live
from tests.megatron.test_live import (
    IN_A_RECOVERY,
    IN_A_STEP,
    OVERLAP,
    SHARDED,
    assert_every_sample_once,
    assert_same_training,
    widths,
)

BATCH = 6


def job(more=OVERLAP, **options):
    return Job(**{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, "more": more, **options})


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events"


def events_of(events, kind):
    return [one.event for one in Follower(events).news() if isinstance(one.event, kind)]


def assert_little_was_lost(events, *, lag=0):
    """Steps that were over and taken again: the one whose copy was under way, and those that none was made of."""
    restored = events_of(events, Restored)
    assert restored, "something came from copies"
    assert max(event.again for event in restored) <= lag + 1, restored


def assert_same_bits(lived, without):
    for slot, one in lived.items():
        assert (one.seen.losses, one.seen.norms) == (without[slot].seen.losses, without[slot].seen.norms)
        for name, part in without[slot].seen.parts.items():
            assert np.array_equal(one.seen.parts[name].values, part.values), name


@pytest.mark.short
def test_a_job_without_losses_trains_as_the_reference(events):
    """Every step is copied, by every rank; the bits of the training are those without copies."""
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}"))
    without, _ = live(job(f"{OVERLAP} --ntp-copies-mode off"))
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_same_bits(lived, without)
    assert not events_of(events, CopyTrouble)
    copied, steps = events_of(events, Copied), events_of(events, Committed)
    assert len(copied) >= len(steps) / 2, "a copy may take longer than a step here, and never two"


@pytest.mark.parametrize("fault_point", [*IN_A_STEP, "gather"])
@pytest.mark.parametrize("slot", range(4))
def test_any_slot_dies_at_any_fault_point(slot, fault_point, events):
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}"), faults=[kill(slot, during=fault_point, step=5)])
    assert sorted(lived) == [other for other in range(4) if other != slot]
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)


@pytest.mark.parametrize("fault_point", IN_A_RECOVERY)
def test_another_dies_in_the_recovery(fault_point, events):
    lived, rows = live(
        job(f"{OVERLAP} --ntp-events={events}", tp=4),
        faults=[kill(7, during="backward", step=5), kill(1, during=fault_point, epoch=1)],
    )
    assert widths(lived) == dict.fromkeys((0, 2, 3, 4, 5, 6), 3)
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)


def test_another_dies_while_steps_are_taken_again(events):
    """The second loss comes in the sixth section, before the steps of the first recovery are repeated."""
    faults = [kill(3, during="applied", step=5), kill(1, during="backward", step=6)]
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}"), faults=faults)
    assert widths(lived) == {0: 1, 2: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert {event.again for event in events_of(events, Restored)} == {1}


def test_the_last_step_is_not_lost_either():
    """All have voted on it when one dies; no section follows but the end of the training."""
    lived, rows = live(job(), faults=[kill(2, during="applied", step=20)])
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_a_single_replica_continues(events):
    """No data parallelism at all: everything is copied."""
    lived, rows = live(job(f"--ntp-events={events}", tp=4, dp=1), faults=[kill(2, during="backward", step=5)])
    assert widths(lived) == dict.fromkeys((0, 1, 3), 3)
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)


def test_a_single_replica_shrinks_twice_and_grows():
    faults = [kill(2, during="backward", step=4), kill(0, during="applied", step=7)]
    lived, rows = live(job("", tp=4, dp=1), faults=faults, back={2: 12})
    assert widths(lived) == dict.fromkeys((1, 2, 3), 3)
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_the_same_slot_is_lost_in_all_replicas():
    """With copies of unique state only, nobody would survive this."""
    faults = [kill(slot, during="backward", step=5) for slot in (1, 3)]
    lived, rows = live(job("--ntp-copies-protect all"), faults=faults)
    assert widths(lived) == {0: 1, 2: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize("fault_point", ["backward", "applied"])
def test_a_host_is_lost(fault_point, events):
    """Two hosts of two ranks: the shared memory of the second goes with it, and the first has copies of it."""
    faults = [kill(slot, during=fault_point, step=5) for slot in (2, 3)]
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}", per_host=2), faults=faults)
    assert widths(lived) == {0: 2, 1: 2}
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)
    assert {event.far for event in events_of(events, Copied) if event.step < 4} == {1}


def test_while_far_copies_do_not_arrive_near_ones_do_not_grow_old(events):
    """The slot dies during its copy: the one before is complete, and recent."""
    options = {"per_host": 2, "spoil": "far_copies_do_not_arrive"}
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}", **options), faults=[kill(3, during="forward", step=9)])
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)
    assert any("does not arrive" in event.what for event in events_of(events, CopyTrouble))


def test_a_hung_parity_host_is_evicted_and_training_continues(events):
    """It is stopped and not dead, so no connection to it closes."""
    spec = job(f"{OVERLAP} --ntp-events={events}", per_host=2)
    have_megatron_imported()
    with Ranks(4, Play(spec), faults=[freeze(2, during="backward", step=5)], fault_points=FAULT_POINTS) as ranks:
        lived = ranks.wait(but=[2])
        assert ranks.verdicts[2].kind == "frozen"
        ranks.thaw(2)
        with pytest.raises(Excluded, match=r"slot 2 .* the others went on without it"):
            ranks.wait(but=[0, 1, 3])
    assert widths(lived) == {0: 2, 1: 2, 3: 1}
    assert_same_training(lived)
    assert_every_sample_once(ranks.rows)
    assert_little_was_lost(events)


def test_a_host_without_far_copies_is_lost():
    faults = [kill(slot, during="backward", step=5) for slot in (2, 3)]
    with pytest.raises(StateLost, match=r"r1\.s0\.t0.* no version of it of which all parts are copied.*restart from"):
        live(job(f"{OVERLAP} --ntp-copies-count 0", per_host=2), faults=faults)


PARITIES = f"{OVERLAP} --ntp-copies-mode xor:2"


@pytest.mark.parametrize("fault_point", [pytest.param("backward", marks=pytest.mark.short), "applied"])
def test_a_host_is_lost_whose_far_copies_are_shares_of_parities(fault_point, events):
    """Three hosts of two ranks. The first or the third host keeps a parity of each rank of the second, and no copy."""
    faults = [kill(slot, during=fault_point, step=5) for slot in (2, 3)]
    lived, rows = live(job(f"{PARITIES} --ntp-events={events}", dp=3, per_host=2), faults=faults)
    assert widths(lived) == dict.fromkeys((0, 1, 4, 5), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events)
    assert not [event for event in events_of(events, CopyTrouble) if "cannot be reached" not in event.what]
    assert {one for event in events_of(events, Restored) for one in event.rebuilt} <= set(REBUILT_OF_THE_SECOND)
    assert all(len(event.rebuilt) == 2 for event in events_of(events, Restored))


REBUILT_OF_THE_SECOND = [
    f"rebuilt-{slot}-e0-{number} on host {host}" for slot, host in ((2, 2), (3, 0)) for number in (0, 1)
]


def test_two_hosts_are_lost_one_after_the_other_with_parities():
    """Two of three hosts are lost. The survivors of the first loss keep full copies for each other."""
    faults = [kill(slot, during="backward", step=5) for slot in (2, 3)]
    faults += [kill(slot, during="backward", step=10) for slot in (4, 5)]
    lived, rows = live(job(PARITIES, dp=3, per_host=2), faults=faults)
    assert widths(lived) == {0: 2, 1: 2}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_two_hosts_that_share_a_parity_are_lost_at_once():
    faults = [kill(slot, during="backward", step=5) for slot in (2, 3, 4, 5)]
    with pytest.raises(StateLost, match=r"no version of it .*have fewer slots share a parity"):
        live(job(PARITIES, dp=3, per_host=2), faults=faults)


def test_one_rank_of_a_host_is_lost_with_parities(events):
    """Its near copy is there, and nothing is rebuilt. Its group continues without it, and then its host is lost."""
    faults = [kill(3, during="applied", step=5), kill(2, during="backward", step=9)]
    lived, rows = live(job(f"{PARITIES} --ntp-events={events}", dp=3, per_host=2), faults=faults)
    assert widths(lived) == dict.fromkeys((0, 1, 4, 5), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert {len(event.rebuilt) for event in events_of(events, Restored)} == {0, 1}


def test_too_few_hosts_for_a_parity_are_refused():
    with pytest.raises(Refused, match=r"xor:2 needs 2 node domains .* 2 hosts of 2 GPUs make 2"):
        live(job(PARITIES, per_host=2))


def test_ranks_on_other_hosts_are_asked(events):
    """One process of a host dies; its part goes to ranks of both hosts, and one of them only has a copy of it."""
    lived, rows = live(
        job(f"{OVERLAP} --ntp-copies-mode near --ntp-events={events}", tp=4, per_host=4),
        faults=[kill(5, during="backward", step=5)],
    )
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert any(event.elsewhere for event in events_of(events, Restored))


def test_a_joining_rank_gets_its_state_from_copies(events):
    lived, rows = live(job(f"{OVERLAP} --ntp-events={events}"), faults=[kill(3, during="applied", step=4)], back={3: 9})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_a_replica_that_is_too_narrow_is_idle_until_a_rank_rejoins():
    lived, rows = live(job(f"{OVERLAP} --ntp-min-tp-width 2"), faults=[kill(1, during="applied", step=5)], back={1: 10})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize("fault_point", [*IN_A_STEP, "exchange", "gather"])
@pytest.mark.parametrize("slot", [0, 3, 6])
def test_stages(slot, fault_point, events):
    """One of each replica in the first stage, and one in the last."""
    lived, _ = live(job(f"{OVERLAP} --ntp-events={events}", pp=2), faults=[kill(slot, during=fault_point, step=5)])
    assert len(lived) == 7
    assert_same_training(lived, run(uniform(BASE, tp=2, pp=2)))
    assert_little_was_lost(events)


@pytest.mark.parametrize("fault_point", ["forward", "exchange", "applied", "gather"])
def test_the_stage_in_the_middle(fault_point, events):
    pipeline = {"tp": 2, "pp": 3, "chunks": 1}
    more = f"{OVERLAP} --ntp-events={events}"
    lived, _ = live(job(more, dp=2, **pipeline), faults=[kill(7, during=fault_point, step=5)])
    assert len(lived) == 11
    assert_same_training(lived, run(uniform(BASE, **pipeline)))
    assert_little_was_lost(events)


@pytest.mark.parametrize("slot", [0, 5])
def test_an_embedding_in_two_stages(slot):
    lived, _ = live(job(SHARDED, model=MODELS[OLD], pp=2), faults=[kill(slot, during="applied", step=5)])
    assert_same_training(lived, run(uniform(OLD, tp=2, pp=2)))


@pytest.mark.short
def test_in_the_last_gather():
    """Which no step follows that would be taken again with it."""
    lived, rows = live(job(), faults=[kill(3, during="gather", step=21)])
    assert widths(lived) == {0: 2, 1: 2, 2: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize(
    ("fault_point", "section"), [("applied", 4), ("gather", 5), ("applied", 5), ("forward", 6), ("backward", 7)]
)
def test_beside_evaluations(fault_point, section):
    """In the fifth section parameters are gathered that the next step would have gathered as it goes, and the sixth is
    the first evaluation: a loss in either has a step taken again before it is begun again."""
    more = f"{OVERLAP} --eval-interval 4 --eval-iters 2"
    lived, _ = live(job(more), faults=[kill(3, during=fault_point, step=section)])
    whole = run(uniform(BASE, more="--eval-interval 4 --eval-iters 2"))
    assert_same_training(lived, whole)
    for one in lived.values():
        assert np.allclose(one.seen.evaluated, whole[0].evaluated, rtol=1e-12, atol=0)


def test_evaluations_run_while_a_replica_is_idle():
    """Megatron has all ranks gather what the next step would have gathered, and the idle one has nothing on its way."""
    more = "--eval-interval 4 --eval-iters 2"
    lived, _ = live(job(f"{OVERLAP} {more} --ntp-min-tp-width 2"), faults=[kill(1, during="backward", step=3)])
    trained = {slot: one for slot, one in lived.items() if one.width == 2}
    assert sorted(trained) == [2, 3]
    assert_same_training(trained, run(uniform(BASE, more=more)))


def test_copies_may_lag(events):
    more = f"{OVERLAP} --ntp-copies-lag-steps 3 --ntp-events={events}"
    lived, rows = live(job(more), faults=[kill(3, during="backward", step=12)])
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_little_was_lost(events, lag=3)
    steps = sorted({event.step for event in events_of(events, Copied) if event.step < 12})
    assert steps == [0, 4, 8], steps


def test_slow_parity_hosts_delay_no_step(events):
    """A copy would take minutes. Each slot reports that once, and no step or end waits for it."""
    lived, rows = live(job(f"{OVERLAP} --ntp-copies-gb-per-s 0.000001 --ntp-events={events}", per_host=2))
    without, _ = live(job(f"{OVERLAP} --ntp-copies-mode off", per_host=2))
    assert_same_training(lived)
    assert_every_sample_once(rows)
    assert_same_bits(lived, without)
    late = [event.what for event in events_of(events, CopyTrouble) if "is not copied after 10 s" in event.what]
    assert sorted(what.partition("by slot ")[2][0] for what in late) == ["0", "1", "2", "3"], late
    assert all(what.startswith("step 0 ") for what in late)


def test_the_last_replica_is_reported_when_nothing_is_copied(events):
    """Replica 0 is too narrow and idle. That is reported once."""
    more = f"--ntp-min-tp-width 2 --ntp-events={events}"
    lived, rows = live(job(more), faults=[kill(1, during="applied", step=5)], back={1: 10})
    assert_same_training(lived)
    assert_every_sample_once(rows)
    (only,) = events_of(events, CopyTrouble)
    assert "only replica 1 still trains" in only.what
    assert "--ntp-copies-protect all" in only.what


def test_a_host_without_room_for_copies(events):
    """This is reported, and costs no step; a loss then ends the job with the reason."""
    more = f"{OVERLAP} --ntp-copies-max-host-gb 0.0001 --ntp-events={events}"
    lived, _ = live(job(more))
    assert_same_training(lived)
    assert any("max_host_gb" in event.what for event in events_of(events, CopyTrouble))
    assert not events_of(events, Copied)
    with pytest.raises(StateLost, match="no version of it of which all parts are copied"):
        live(job(more), faults=[kill(3, during="backward", step=5)])


def test_copies_can_be_switched_off():
    with pytest.raises(StateLost, match=r"r1\.s0\.t1 lost .* switch copies on"):
        live(job(f"{OVERLAP} --ntp-copies-mode off"), faults=[kill(3, during="backward", step=5)])


def test_unknown_state_is_refused():
    with pytest.raises(Refused, match=r"does not know the buffer .*odd.*--no-ntp-copies-strict"):
        live(job(spoil="a_buffer_that_nobody_knows"))
    lived, _ = live(job(f"{OVERLAP} --no-ntp-copies-strict", spoil="a_buffer_that_nobody_knows"))
    assert_same_training(lived)


def test_a_degraded_run_equals_a_planned_one_bit_for_bit():
    """A loss before anything is applied: then every step is one of the degraded layout."""
    planned = run(degraded(BASE, {"tp": 2, "dp": 2, "lost": ("r1.s0.t1",)}, more=OVERLAP))
    lived, _ = live(job(), faults=[kill(3, during="step", step=1)])
    for slot, one in lived.items():
        assert (one.seen.losses, one.seen.norms) == (planned[slot].losses, planned[slot].norms)
        for name, part in planned[slot].parts.items():
            assert np.array_equal(one.seen.parts[name].values, part.values), name


@pytest.mark.parametrize(("more", "back"), [(OVERLAP, {}), (OVERLAP, {2: 10}), ("", {})])
def test_bf16(more, back):
    """Copies hold the float32 masters; the weights are derived from them."""
    options = BF16 | {"more": f"{BF16['more']} {more}"}
    layout = {"tp": 2, "dp": 2} if more else {"tp": 4, "dp": 1}
    lived, _ = live(job(**options, **layout), faults=[kill(2, during="applied", step=5)], back=back)
    assert len(lived) == 3 + len(back)
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE, **BF16)))
    bounds = bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


def test_float32():
    lived, _ = live(job(dtype="float32"), faults=[kill(2, during="applied", step=5)])
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE, dtype="float32")))
    assert max(worst.values()) <= BOUNDS["float32"], worst


def test_a_corrupt_copy_on_one_rank_makes_all_fall_back_together(events):
    """Slot 0 reads its own copy and finds it wrong, while all others read sound ones. All go back to one version: with
    the sound far copy of slot 0's part to the newest, and never to another than their peers."""
    spoilt = job(f"{OVERLAP} --ntp-events={events}", per_host=2, spoil="an_own_copy_of_slot_0_is_corrupt")
    lived, rows = live(spoilt, faults=[kill(3, during="backward", step=5)])
    assert any("near-0" in event.what or "slot 0" in event.what for event in events_of(events, CopyTrouble))
    assert len({event.step for event in events_of(events, Restored)}) == 1
    assert_little_was_lost(events)
    assert_same_training(lived)
    assert_every_sample_once(rows)
