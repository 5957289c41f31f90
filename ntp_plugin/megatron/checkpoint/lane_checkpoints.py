"""The distributed optimizer's checkpoint entries, from lane shards: equal to Megatron's, so that either loads the
other's.

Megatron has several formats for a sharded optimizer. In `fully_reshardable` each value has the shape and the name of
its parameter, and depends on no layout; it is the only one that a degraded layout can write or read. To write it, the
shards of a lane are gathered, kind by kind, into the shape of the parameters; from there on it works like any other
optimizer (`checkpoints.py`). To read it, each member cuts out its shard.

This takes memory for one more copy of the optimizer state of this slot's parameters while a checkpoint is written or
read, as it does in Megatron.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from ntp_plugin.errors import Refused
from ntp_plugin.reduction.sharded_optimizer import LaneShard, LaneShards
from ntp_plugin.training.optimizers import Numbers, element_wise

FORMAT = "fully_reshardable"
_TYPE = "distrib_optim_sharding_type"
_MAIN = "param"
"""Megatron's name for what is stepped."""


def in_parameter_shapes(original: Any) -> Any:
    """`_build_sharded_state_dict_metadata`: record the format of the checkpoint."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = original(*args, **kwargs)
        if _TYPE in metadata:
            metadata[_TYPE] = FORMAT
        return metadata

    return build


class LaneCheckpoints:
    """Replaces the saving and loading of Megatron's optimizer on lane shards."""

    def __init__(self, parameters: Mapping[str, Any], lanes: Sequence[LaneShards], optimizer: Any) -> None:
        """`parameters` are those that the optimizer steps, as shards of these lanes."""
        self._parameters, self._lanes, self._optimizer = parameters, lanes, optimizer
        self._inner = optimizer.optimizer
        self._known = element_wise(self._inner)

    def into(self) -> None:
        """Install the replacements."""
        self._optimizer.sharded_state_dict = self.save
        self._optimizer.load_state_dict = self.load

    # ------------------------------------------------ Megatron's functions

    def save(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """`sharded_state_dict`; when loading, the entries say what is to be read."""
        found = (metadata or {}).get(_TYPE)
        if found != FORMAT:
            raise Refused(
                f"the checkpoint has its optimizer in Megatron's format {found}, which holds buckets of the layout that"
                " wrote it, and this job's layout is another one",
                fix="save with --dist-ckpt-optim-fully-reshardable, or load with --no-load-optim",
            )
        if is_loading:
            self._optimizer.init_state_fn(self._inner, self._optimizer.config)
        entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_parameter = {id(entry.data): entry for entry in nested_values(entries)}
        values = {kind: self._in_shapes(kind, empty=is_loading) for kind in self._all_kinds()}
        state = {
            number: {kind: _as(by_parameter[id(parameter)], kind, values[kind][name]) for kind in values}
            for number, (name, parameter) in enumerate(self._parameters.items())
        }
        scaler = getattr(self._optimizer, "grad_scaler", None)
        loss_scale = {"grad_scaler": scaler.state_dict()} if scaler is not None else {}
        return {"optimizer": self._options(), **loss_scale, "param_state": state, "param_state_sharding_type": FORMAT}

    def load(self, state_dict: dict[str, Any]) -> None:
        """`load_state_dict`, of what was read."""
        steps = self._set_options(state_dict["optimizer"]["param_groups"])
        if "grad_scaler" in state_dict and getattr(self._optimizer, "grad_scaler", None) is not None:
            self._optimizer.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        names = list(self._parameters)
        for kind in self._all_kinds():
            tensors = {names[int(number)]: entry[kind] for number, entry in state_dict["param_state"].items()}
            with torch.no_grad():
                for lanes in self._lanes:
                    for shard, values in lanes.cut(tensors):
                        self._values(kind, shard).copy_(values)
        if "step" in self._known.kept:  # Megatron's own preparation of torch's Adam leaves it out
            for parameter, step in steps.items():
                self._inner.state[parameter]["step"] = torch.tensor(float(step), dtype=torch.float32)

    # ------------------------------------------------ values

    def _all_kinds(self) -> list[str]:
        kept = [kind for kind in self._known.cut if any(kind in state for state in self._inner.state.values())]
        return [_MAIN, *kept]

    def _values(self, kind: str, shard: LaneShard) -> torch.Tensor:
        values: torch.Tensor = shard.parameter.data if kind == _MAIN else self._inner.state[shard.parameter][kind]
        return values

    def _in_shapes(self, kind: str, *, empty: bool) -> dict[str, torch.Tensor]:
        dtype = next((self._values(kind, shard).dtype for lanes in self._lanes for shard in lanes), torch.float32)
        tensors = {
            name: torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            for name, parameter in self._parameters.items()
        }
        for lanes in self._lanes if not empty else ():
            lanes.gather(functools.partial(self._values, kind), tensors)
        return tensors

    # ------------------------------------------------ options

    def _options(self) -> dict[str, Any]:
        """Return the options as the distributed optimizer does: without parameters, with the step that all of them
        share."""
        numbers = Numbers(self._inner)
        kept = [numbers.of(parameter) for group in self._inner.param_groups for parameter in group["params"]]
        steps = {float(one["step"]) for one in kept if "step" in one}
        assert len(steps) <= 1, "all parameters have been stepped together"
        as_number: Callable[[float], float] = int if "step" in self._known.of_group else float  # as in Megatron
        step = {"step": as_number(steps.pop())} if steps else {}
        options = [
            {key: value for key, value in group.items() if key != "params"} for group in self._inner.param_groups
        ]
        return {"param_groups": [one | step for one in options]}

    def _set_options(self, saved: list[dict[str, Any]]) -> dict[torch.Tensor, float]:
        """Set the options of each group; return the step of each parameter, if it is kept per parameter."""
        by_kind = {_identity(group): group for group in saved}
        steps: dict[torch.Tensor, float] = {}
        for group in self._inner.param_groups:
            options = dict(by_kind[_identity(group)])
            step = options.pop("step", None)
            options.pop("params", None)
            group.update(options)
            if step is not None and "step" in self._known.of_group:
                group["step"] = int(step)
            elif step is not None:
                steps |= dict.fromkeys(group["params"], step)
        return steps


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes groups of parameters, as in Megatron."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def _as(entry: Any, kind: str, values: torch.Tensor) -> Any:
    """Return a parameter's entry for another value of its shape."""
    fields: dict[str, Any] = {"key": f"optimizer.state.{kind}.{entry.key}", "data": values}
    if not isinstance(entry, ShardedTensorFactory):
        fields["dtype"] = values.dtype
    return dataclasses.replace(entry, **fields)
