"""Agreement on a real TCPStore: members in threads that die in every phase, join, and are wrongly suspected."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.errors import Excluded, PlansDiffer, StateLost
from ntp_plugin.membership.agreement import Agreement
from ntp_plugin.membership.gathering import FAN
from ntp_plugin.membership.protocol import MemberId, Report, View, view_key, without
from ntp_plugin.membership.store import TorchStore
from ntp_plugin.membership.wait_progress import CollectiveWait

RUNS = itertools.count()
PATIENCE_S = 20.0


class Dead(BaseException):
    """Ends a thread that plays a killed process."""


@pytest.fixture(scope="module")
def connections():
    """A server and a connection for each slot, opened once: a connect may stall for seconds on a name look-up."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60)) for _ in range(6)]
    return server, clients


class Stage:
    """Members of one run: the dead ones (as a detector sees them), and a fresh prefix of the store."""

    def __init__(self, connections, slots, fan=FAN):
        self.connections, self.run, self.fan = connections, next(RUNS), fan
        self.dead: set[int] = set()
        self.expected: tuple[int, ...] | None = None
        """Members continue until these have joined; None: until they have agreed once."""
        self.first = View(
            epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=f"first{slot}") for slot in range(slots))
        )

    def play(
        self, slot, *, dies="", doubts=frozenset(), joins=False, digest="the plan", applied=5, timeout_s=PATIENCE_S
    ):
        """One process: agree until nothing is newer; dies in the callback that `dies` names."""
        store = TorchStore(self.connections[1][slot], corner=f"run{self.run}", token="a token")

        def report(view):
            self.die(slot, dies == "report")
            return Report(applied=applied, oldest=applied, joiner=joins)

        def plan(agreed):
            self.die(slot, dies == "plan")
            return digest

        def lost():
            return frozenset(self.dead - {slot}) | doubts

        if joins:
            agreement = Agreement.joining(
                store, self.first, MemberId(slot=slot, incarnation=f"next{slot}"), fan=self.fan
            )
        else:
            agreement = Agreement.founding(store, self.first, self.first.member_ids[slot], fan=self.fan)
            self.die(slot, dies == "before")
        while True:
            agreed = agreement.run(lost=lost, report=report, plan=plan, waiting=CollectiveWait, timeout_s=timeout_s)
            self.die(slot, dies == "after")
            if self.expected is None or agreed.view.slots == self.expected:
                return agreed
            # A job would train here, until a newer view calls it back or it notices a loss itself.
            while not agreement.newer_view_exists() and not lost() & set(agreed.view.slots):
                time.sleep(0.001)

    def die(self, slot, now):
        if now:
            self.dead.add(slot)
            raise Dead

    def all_play(self, roles):
        """Every role at once; returns slot -> what came of it, an `Agreed` or an exception."""
        with ThreadPoolExecutor(len(roles)) as pool:
            started = {slot: pool.submit(self.play, slot, **role) for slot, role in roles.items()}
            return {slot: run.exception() or run.result() for slot, run in started.items()}


@given(
    st.dictionaries(st.integers(0, 4), st.sampled_from(["before", "report", "plan", "after"]), min_size=1, max_size=4),
    st.sampled_from((2, FAN)),
)
@settings(max_examples=100)
def test_survivors_agree_whichever_members_die_in_whichever_phases(connections, deaths, fan):
    stage = Stage(connections, 6, fan)
    stage.dead.add(5)  # the loss that starts it all
    survivors = tuple(slot for slot in range(5) if slot not in deaths)
    stage.expected = survivors
    results = stage.all_play({slot: {"dies": deaths.get(slot, "")} for slot in range(5)})
    assert all(isinstance(results[slot], Dead) for slot in deaths)
    assert {results[slot].view.slots for slot in survivors} == {survivors}
    assert len({results[slot].view for slot in survivors}) == 1
    assert len({results[slot].decision for slot in survivors}) == 1


def test_a_joiner_takes_a_dead_slot_and_resumes_from_the_common_step(connections):
    stage = Stage(connections, 3)
    stage.dead.add(1)
    shrunk = stage.all_play({0: {}, 2: {}})
    assert shrunk[0].view.slots == (0, 2)
    stage.dead.clear()
    stage.expected = (0, 1, 2)  # the joining rank may come after the others have looked
    grown = stage.all_play({0: {}, 1: {"joins": True, "applied": 0}, 2: {}})
    assert {agreed.view.slots for agreed in grown.values()} == {(0, 1, 2)}
    assert grown[1].decision.step == 5
    assert grown[1].view.joiners == (1,)


def test_a_member_that_was_wrongly_suspected_is_fenced(connections):
    stage = Stage(connections, 3)
    results = stage.all_play({0: {"doubts": frozenset({2})}, 1: {}, 2: {}})
    assert isinstance(results[2], Excluded)
    assert "slot 2 (first2) is not in epoch 1" in str(results[2])
    assert results[0].view == results[1].view


def test_two_joiners_at_once_are_both_in(connections):
    stage = Stage(connections, 4)
    stage.dead |= {2, 3}
    stage.all_play({0: {}, 1: {}})
    stage.dead.clear()
    stage.expected = (0, 1, 2, 3)
    grown = stage.all_play({0: {}, 1: {}, 2: {"joins": True, "applied": 0}, 3: {"joins": True, "applied": 0}})
    assert {agreed.view.slots for agreed in grown.values()} == {stage.expected}
    assert {agreed.decision.step for agreed in grown.values()} == {5}


def test_different_plans_stop_everybody(connections):
    stage = Stage(connections, 3)
    stage.dead.add(2)
    results = stage.all_play({0: {}, 1: {"digest": "another plan"}})
    assert all(isinstance(result, PlansDiffer) for result in results.values())
    assert "different plans: slot 1 another plan; all others the plan" in str(results[0])


def test_joining_ranks_alone_report_that_no_state_is_left(connections):
    stage = Stage(connections, 1)
    results = stage.all_play({0: {"joins": True, "applied": 0}})
    assert isinstance(results[0], StateLost)


@pytest.mark.parametrize("fan", [2, FAN])
def test_unsuspected_members_are_evicted_at_the_time_limit(connections, caplog, fan):
    """They neither report nor die, and no detector finds them: the others continue without them."""
    stage = Stage(connections, 6, fan)
    stage.dead.add(5)
    stage.expected = (0, 2, 3)
    limits = {slot: {"timeout_s": 0.3 if slot == 2 else PATIENCE_S} for slot in stage.expected}
    results = stage.all_play(limits)
    assert {result.view.slots for result in results.values()} == {stage.expected}
    assert "slots 1, 4 evicted: no report within 0.3 s" in caplog.text


@pytest.fixture
def two_members(connections):
    stage = Stage(connections, 2)
    stores = [TorchStore(connections[1][slot], corner=f"run{stage.run}", token="a token") for slot in range(3)]
    return (
        stage,
        stores,
        [Agreement.founding(stores[slot], stage.first, stage.first.member_ids[slot]) for slot in range(2)],
    )


def test_the_job_is_over_for_all_at_once(two_members):
    stage, stores, members = two_members
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(members[0].all_are_done)
        while not stores[2].present(["done/0/0"]):
            time.sleep(0.001)
        assert not waiting.done()
        assert pool.submit(members[1].all_are_done).result()
        assert waiting.result()
    with pytest.raises(Excluded, match=r"slot 1 \(1/1\) comes too late: the job was over with epoch 1"):
        Agreement.joining(stores[2], stage.first, MemberId(slot=1, incarnation="1/1"))


def test_a_loss_and_the_end_of_the_job_are_never_both(two_members):
    """The first view is the next one: no member leaves while another needs its report."""
    stage, stores, members = two_members
    stores[2].create(view_key(1), without(stage.first, [1]).encode())
    stores[2].create("done/0/1", "done")
    assert not members[0].all_are_done()


def test_a_job_whose_members_were_all_lost_is_not_over(two_members):
    """A joining rank there has to say that no state is left, and not that all is well."""
    stage, stores, _ = two_members
    view = without(stage.first, [0, 1])
    stores[2].create(view_key(1), view.encode())
    assert not view.member_ids
    assert Agreement.joining(stores[2], stage.first, MemberId(slot=1, incarnation="1/1")).member.view.slots == (1,)
