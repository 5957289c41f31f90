"""Negative controls of context parallelism and of gated delta nets: each makes one mistake, which the comparison has to
notice."""

from typing import Any

import torch
from megatron.core import utils
from megatron.training import get_args

from ntp_plugin.megatron.layers.dropout import ExactDropout
from ntp_plugin.megatron.layers.uneven_delta_net import UnevenDeltaNet
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from tests.harness.parity.conditions import plant

__all__ = [
    "chunks_are_in_order",
    "delta_net_in_one_section",
    "replicas_of_a_context_weigh_as_before",
    "rows_are_in_order",
]


def chunks_are_in_order() -> None:
    """The rest of a context group has consecutive parts of a sequence, where attention expects one from each end."""
    parts_of: Any = utils._get_batch_on_this_cp_rank_per_sequence_balancing

    def parts(batch: dict[str, torch.Tensor], cp_group: Any) -> Any:
        if cp_group.size() in (1, get_args().context_parallel_size):
            return parts_of(batch, cp_group)
        return {key: value.chunk(cp_group.size(), 1)[cp_group.rank()].contiguous() for key, value in batch.items()}

    plant(utils, "_get_batch_on_this_cp_rank_per_sequence_balancing", parts)


def replicas_of_a_context_weigh_as_before() -> None:
    """Gradients are weighed as if all replicas of a context group shared its sequences."""
    scale: Any = LaneSync.scale

    def as_before(sync: LaneSync) -> float:
        layout = sync._layout
        return float(scale.fget(sync) * layout.context_degree / layout.topology.cp)

    plant(LaneSync, "scale", property(as_before))


def rows_are_in_order() -> None:
    """The rows of a replica are taken for consecutive ones."""
    plant(ExactDropout, "_in_the_sequence", lambda _, rows: rows)


def delta_net_in_one_section() -> None:
    """The rows of a slot's queries, keys, values, gates and decays are taken for one after the other of each unit."""
    cut = UnevenDeltaNet._cut
    plant(UnevenDeltaNet, "_cut", lambda net, layer, family, sections: cut(net, layer, family, [sum(sections)]))
