"""Which fault comes next: never one that the job could not survive, and the same ones from the same seed."""

import dataclasses
import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.chaos.fault_injector import FaultInjector
from ntp_plugin.chaos.faults import Pending, orders_file
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.recipe import FaultSpec, JobSpec, RandomSpec, Recipe
from ntp_plugin.chaos.schedule import FaultSchedule, survivable
from ntp_plugin.telemetry.job_state import JobState, SlotState


def job(replicas=2, tp=2, step=0, lost=(), stages=1):
    places = itertools.product(range(replicas), range(stages), range(tp))
    names = [f"r{replica}.s{stage}.t{slot}" for replica, stage, slot in places]
    slots = {name: SlotState.LOST if name in lost else SlotState.ALIVE for name in names}
    pids = {name: number for number, name in enumerate(names) if name not in lost}
    return JobState(replicas=replicas, stages=stages, tp=tp, slots=slots, pids=pids, step=step)


def recipe(*faults, **drawn):
    return Recipe(name="r", job=JobSpec(run=("a.py",)), faults=faults, random=RandomSpec(**drawn))


@given(st.integers(2, 4), st.integers(1, 4), st.data())
def test_possible_victims_leave_every_unit_with_a_holder(replicas, tp, data):
    names = sorted(job(replicas, tp).slots)
    lost = data.draw(st.lists(st.sampled_from(names), unique=True))
    for injected in survivable(job(replicas, tp, lost=lost)):
        left = Counter(name.split(".", 1)[1] for name in names if name not in (*lost, injected))
        assert left[injected.split(".", 1)[1]] >= 1


def test_one_replica_keeps_all_of_its_stages():
    """The rest of the other replica would hold all state, and could train nothing."""
    assert len(survivable(job(tp=1, stages=2))) == 4
    assert survivable(job(tp=1, stages=2, lost=("r0.s0.t0",))) == ["r0.s1.t0"]
    assert survivable(job(replicas=3, tp=1, stages=2, lost=("r0.s0.t0", "r1.s1.t0"))) == ["r0.s1.t0", "r1.s0.t0"]


def test_a_returned_slot_takes_a_fault_once_its_process_is_known():
    """It holds its part already, so that another holder of it may be lost."""
    back = job()
    back.slots["r0.s0.t1"] = SlotState.BACK
    del back.pids["r0.s0.t1"]
    assert survivable(back) == ["r0.s0.t0", "r1.s0.t0", "r1.s0.t1"]


def test_a_fault_with_a_slot_and_a_fault_point_is_ordered_before_the_job_starts():
    schedule = FaultSchedule(recipe(FaultSpec(what="kill", slot="r0.s0.t1", during="vote", at_step=8)))
    (fault,) = schedule.at_start()
    assert (fault.slot, fault.during, fault.step) == ("r0.s0.t1", "vote", 8)
    assert schedule.next(job(step=8), seconds=1.0) == []


def test_a_missed_drawn_fault_is_not_injected_beside_the_next(tmp_path):
    drawn = recipe(count=2, seed=1, what=("kill",), during=("save",), every_steps=0, seconds=0.1)
    injector, history = FaultInjector(tmp_path, FaultSchedule(drawn)), History()
    for step in range(40):
        injector.inject(job(step=step), history, running=None)
        if len(injector.ordered) == 2:
            break
    missed, due = injector.ordered
    pending = Pending(orders_file(tmp_path))
    injected = [fault for slot in (missed.slot, due.slot) for fault in pending.take(slot, "save", 99, None)]
    assert injected == [due]


WAITING = (
    FaultSpec(what="sigkill", at_s=9.0),
    FaultSpec(what="kill", during="vote", at_step=80, may_miss=True),
    FaultSpec(what="sigkill", at_s=2.0),
    FaultSpec(what="kill", slot="r0.s0.t1", during="vote", at_step=80),
)


def test_pending_faults_are_reported_with_their_reason(tmp_path):
    injector = FaultInjector(tmp_path, FaultSchedule(recipe(*WAITING)))
    over = job(step=5, lost=("r0.s0.t0", "r0.s0.t1"))
    over.heard_at = 3.0
    injector.inject(over, History(), running=None)
    asked = injector.asked(over)
    assert [fault.name for fault in asked.faults] == ["4"], "a fault with a slot and a fault point is ordered at once"
    assert [(left.fault.name, left.fault.slot, left.fault.may_miss, left.why) for left in asked.unordered] == [
        ("1", "any", False, "it was for 9 s after training began, and the job was over after 3.0 s, in step 5"),
        ("2", "any", True, "it was for step 80, and the job was over after 3.0 s, in step 5"),
        (
            "3",
            "any",
            False,
            "in the end no slot could be spared: the job could not have survived the loss of any other",
        ),
    ]


def test_a_job_that_never_began_explains_missing_faults():
    (left,) = FaultSchedule(recipe(FaultSpec(what="sigkill"))).asked(JobState(), seconds=0.0, ordered=[]).unordered
    assert left.why == "training did not begin"


def test_the_number_of_drawn_faults_is_reported():
    found, schedule = drawn(1, steps=14)
    asked = schedule.asked(job(step=14), seconds=14.0, ordered=found)
    assert (asked.drawn, asked.to_be_drawn) == (tuple(fault.name for fault in found), 6)
    assert 0 < len(asked.drawn) < 6


def test_a_fault_that_may_miss_is_not_withdrawn(tmp_path):
    """It is injected at the first fault point of its name, however late; only drawn ones are given up for the next."""
    late = FaultSpec(what="kill", during="save", may_miss=True)
    injector = FaultInjector(tmp_path, FaultSchedule(recipe(late)))
    for step in range(40):
        injector.inject(job(step=step), History(), running=None)
    (fault,) = injector.ordered
    assert Pending(orders_file(tmp_path)).take(fault.slot, "save", 99, None) == [fault]


def test_the_store_is_no_slot():
    schedule = FaultSchedule(recipe(FaultSpec(what="store", at_step=8)))
    assert schedule.at_start() == []
    (fault,) = schedule.next(job(step=7), seconds=1.0)
    assert (fault.what, fault.slot) == ("store", "store")


def test_a_fault_on_any_slot_waits_for_training_and_is_ordered_in_time():
    schedule = FaultSchedule(recipe(FaultSpec(what="kill", during="vote", at_step=8)))
    assert schedule.at_start() == []
    assert schedule.next(JobState(), seconds=0.0) == []
    assert schedule.next(job(step=5), seconds=1.0) == []
    (fault,) = schedule.next(job(step=6), seconds=1.0)
    assert (fault.step, fault.slot in job().slots) == (8, True)


def test_a_fault_from_outside_comes_at_its_time():
    schedule = FaultSchedule(recipe(FaultSpec(what="sigkill", at_s=2.0)))
    assert schedule.next(job(step=5), seconds=1.9) == []
    assert len(schedule.next(job(step=5), seconds=2.0)) == 1


def test_a_fault_on_any_slot_waits_while_every_loss_would_end_the_job():
    schedule = FaultSchedule(recipe(*(FaultSpec(what="sigkill", at_s=2.0) for _ in range(3))))
    assert schedule.next(job(lost=("r0.s0.t0", "r0.s0.t1")), seconds=3.0) == []
    first, second = schedule.next(job(), seconds=3.0)
    assert first.slot.split(".", 1)[1] != second.slot.split(".", 1)[1], "the third would take the last holder"
    injected = (first.slot, second.slot)
    assert schedule.next(job(), seconds=3.1, pending=injected) == [], "its injection is not reported yet"
    assert len(schedule.next(job(), seconds=9.0)) == 1


def test_a_single_replica_takes_faults_while_it_has_a_slot():
    assert survivable(job(replicas=1, tp=3)) == ["r0.s0.t0", "r0.s0.t1", "r0.s0.t2"]
    assert survivable(job(replicas=1, tp=3, lost=("r0.s0.t0", "r0.s0.t2"))) == []


def drawn(seed, *, count=6, lost=(), pending=(), steps=400, tp=2, replicas=2, **more):
    schedule = FaultSchedule(recipe(count=count, seed=seed, every_steps=3, whole_within_steps=10, **more))
    found = []
    for step in range(1, steps):
        found += schedule.next(job(replicas, tp, step=step, lost=lost), seconds=float(step), pending=pending)
    return found, schedule


def test_the_same_seed_draws_the_same_faults_and_another_one_others():
    assert drawn(1)[0] == drawn(1)[0]
    assert drawn(1)[0] != drawn(2)[0]


def test_so_many_are_drawn_and_not_more_and_each_in_a_step_to_come():
    found, _ = drawn(3)
    assert len(found) == 6
    assert [fault.step for fault in found] == sorted({fault.step for fault in found})


def test_the_next_fault_waits_for_the_last_recovery_and_return():
    assert drawn(1, pending=("r0.s0.t1",))[0] == []
    whole, degraded = drawn(1, steps=14)[0], drawn(1, steps=14, lost=("r0.s0.t1",))[0]
    assert len(whole) > len(degraded) == 1, "after a loss it waits for ten steps first"


def test_a_fault_in_a_recovery_comes_with_a_loss_that_both_can_be_survived():
    found, _ = drawn(4, during=("resume",), what=("kill",))
    assert len(found) == 12
    for before, fault in zip(found[::2], found[1::2], strict=True):
        assert (before.what, fault.during, fault.epoch) == ("kill", "resume", 1)
        assert before.slot.split(".", 1)[1] != fault.slot.split(".", 1)[1], "two holders of the same are not lost"


def test_every_kind_comes_at_every_fault_point_before_one_comes_again():
    found, _ = drawn(5, count=24, what=("kill", "hang", "exit"), during=("forward", "vote", "apply", "save"))
    pairs = [(fault.what, fault.during) for fault in found]
    assert len({*pairs[:12]}) == len({*pairs[12:]}) == 12
    assert pairs[:12] != pairs[12:]


def test_a_fault_that_missed_its_fault_point_is_retried():
    schedule = FaultSchedule(recipe(count=4, seed=1, what=("kill",), during=("vote", "save"), every_steps=0))
    found, missed = [], set()
    for step in range(40):
        found += schedule.next(job(step=step), seconds=1.0, missed=missed)
        missed |= {fault.name for fault in found[:3] if fault.during == "save"}
    assert len(found) == 4 + len(missed)
    injected = Counter(fault.during for fault in found if fault.name not in missed)
    assert injected == {"vote": 2, "save": 2}
    asked = schedule.asked(job(step=40), seconds=1.0, ordered=found)
    assert len(asked.drawn) == 4, "one that missed is not counted, and another one has its turn"


def test_no_fault_waits_for_a_recovery_when_one_loss_is_the_limit():
    found, _ = drawn(4, count=3, tp=1, replicas=2, what=("kill",), during=("resume", "vote"))
    assert [fault.during for fault in found] == ["vote"] * 3
    assert drawn(4, tp=1, what=("kill",), during=("resume",))[0] == []


def test_seconds_are_passed_to_the_fault():
    spec = FaultSpec(what="slow", slot="r0.s0.t1", during="forward", at_step=8, seconds=0.1)
    assert dataclasses.asdict(FaultSchedule(recipe(spec)).at_start()[0])["seconds"] == 0.1
