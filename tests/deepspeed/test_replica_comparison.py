"""DeepSpeed replicas are compared while they train: a flipped bit is found, reported, and healed by a majority."""

import dataclasses
from pathlib import Path

import pytest

from ntp_plugin.copies.store import Store
from ntp_plugin.errors import SilentCorruption, StateLost
from ntp_plugin.telemetry import Committed, Compared, Corrupted, Follower
from ntp_plugin.testing.faults import kill
from tests.harness.zero.compare import differences, used_once, within
from tests.harness.zero.job import Job, Play, run

CUT, OWN = {"tp": 2}, {"tp": 2, "mpu": True}
JOBS = [{"stage": 0}, {"stage": 1}, {"stage": 0, **CUT}, {"stage": 1, **CUT}, {"stage": 0, **OWN}, {"stage": 1, **OWN}]
SHORT_OF_JOBS = [pytest.param(options, marks=[pytest.mark.short] * (options == JOBS[2])) for options in JOBS]


@dataclasses.dataclass(frozen=True)
class Flips(Play):
    """In a weight of slot 3 a bit flips when the sixth step is over. With ZeRO the next gather puts it right."""

    def _play(self, rank):
        from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415  (only ranks have DeepSpeed)

        commit = AccumulationWindow._commit

        def committed(window):
            commit(window)
            if rank.slot == 3 and window.step == 6:
                import torch  # noqa: PLC0415

                weight = next(window._engine.module.parameters()).data
                weight.view(-1)[:1].view(torch.uint8)[0] ^= 1

        AccumulationWindow._commit = committed
        return super()._play(rank)


def job(**options):
    ntp = {"watch_steps": 3, **options.pop("ntp", {})}
    return Job(**options, ntp=tuple(ntp.items()))


def events_of(path, kind):
    return [one.event for one in Follower(Path(path)).news() if isinstance(one.event, kind)]


@pytest.mark.parametrize("options", SHORT_OF_JOBS)
def test_a_flipped_bit_stops_the_job(options):
    """Among four replicas the wrong one is named, of two both are."""
    named = r"differs between 2 replicas after step 6" if options.get("tp") else r"in r3\.s0\.t0 is not what the other"
    with pytest.raises(SilentCorruption, match=rf"\((weight|main)\) {named}"):
        run(job(**options), play=Flips)


@pytest.mark.parametrize(("every", "left"), [(1, {4, 5}), (3, set())])
def test_copies_newer_than_the_last_comparison_are_not_restored(every, left, tmp_path):
    """The newest two were made after steps 4 and 5, of state that was never compared."""
    with pytest.raises(SilentCorruption, match=f"at step {5 if every == 1 else 3} all were alike"):
        run(job(stage=1, copies=str(tmp_path), ntp={"watch_steps": every}), play=Flips)
    assert steps_copied(tmp_path) == left


def steps_copied(folder):
    return {manifest.version.step for _, manifest in Store(folder / "host-0").found()}


@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 1}, {"stage": 0, "ranks": 6, **CUT}, {"stage": 0, "ranks": 6, **OWN}]
)
def test_a_flipped_bit_is_healed(options, tmp_path):
    """Before anybody has computed with it, so that the training is as if it had never been."""
    events = str(tmp_path / "events")
    healed = job(**options, ntp={"on_sdc": "heal", "events": events})
    leaving = [2, 3] if healed.mpu else [3]
    outcomes, rows = run(healed, play=Flips, leaving=leaving)
    assert sorted(outcomes) == [slot for slot in range(healed.ranks) if slot not in leaving]
    found = differences(outcomes, rows, healed)
    assert within(found, healed.dtype), found
    assert used_once(rows, healed)
    (what,) = {event.what for event in events_of(events, Corrupted)}
    assert "is not what the other replicas have after step 6" in what


@dataclasses.dataclass(frozen=True)
class NeedsSumsAlone(Play):
    """Fails if a rank reports all digests."""

    def _play(self, rank):
        from ntp_plugin.recovery.replica_comparison import ReplicaWatch  # noqa: PLC0415

        ReplicaWatch._odd_of_all = None
        return super()._play(rank)


@pytest.mark.parametrize("options", SHORT_OF_JOBS)
def test_sound_state_is_not_reported_corrupt(options, tmp_path):
    """Nominal, degraded and nominal again, compared before every step."""
    events = str(tmp_path / "events")
    watched = job(**options, ntp={"watch_steps": 1, "events": events})
    back = {2: 10, 3: 10} if watched.mpu else {3: 10}
    outcomes, rows = run(watched, faults=[kill(3, during="backward", step=5)], back=back, play=NeedsSumsAlone)
    found = differences(outcomes, rows, watched)
    assert within(found, watched.dtype), found
    assert not events_of(events, Corrupted)
    assert {event.step for event in events_of(events, Compared)} == set(range(1, 21))


@pytest.mark.parametrize("options", [pytest.param({"stage": 1}, marks=pytest.mark.short), {"stage": 0, **CUT}])
def test_replicas_are_compared_after_the_first_step_of_each_epoch(options, tmp_path):
    """In between nothing is compared in so short a job. One rank is lost, and trains again later."""
    events = str(tmp_path / "events")
    watched = Job(**options, ntp=(("watch_steps", 100), ("events", events)))
    outcomes, _ = run(watched, faults=[kill(3, during="backward", step=5)], back={3: 10})
    assert sorted(outcomes) == [0, 1, 2, 3]
    first, ranks = {}, {}
    for event in events_of(events, Committed):
        first[event.epoch] = min(event.step, first.get(event.epoch, event.step))
    for event in events_of(events, Compared):
        ranks[event.step] = ranks.get(event.step, 0) + 1
    assert sorted(first) == [0, 1, 2]
    assert ranks == {first[0]: 4, first[1]: 3, first[2]: 4, 20: 4}


@pytest.mark.parametrize("stage", [0, 1])
def test_in_half_precision_masters_are_compared_beside_the_weights(stage, tmp_path):
    events = str(tmp_path / "events")
    halved = job(stage=stage, dtype="bfloat16", ntp={"watch_steps": 1, "events": events})
    outcomes, _ = run(halved, faults=[kill(3, during="vote", step=5)])
    assert not events_of(events, Corrupted)
    compared = events_of(events, Compared)
    assert {event.step for event in compared} == set(range(1, 21))
    (weights,) = {len(seen.weights) for seen in outcomes.values()}
    assert {event.values for event in compared} == {weights if stage else 4 * weights}  # each with two moments


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.short), {"ranks": 6, **OWN}])
def test_differing_state_stops_the_recovery_from_a_loss(options):
    """All report sums of their digests after a recovery; the differing tensors and their slots are reported as well."""
    mates = [1] if not options else [0, 1]
    with pytest.raises(StateLost, match=r"hold different state of step 7, in 1 tensors; .*weight.* \(main\): slot "):
        run(
            job(stage=0, **options, ntp={"watch_steps": 0}),
            play=Flips,
            faults=[kill(1, during="backward", step=8)],
            leaving=mates,
        )


def test_a_rank_dies_where_all_compare(tmp_path):
    """The others wait for it there, and compare again without it."""
    events = str(tmp_path / "events")
    watched = job(ntp={"events": events})
    outcomes, rows = run(watched, play=DiesComparing)
    assert sorted(outcomes) == [0, 1, 2]
    assert within(differences(outcomes, rows, watched), watched.dtype)
    assert used_once(rows, watched)
    assert [event.odd for event in events_of(events, Compared)] == [0] * len(events_of(events, Compared))


@dataclasses.dataclass(frozen=True)
class DiesComparing(Play):
    """Slot 3, when it has come to the comparison after step 6."""

    def _play(self, rank):
        from ntp_plugin.recovery.replica_comparison import ReplicaWatch  # noqa: PLC0415
        from ntp_plugin.testing import harm  # noqa: PLC0415

        digests = ReplicaWatch._digests

        def dies(watch, step):
            if rank.slot == 3 and step == 6:
                harm.kill()
            return digests(watch, step)

        ReplicaWatch._digests = dies
        return super()._play(rank)
