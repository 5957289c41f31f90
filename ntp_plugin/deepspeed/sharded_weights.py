"""ZeRO-3: the parameters themselves are sharded. How the plugin reads, shards anew, and replaces them for a forward.

DeepSpeed keeps a flat slice of each parameter on each rank (`ds_tensor`) and gathers the parameter when a module needs
it. So a forward and a backward are collectives, and every rank takes part in every micro-batch.

After a loss DeepSpeed's own constructor runs again for the members. It takes the slices as it finds them, so they are
cut for the new members first (`shard_anew`), and everything is removed that belongs to the interrupted step: gathered
parameters, gathers in flight, the trace of modules from which it prefetches, and the hooks of the modules.

A forward whose result counts for nothing runs alone, without the weights (`without_weights`): nobody gathers, each
parameter is a zero of its full shape, which needs no memory, and DeepSpeed's own record of gathered parameters is
untouched.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups

_OF_MODULES = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_inflight_param_registry",
)
"""What DeepSpeed has left in modules for its hooks, which call the object that made them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlices:
    """Slices of parameters, one after the other in one flat tensor, as ZeRO-3 steps a group of them."""

    values: torch.Tensor
    parameters: tuple[Any, ...]

    def overlaps(self) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """Yield the parameters with elements here: the first and last element of theirs, and where these begin here.
        The last ranks' slices end with padding, which belongs to no parameter."""
        at = 0
        for parameter in self.parameters:
            size = parameter.ds_tensor.ds_numel
            start = size * dist.get_rank(group=parameter.ds_process_group)
            stop = min(start + size, parameter.ds_numel)
            if start < stop:
                yield parameter, start, stop, at
            at += size


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_tensor")


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the full shape of a parameter, sharded or not."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def groups_stepped(zero: Any) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that the optimizer steps, by its groups; DeepSpeed has cut these into smaller ones."""
    found: list[list[torch.nn.Parameter]] = [[] for _ in zero.optimizer.param_groups]
    for number, group in enumerate(zero.fp16_groups):
        found[zero.sub_group_to_group_id[number]] += group
    return found


def slices_stepped(zero: Any) -> list[ParameterSlices]:
    """Return this rank's slices that the optimizer steps, then those of parameters that nobody steps."""
    stepped = [
        ParameterSlices(values=values, parameters=tuple(group))
        for values, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
    ]
    known = {id(parameter) for group in zero.fp16_groups for parameter in group}
    frozen = [parameter for parameter in zero.module.parameters() if id(parameter) not in known]
    return stepped + [slice_of(one) for one in frozen]


def slice_of(parameter: Any) -> ParameterSlices:
    """Return this rank's slice of a parameter, as DeepSpeed gathers it."""
    return ParameterSlices(values=parameter.ds_tensor, parameters=(parameter,))


def spread(zero: Any) -> None:
    """Compute the weights of this rank's slices from what is stepped; DeepSpeed gathers them when they are needed. What
    it has put into second slices until now, when it was built again, are no weights."""
    for parameter in zero.module.parameters():
        parameter.ds_secondary_tensor = None
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)


# ---------------------------------------------------------------- for other members


def dismantle(zero: Any) -> None:
    """Remove ZeRO-3 from the model, whatever it was doing; it may be built in part. Then cut the parameters for the
    members that there are now; what the slices held is discarded."""
    held = vars(zero)
    for hook in (*held.get("_grad_acc_hooks", ()), *held.get("_leaf_module_hooks", ())):
        hook.remove()
    if "parameter_offload" in held:
        zero.parameter_offload.destroy()
        zero._unpin_offload_buffers()
    parameter_offload.FWD_MODULE_STACK.clear()
    _number_modules_from(zero.module.ds_id)
    for module in zero.module.modules():
        module._parameters = getattr(module, "_original_parameters", module._parameters)
        for name in _OF_MODULES:
            vars(module).pop(name, None)
    for parameter in zero.module.parameters():
        _have_second_slices_if_complete(parameter)
        shard_anew(parameter)


def _have_second_slices_if_complete(parameter: Any) -> None:
    """With `zero_hpz_partition_size` each node keeps a whole second copy of the weights between a forward and its
    backward, in slices that DeepSpeed cuts for nodes of equal size. So there are none while a rank is lost."""
    init = inspect.getclosurevars(parameter.partition).nonlocals["self"]
    members = dist.get_world_size(group=parameter.ds_process_group)
    node = groups._get_zero_param_intra_parallel_group()
    init.zero_param_process_group = node if members == init.dp_world_size else None


type ExternalParameters = dict[torch.nn.Module, dict[Any, Any]]
"""Module -> parameters of other modules that are gathered with its own."""


def external_parameters(module: torch.nn.Module) -> ExternalParameters:
    """Return the external parameters that the script has registered, when there was no forward yet."""
    return {one: dict(vars(one)["_external_params"]) for one in module.modules() if "_external_params" in vars(one)}


def forget_found_parameters(registered: ExternalParameters) -> None:
    """Have only those parameters be external that the script has registered. DeepSpeed registers others where a forward
    uses them; a joining rank has had no forward, and would gather others than the ranks that have."""
    for module, parameters in registered.items():
        vars(module)["_external_params"] = dict(parameters)


def _number_modules_from(first: int) -> None:
    """Have DeepSpeed give the modules the same numbers as before. It counts on in each build, and a joining rank has
    built once; the ranks compare these numbers."""
    (count,) = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = first


@torch.no_grad()
def shard_anew(parameter: Any) -> None:
    """Have DeepSpeed cut a parameter for the members of its group, as if it had just been made; it is zero then."""
    parameter.ds_active_sub_modules.clear()
    parameter.is_external_param = False
    parameter.ds_tensor = parameter.ds_secondary_tensor = None
    parameter.ds_zero_partition_rank = dist.get_rank(group=parameter.ds_process_group)
    parameter.ds_zero_partition_world_size = dist.get_world_size(group=parameter.ds_process_group)
    parameter.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)
    parameter.ds_status = ZeroParamStatus.AVAILABLE
    parameter.partition()
    parameter.ds_tensor.zero_()  # with its padding


# ---------------------------------------------------------------- a forward that counts for nothing


class _GathersNothing:
    """In place of the object that gathers and releases parameters around each module."""

    hierarchy = 0

    def is_record_trace(self) -> bool:
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing is gathered, recorded or released."""

    reset_step = trace_prologue = record_module = fetch_sub_module = release_sub_module = _nothing


@contextlib.contextmanager
def without_weights(zero: Any) -> Iterator[None]:
    """Run forwards without other ranks and without weights: each parameter is a zero of its full shape."""
    offload, parameters = zero.parameter_offload, list(zero.module.parameters())
    coordinator, before = offload.param_coordinator, [(one.data, one.ds_status) for one in parameters]
    stack = list(parameter_offload.FWD_MODULE_STACK)
    offload.param_coordinator = _GathersNothing()
    for parameter in parameters:
        zero_of_its_shape = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)
        parameter.data, parameter.ds_status = zero_of_its_shape, ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        _put_back(parameters, before)
        offload.param_coordinator = coordinator
        parameter_offload.FWD_MODULE_STACK[:] = stack


def _put_back(parameters: Iterable[Any], before: Iterable[tuple[torch.Tensor, Any]]) -> None:
    for parameter, (data, status) in zip(parameters, before, strict=True):
        parameter.data, parameter.ds_status = data, status
