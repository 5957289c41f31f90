"""Ranks in operations that do not match: nobody is to blame, and it is told of."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.errors import PeerLost
from ntp_plugin.recovery.detector import Thresholds
from ntp_plugin.recovery.rank import ElasticRank
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless


def play_against_each_other(rank):
    """Each waits for the other to send."""
    elastic = ElasticRank(rank.place, timeout=timedelta(seconds=4))
    elastic.drive(Stateless())
    elastic.start()
    dist.barrier()
    with pytest.raises((RuntimeError, PeerLost)):
        dist.broadcast(torch.zeros(1), src=1 - rank.slot)
    elastic.leave()


def play_together(rank):
    elastic = ElasticRank(rank.place)
    driver = elastic.drive(Stateless())
    elastic.start()
    for _ in range(200):
        driver.carry_through(dist.barrier)
    driver.finish()
    elastic.leave()


@pytest.mark.parametrize(("play", "stuck"), [(play_against_each_other, [2]), (play_together, [])])
def test_all_wait(play, stuck):
    with Ranks(2, play, thresholds=Thresholds(hung_s=1.0)) as ranks:
        ranks.wait(60)
        assert ranks.stuck == stuck
