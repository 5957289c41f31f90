"""State that the plugin does not know how to handle is refused by its name."""

import pytest

from ntp_plugin.copies.inventory import EXACT, Item, require_known
from ntp_plugin.errors import Refused

KNOWN = (Item(pattern="weight *", becomes=EXACT, why="it is stepped"),)


def test_known_state_passes():
    assert require_known(["weight a", "weight b.c"], KNOWN, strict=True) == []


def test_unknown_state_is_refused_or_reported():
    with pytest.raises(Refused, match="does not know buffer x, and 1 more: lost"):
        require_known(["weight a", "buffer x", "buffer y"], KNOWN, strict=True)
    assert require_known(["weight a", "buffer x", "buffer y"], KNOWN, strict=False) == ["buffer x", "buffer y"]
