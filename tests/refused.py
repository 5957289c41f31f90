"""Ranks that are all refused: the test waits for each, so that none still runs when it ends."""

import pytest

from ntp_plugin.errors import Refused


def assert_all_are_refused(ranks, slots, match):
    for slot in range(slots):
        with pytest.raises(Refused, match=match) as refused:
            ranks.wait(but=[other for other in range(slots) if other != slot])
        assert refused.value.exit_code == 2
