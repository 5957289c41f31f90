"""Joining ranks: groups made after they joined, and joiners that cannot connect and must not stop the others."""

import functools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.errors import Excluded
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.faults import hang, kill
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless
from tests.patience import HUNG_S


def make_groups_when_all_are_there(rank):
    elastic = ElasticRank(rank.place)
    if not rank.joining:  # a joining rank's counters never see this one
        dist.destroy_process_group(dist.new_group([0, 1, 2]))
    driver = elastic.drive(Stateless())
    elastic.start()

    def make():
        dist.barrier()
        if elastic.groups.epoch == 0:
            rank.reached("first", 1)
        if len(elastic.groups.members) < 3 or elastic.groups.epoch == 0:
            return None
        made = [dist.new_group([0, 1, 2]), dist.new_group([0, 2])]
        sums = []
        for group in made:
            value = torch.tensor([10.0**rank.slot])
            if not isinstance(group, int):
                dist.all_reduce(value, group=group)
            sums.append(value.item())
        return sums

    while (sums := driver.run_with_recovery(make)) is None:
        pass
    driver.finish()
    elastic.leave()
    return sums


def test_groups_that_are_made_after_a_return_connect():
    with Ranks(3, make_groups_when_all_are_there, faults=[kill(1, during="first", step=1)]) as ranks:
        ranks.wait_for_death(1)
        ranks.start_again(1)
        outcomes = ranks.wait()
    assert outcomes == {0: [111.0, 101.0], 1: [111.0, 10.0], 2: [111.0, 101.0]}


def make_another_group_than_a_joiner(rank):
    elastic = ElasticRank(rank.place)
    if not rank.joining:
        dist.new_group([0, 1])
    driver = elastic.drive(Stateless())
    elastic.start()

    def reduce():
        value = torch.ones(1)
        dist.all_reduce(value)
        rank.reached("first", 1)
        return elastic.groups.epoch

    while driver.run_with_recovery(reduce) < 3:  # epoch 1 loses slot 1, it joins in epoch 2, and is excluded in epoch 3
        pass
    driver.finish()
    elastic.leave()
    return elastic.groups.members


def test_a_joiner_with_other_groups_is_excluded_and_the_others_continue():
    faults = [kill(1, during="first", step=1)]
    with Ranks(3, make_another_group_than_a_joiner, faults=faults) as ranks:
        ranks.wait_for_death(1)
        ranks.start_again(1)
        outcomes = ranks.wait(but=[1])
        with pytest.raises(Excluded, match="slot 1"):
            ranks.wait(but=[0, 2])
    assert outcomes == {0: (0, 2), 2: (0, 2)}


def never_meet_as_a_joiner(rank):
    elastic = ElasticRank(rank.place)
    if rank.joining:
        elastic.groups._meeting.set = lambda *_: time.sleep(3600)
    driver = elastic.drive(Stateless())
    elastic.start()

    def reduce():
        dist.all_reduce(torch.ones(1))
        rank.reached("first", 1)
        return elastic.groups.epoch

    while driver.run_with_recovery(reduce) < 3:
        pass
    driver.finish()
    elastic.leave()
    return elastic.groups.members


def test_a_joiner_that_never_connects_is_excluded_and_the_others_continue():
    with Ranks(3, never_meet_as_a_joiner, faults=[kill(1, during="first", step=1)]) as ranks:
        ranks.wait_for_death(1)
        ranks.start_again(1)
        outcomes = ranks.wait(but=[1])
        with pytest.raises(Excluded, match="slot 1"):
            ranks.wait(but=[0, 2])
    assert outcomes == {0: (0, 2), 2: (0, 2)}


def hang_while_a_joiner_prepares(rank, *, beats):
    elastic = ElasticRank(rank.place)
    prepares, over = (Path(rank.folder) / name for name in ("prepares", "over"))
    if rank.joining:
        if beats:
            elastic.beat()
        prepares.touch()
        while not over.exists():
            time.sleep(0.01)
        elastic.leave()
        return "prepared"
    driver = elastic.drive(Stateless())
    elastic.start()

    def stand():
        dist.barrier()
        if elastic.groups.epoch == 0:
            rank.reached("first", 1)
        if prepares.exists():
            rank.reached("prepares", 2)
        return len(elastic.groups.members)

    while driver.run_with_recovery(stand) > 1:
        pass
    over.touch()
    driver.finish()
    elastic.leave()
    return "went on"


@pytest.mark.parametrize("beats", [True, False])
def test_a_joiner_in_preparation_is_neither_hung_nor_progress(beats):
    """This holds while it imports, before its first heartbeat, and while it builds its model: no rank waits for it."""
    play = functools.partial(hang_while_a_joiner_prepares, beats=beats)
    faults = [kill(2, during="first", step=1), hang(1, during="prepares", step=2)]
    with Ranks(3, play, faults=faults, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        ranks.wait_for_death(2)
        ranks.start_again(2)
        outcomes = ranks.wait()
    assert outcomes == {0: "went on", 2: "prepared"}
    assert ranks.verdicts[1].kind == "hung"
    assert ranks.verdicts[2].kind == "ended"
