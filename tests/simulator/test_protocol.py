"""The live protocol under a virtual clock: no schedule breaks it, and each planted bug is found."""

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.membership import failure_detector, protocol
from ntp_plugin.simulator.protocol.job import VirtualJob
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.rules import LIVE, PLANTED, rules_of
from ntp_plugin.simulator.protocol.schedule import draw
from ntp_plugin.simulator.protocol.search import replay, search

CI_SEEDS = 2_000
"""A slice; `make show-simulator` searches 20,000 and more."""


def test_no_schedule_breaks_the_protocol():
    searched = search(range(CI_SEEDS))
    assert searched.found is None, str(searched.found)
    assert searched.faults > CI_SEEDS / 2, "hardly anything befell anybody"
    assert searched.epochs > 2 * CI_SEEDS


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_is_found_and_reproduced_by_its_seed(planted):
    found = search(range(CI_SEEDS), planted).found
    assert found is not None
    assert found.replay == f"ntp simulate --replay {found.seed} --planted {planted}"
    with pytest.raises(Violation) as law:
        replay(found.seed, planted)
    assert str(law.value) == found.law


def test_the_search_runs_the_live_code():
    assert (LIVE.advance, LIVE.finish, LIVE.decide) == (protocol.advance, protocol.finish, protocol.decide)
    assert (LIVE.find_lost, LIVE.judge) == (failure_detector.find_lost, failure_detector.judge)


def test_a_seed_determines_a_run():
    assert [replay(seed) for seed in range(60)] == [replay(seed) for seed in range(60)]


def test_every_kind_of_fault_occurs_in_the_searched_seeds():
    kinds = set()

    class Noting(VirtualJob):
        def _befall(self, fault):
            before = self._happened
            super()._befall(fault)
            kinds.update({fault.kind} if self._happened > before else ())

    for seed in range(300):
        Noting(draw(seed), LIVE).run()
    assert kinds == {"kill", "freeze", "hang", "host dies", "link cut", "doubt", "break"}


def test_an_unknown_planted_bug_is_one_line():
    with pytest.raises(ConfigError, match="'decide-soon' is no planted bug"):
        rules_of("decide-soon")
