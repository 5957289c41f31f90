"""Negative controls of moved layers: each plants one fault that the comparison must detect (as `spoilt.py`)."""

import torch

from ntp_plugin.megatron.reduction import lane_sync
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from tests.harness.parity.conditions import plant


def moved_layers_draw_their_own() -> None:
    """A replica whose layers have moved keeps the weights that its own stages have drawn."""
    plant(LaneSync, "_draw_nominally", lambda *_: None)


def neighbours_exchanged() -> None:
    """A stage that has got a layer takes it for the one beside it, so that lanes sum other layers."""
    places_of = lane_sync._places_of_layers

    def exchanged(model: torch.nn.Module) -> dict[str, str]:
        places = places_of(model)
        if len(places) < 2:
            return places
        one, other, *_ = places
        return places | {one: places[other], other: places[one]}

    plant(lane_sync, "_places_of_layers", exchanged)
