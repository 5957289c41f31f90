"""Ranks in operations that do not match: no rank is blamed, and the hang is reported."""

import time

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.errors import PeerLost
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless
from tests.patience import HUNG_S


def play_against_each_other(rank):
    """Each waits for the other to send, until a test ends one of them."""
    elastic = ElasticRank(rank.place)
    elastic.drive(Stateless())
    elastic.start()
    dist.barrier()
    with pytest.raises((RuntimeError, PeerLost)):  # the connection may break before the loss is published
        dist.broadcast(torch.zeros(1), src=1 - rank.slot)
    elastic.leave()


def play_together(rank):
    elastic = ElasticRank(rank.place)
    driver = elastic.drive(Stateless())
    elastic.start()
    longest, began = 0.0, time.monotonic()
    while (since := time.monotonic()) < began + 3 * HUNG_S:
        driver.run_with_recovery(dist.barrier)
        longest = max(longest, time.monotonic() - since)
    driver.finish()
    elastic.leave()
    return longest


def test_ranks_that_all_wait_for_each_other_are_hung():
    with Ranks(2, play_against_each_other, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        while not ranks.hung:
            time.sleep(0.01)
        ranks.kill(0)
        assert ranks.wait().keys() == {1}
        assert ranks.hung == [2]


def test_ranks_that_all_wait_and_then_continue_are_not_hung():
    with Ranks(2, play_together, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        longest = max(ranks.wait().values())
        assert not ranks.hung or longest > HUNG_S, "no rank waited for so long"
