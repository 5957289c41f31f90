"""Negative controls of layers of experts: each makes one mistake, which the comparison has to notice."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from ntp_plugin.megatron import batch_share, muon, padding
from ntp_plugin.megatron.layers import uneven_experts
from ntp_plugin.megatron.layers.expert_dispatch import ExpertPlaces
from ntp_plugin.megatron.live.expert_bias import ExpertBias
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from tests.harness.parity.conditions import plant


def experts_swapped() -> None:
    """The router's tokens go to the wrong one of two experts of a slot that has some of a lost slot."""
    places_of = uneven_experts.UnevenExperts.places

    def places(experts: Any, each: int) -> ExpertPlaces:
        found = places_of(experts, each)
        return dataclasses.replace(found, of_ranks=tuple(tuple(reversed(mine)) for mine in found.of_ranks))

    def rows(of: ExpertPlaces) -> list[tuple[int, int]]:
        """As the parameters have them."""
        return in_order(dataclasses.replace(of, of_ranks=tuple(tuple(reversed(mine)) for mine in of.of_ranks)))

    in_order = uneven_experts._rows
    plant(uneven_experts.UnevenExperts, "places", places)
    plant(uneven_experts, "_rows", rows)


def padding_adds_to_the_loss() -> None:
    """The router's loss for micro-batches that weigh nothing counts."""
    plant(padding, "without_padding", lambda original: original)


def padding_weighs_as_others() -> None:
    """A replica's last micro-batch counts as often as it is run."""
    plant(padding, "_weightless", lambda loss_of: loss_of)


def router_losses_are_means_of_replicas() -> None:
    """The loss that balances experts weighs alike in all replicas, however many micro-batches each has."""
    padded, scale_by = padding.padded, MoEAuxLossAutoScaler.set_loss_scale
    more = [1.0]

    @contextlib.contextmanager
    def weighed(kwargs: dict[str, Any], own: int, runs: int) -> Iterator[None]:
        more[0] = runs / own
        with padded(kwargs, own, runs):
            yield
        more[0] = 1.0

    plant(batch_share, "padded", weighed)
    plant(MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(lambda scale: scale_by(scale * more[0])))


def experts_weigh_by_groups() -> None:
    """The gradients of experts are divided by the number of replicas in a group, as if these were averaged."""
    finalize = LaneSync.finalize

    def finalize_and_divide(sync: LaneSync, *args: Any, **kwargs: Any) -> None:
        finalize(sync, *args, **kwargs)
        with torch.no_grad():
            for name, parameter in sync.parameters.items():
                if ".experts." in name:
                    parameter.main_grad /= 2

    plant(LaneSync, "finalize", finalize_and_divide)


def experts_are_one_matrix() -> None:
    """Muon takes the experts that a slot has one after the other for one matrix."""
    plant(muon, "_rows_of_experts", lambda _: {})


def bias_stays_after_a_recovery() -> None:
    """Ranks keep the bias that they have, also those that have just begun."""
    plant(ExpertBias, "set_values", lambda *_: None)
