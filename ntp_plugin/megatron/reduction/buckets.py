"""Megatron's gradient buckets, reduced in lanes.

DDP signals a bucket group when its gradients are complete, and waits for it when the step ends. With
`--overlap-param-gather` it also waits for a group's parameters, before the first module that needs them and where
training pauses. A degraded job replaces the bucket groups' methods for these, and keeps Megatron's others.

Parameters are on their way after the optimizer's step, all groups' in one order (`lane_optimizer.py`). Megatron starts
each when the forward reaches it; but a replica without micro-batches runs no forward, and the others would wait for it.

With overlap there are several buckets, and a lane is summed once for each. So they must hold the same parameters in
every replica, whatever its width: they are cut by the sizes of whole parameters. Gradient buffers also stay whole with
the distributed optimizer, whose shards are those of the lanes (`lane_optimizer.py`).
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, group_params_for_buffers
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from ntp_plugin.planning.topology import Topology


class Gathered(Protocol):
    """Parameters that may be on their way from all members of a lane."""

    def finish_spread(self) -> None:
        """Wait until the parameters are in place."""


class Reduction(Protocol):
    """Sums in flight."""

    def finish(self) -> None:
        """Wait until the sums are in place."""


type Sums = Callable[[Mapping[str, torch.Tensor]], Reduction]
"""Starts to sum gradients."""


class LaneBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """A bucket group whose gradients go into lanes, made from Megatron's own by `take_over`.

    Groups begin in one order on all ranks, since they share lanes. Gradients become complete in another order where a
    slot computes its experts one by one than where it computes them together.
    """

    begin: Sums
    scale: Callable[[], float]
    names: Mapping[Any, str]
    gathered: Sequence[Gathered]
    grad_reduce_handle: Reduction | None
    grad_reduce_finished: bool
    before: "LaneBucketGroup | None"
    """The group that begins before this one."""
    after: "LaneBucketGroup | None"
    is_waiting: bool
    """Whether this group is complete, and one before it is not."""

    @classmethod
    def take_over(
        cls,
        group: Any,
        begin: Sums,
        names: Mapping[Any, str],
        scale: Callable[[], float],
        gathered: Sequence[Gathered],
        *,
        before: Any,
    ) -> None:
        """Convert a bucket group of Megatron's; `begin` starts to sum its gradients, and `scale` is their weight in
        the step under way. It begins after the group `before`, if that is not None."""
        group.__class__ = cls
        group.before, group.after, group.is_waiting = before, None, False
        if before is not None:
            before.after = group
        group.begin, group.scale, group.gathered = begin, scale, gathered
        group.names = {parameter: names[parameter] for bucket in group.buckets for parameter in bucket.params_list}

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        """Start to sum, or wait for the groups before. A second call in the same step does nothing; Megatron makes one
        with the first batch."""
        if self.grad_reduce_handle is not None:
            return
        self.is_waiting = self.before is not None and not self.before._has_begun
        if self.is_waiting:
            return
        self._begin()
        if self.after is not None and self.after.is_waiting:
            self.after.start_grad_sync()

    @property
    def _has_begun(self) -> bool:
        return self.grad_reduce_handle is not None or self.grad_reduce_finished

    def _begin(self) -> None:
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )
        with torch.no_grad():
            scale = self.scale()
            for bucket in self.buckets:
                if scale != 1.0:
                    bucket.grad_data *= scale
            self.grad_reduce_handle = self.begin({name: parameter.main_grad for parameter, name in self.names.items()})

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        """Wait until the sums are in place."""
        if self.grad_reduce_finished:
            return
        self.start_grad_sync()
        assert self.grad_reduce_handle is not None, "the groups before have begun: they are finished in order"
        with torch.no_grad():
            self.grad_reduce_handle.finish()
        self.grad_reduce_handle, self.grad_reduce_finished = None, True

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Do nothing, since the optimizer's step has started it; with `force_sync`, wait for the parameters."""
        if force_sync:
            self.finish_param_sync()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:  # noqa: ARG002
        """Wait until the parameters are in place."""
        with torch.no_grad():
            for part in self.gathered:
                part.finish_spread()


def bucket_groups(ddp: Any) -> tuple[list[Any], list[Any]]:
    """Return the bucket groups of a wrapped model, and those of its experts, which are apart in Megatron."""
    return ddp.bucket_groups, ddp.expert_parallel_bucket_groups


def with_whole_buffers(ddp_config: Any) -> Any:
    """Return the configuration of DDP without a distributed optimizer; it still waits for parameters."""
    whole = copy.copy(ddp_config)
    whole.use_distributed_optimizer, whole.num_distributed_optimizer_instances = False, 1
    return whole


def even_buckets(args: Any, ddp_config: Any, sizes: Mapping[Any, int], topology: Topology) -> Any:
    """Return DDP's layout of parameters, with a new bucket whenever whole parameters reach a bucket's size x TP.

    The bucket size must not come from DDP's configuration: there it depends on this rank's groups and shards.
    """
    if args.ddp_num_buckets is not None:
        enough = sum(sizes.values()) // args.ddp_num_buckets
    else:
        enough = (args.ddp_bucket_size or max(40_000_000, 1_000_000 * topology.dp)) * topology.tp
    parameters = [parameter for parameter in sizes if parameter.requires_grad]
    kinds = group_params_for_buffers(parameters, ddp_config.grad_reduce_in_fp32)
    return FullParamLayout(
        {kind: _cut(members[::-1], indices, sizes, enough) for kind, (members, indices) in kinds.items()}
    )


def _cut(parameters: list[Any], indices: list[int], sizes: Mapping[Any, int], enough: int) -> Any:
    """Lay out one buffer, in the order in which gradients become complete."""
    places, bounds, start, collected = {}, [0], 0, 0
    for parameter in parameters:
        places[parameter] = (start, start + parameter.numel(), len(bounds) - 1)
        start, collected = start + parameter.numel(), collected + sizes[parameter]
        if collected >= enough:
            bounds.append(start)
            collected = 0
    if bounds[-1] < start:
        bounds.append(start)
    buckets = list(itertools.pairwise(bounds))
    return PerBufferParamLayout(
        param_index_map=places,
        bucket_indices=buckets,
        per_bucket_numel_unpadded=[stop - start for start, stop in buckets],
        param_indices=indices,
    )
