"""Slots that must run a section together: without one of them the others are excluded, or run it alone."""

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.errors import Excluded
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.trainer import LeavesOut
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless


class InPairs(Stateless):
    """Slots 0 and 1, 2 and 3."""

    def plan(self, agreed):
        there = set(agreed.view.slots)
        single = [slot for slot in there if slot ^ 1 not in there]
        if single:
            came = all(agreed.reports[slot].joiner for slot in single)
            raise LeavesOut(single, why="half a pair", awaits=came)
        return super().plan(agreed)


class Coming(InPairs):
    """A joining rank."""

    def report(self):
        return super().report().__class__(applied=0, oldest=0, joiner=True)


def go_on_in_pairs(rank):
    """Train until both of the second pair have rejoined."""
    elastic = ElasticRank(rank.place)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank.joining:
        elastic.wait_for_admission([rank.slot ^ 1])
    driver = elastic.drive(Coming() if rank.joining else InPairs())
    elastic.start()
    seen = []

    def step():
        members = elastic.groups.members
        value = torch.tensor([10.0**rank.slot])
        dist.all_reduce(value, group=pairs[rank.slot // 2])
        asks = torch.tensor([float(not dist.get_rank() and elastic.admission_control.is_requested())])
        dist.all_reduce(asks)
        rank.reached("first", 1)
        if asks.item():
            elastic.admission_control.open(mine=dist.get_rank() == 0)
        if not seen or seen[-1] != (members, value.item()):
            seen.append((members, value.item()))
        return len(members) == 4 and elastic.groups.epoch > 0

    while not driver.run_with_recovery(step):
        pass
    driver.finish()
    elastic.leave()
    return seen


def test_a_rank_that_lost_its_partner_is_excluded_and_both_rejoin():
    faults = [kill(3, during="first", step=1)]
    with Ranks(4, go_on_in_pairs, faults=faults) as ranks:
        ranks.wait_for_death(3)
        ranks.wait_for_death(2)
        assert ranks.verdicts[2].kind == "left behind"
        ranks.start_again(3)
        ranks.start_again(2)
        outcomes = ranks.wait()
    whole = (0, 1, 2, 3)
    assert [seen for seen in outcomes[0] if seen[0] != whole] == [((0, 1), 11.0)]
    assert outcomes[0][-1] == (whole, 11.0)
    assert outcomes[2] == outcomes[3] == [(whole, 1100.0)]


def collectives(group):
    """The results of each collective."""
    mine = torch.arange(4.0) + 1
    summed, received = mine.clone(), mine.clone()
    gathered, parts = torch.zeros(8), [torch.zeros(4), torch.zeros(4)]
    scattered = torch.zeros(2)
    dist.all_reduce(summed, group=group)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.all_gather(parts, mine, group=group)
    dist.reduce_scatter_tensor(scattered, mine.clone(), group=group)
    dist.broadcast(received, group=group, group_src=0)
    dist.all_reduce(received, group=group, async_op=True).wait()
    dist.barrier(group=group)
    return [value.tolist() for value in (summed, gathered, torch.cat(parts), scattered, received)]


def go_alone(rank):
    """Slots 0 and 1 run alone, one of them while the other is elsewhere."""
    elastic = ElasticRank(rank.place)
    group = dist.new_group([0, 1])
    driver = elastic.drive(Stateless())
    elastic.start()

    def step():
        found = [collectives(group)] if rank.slot < 2 else []
        if not rank.slot:
            with elastic.groups.alone([0, 1]):
                found.append(collectives(group))
                found.append([dist.get_rank(group), dist.get_world_size(group), dist.get_world_size()])
        if rank.slot < 2:
            found.append(collectives(group))
        one = torch.ones(1)
        dist.all_reduce(one)
        rank.reached("first", 1)
        return [*found, one.item()]

    outcomes = [driver.run_with_recovery(step)]
    while elastic.groups.epoch == 0:
        outcomes = [driver.run_with_recovery(step)]
    driver.finish()
    elastic.leave()
    return outcomes[0]


def test_a_subset_runs_alone_without_waiting_and_rejoins_after_it():
    """This holds in edited groups as well."""
    with Ranks(3, go_alone, faults=[kill(2, during="first", step=1)]) as ranks:
        ranks.wait_for_death(2)
        outcomes = ranks.wait(but=[2])
    mine = [1.0, 2.0, 3.0, 4.0]
    together = [[2 * value for value in mine], mine * 2, mine * 2, [2.0, 4.0], [2 * value for value in mine]]
    scattered = [6.0, 8.0]
    by_oneself = [mine, mine * 2, mine * 2, [1.0, 2.0], mine]
    assert outcomes[0] == [together, by_oneself, [0, 2, 2], together, 2.0]
    assert outcomes[1][0][3] == scattered, "the second part"
    assert outcomes[1][0][:3] == together[:3] and outcomes[1][-1] == 2.0


def end_in_half_a_pair(rank):
    elastic = ElasticRank(rank.place)
    driver = elastic.drive(InPairs())
    elastic.start()

    def step():
        dist.all_reduce(torch.ones(1))
        rank.reached("first", 1)
        return elastic.groups.epoch

    while not driver.run_with_recovery(step):
        pass
    driver.finish()
    elastic.leave()
    return elastic.groups.members


def test_an_excluded_rank_gets_an_error():
    with Ranks(4, end_in_half_a_pair, faults=[kill(0, during="first", step=1)]) as ranks:
        ranks.wait_for_death(0)
        outcomes = ranks.wait(but=[0, 1])
        with pytest.raises(Excluded, match="slot 1"):
            ranks.wait(but=[0, 2, 3])
    assert outcomes == {2: (2, 3), 3: (2, 3)}
