"""Linear layers that are cut over the slots of a TP group, and their description for planning.

    column = ColumnParallel(8, 32, group, family="hidden")     # each slot computes some of the 32 features
    row = RowParallel(32, 1, group, family="hidden")           # and adds what these give to the sum

The layers of one family are cut by the same units, one feature each. Modules between them must work feature by feature;
every other module is replicated. A layer draws all weights and keeps its part, so that a seed gives the same model at
every degree. The number of features of a slot may change between two steps; the layers use only the shapes of their
parameters and the group.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.units import Family, ModelUnits, Run, StageUnits, Tensor

_CUT = "ntp_cut"
"""The attribute of a parameter that describes how it is cut."""
_ONE = (Run(start=0, unit_size=1),)


class TensorParallelGroup:
    """The ranks of a replica, over which its layers are cut. `build` gets it as its argument; a script makes none."""

    def __init__(self, slot: int, degree: int) -> None:
        """Make the group of a rank.

        Args:
        slot: This rank's place in the replica, from 0.
        degree: How many places a replica has while nobody is lost.
        """
        self.slot, self.degree = slot, degree
        self.handle: dist.ProcessGroup | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the sum of `values` over the ranks of the replica."""
        if self.handle is None:
            return values
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=self.handle)
        return values


class _EveryoneTakes(torch.autograd.Function):
    """Forward: the identity. Backward: the sum over the slots of the gradients of the common input."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum(gradients[0]), None


class _EveryoneAdds(torch.autograd.Function):
    """Forward: the sum over the slots of their outputs. Backward: the identity."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        return group.sum(values)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class ColumnParallel(torch.nn.Module):
    """A linear layer whose output features are divided among the ranks of a replica.

    Args:
        inputs: Input features, which every rank has.
        outputs: Output features of the whole layer.
        group: The argument of `build`.
        family: A name. Layers that work on the same features must have the same name; they are cut alike.
    """

    def __init__(self, inputs: int, outputs: int, group: TensorParallelGroup, *, family: str) -> None:
        super().__init__()
        whole = torch.nn.Linear(inputs, outputs)
        start, stop = _part(outputs, group)
        self.group = group
        self.weight = _cut(whole.weight[start:stop], Tensor(name="", shape=(outputs, inputs), family=family, runs=_ONE))
        self.bias = _cut(whole.bias[start:stop], Tensor(name="", shape=(outputs,), family=family, runs=_ONE))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.linear(_EveryoneTakes.apply(values, self.group), self.weight, self.bias)


class RowParallel(torch.nn.Module):
    """A linear layer whose input features are divided among the ranks of a replica. Every rank gets the whole result.

    Args:
        inputs: Input features of the whole layer.
        outputs: Output features, which every rank gets.
        group: The argument of `build`.
        family: As in `ColumnParallel`.
    """

    def __init__(self, inputs: int, outputs: int, group: TensorParallelGroup, *, family: str) -> None:
        super().__init__()
        whole = torch.nn.Linear(inputs, outputs)
        start, stop = _part(inputs, group)
        described = Tensor(name="", shape=(outputs, inputs), family=family, dim=1, runs=_ONE)
        self.group = group
        self.weight = _cut(whole.weight[:, start:stop], described)
        self.bias = torch.nn.Parameter(whole.bias.detach())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _EveryoneAdds.apply(functional.linear(values, self.weight), self.group)
        return total + self.bias


class TensorParallelMLP(torch.nn.Module):
    """The smallest model with all kinds of layers: replicated, column-parallel, gelu, row-parallel."""

    def __init__(self, inputs: int, width: int, hidden: int, outputs: int, group: TensorParallelGroup) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(inputs, width)
        self.column = ColumnParallel(width, hidden, group, family="hidden")
        self.row = RowParallel(hidden, outputs, group, family="hidden")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.row(functional.gelu(self.column(self.enter(values))))
        return out


def _part(features: int, group: TensorParallelGroup) -> tuple[int, int]:
    if features < group.degree:
        raise Refused(f"{features} features cannot be cut over {group.degree} slots", fix=f"use {group.degree} or more")
    ((start, stop),) = sp.even_cut(((0, features),), group.degree)[group.slot]
    return start, stop


def _cut(part: torch.Tensor, described: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(part.detach().clone())
    setattr(parameter, _CUT, described)
    return parameter


# ---------------------------------------------------------------- the description for planning


def describe(parameters: Mapping[str, torch.nn.Parameter]) -> ModelUnits:
    """Return the units of a model: its cut parameters by family, all others as replicated.

    Raises:
        Refused: A family has layers with different numbers of features, or no layer is cut.
    """
    tensors, families = [], dict[str, int]()
    for name, parameter in parameters.items():
        cut: Tensor | None = getattr(parameter, _CUT, None)
        if cut is None and not parameter.dim():
            raise Refused(f"{name} is a single number without a dimension", fix="give it the shape (1,)")
        if cut is None:
            tensors.append(Tensor(name=name, shape=tuple(parameter.shape)))
            continue
        units = cut.shape[cut.dim]
        if families.setdefault(cut.family, units) != units:
            raise Refused(
                f"{name} has {units} features, and others of its family {cut.family!r} have {families[cut.family]}",
                fix="give layers that are cut separately different families",
            )
        tensors.append(Tensor(name=name, shape=cut.shape, family=cut.family, dim=cut.dim, runs=cut.runs))
    if not families:
        raise Refused("no layer of the model is cut", fix="use ColumnParallel and RowParallel, or elastic_job")
    return ModelUnits(
        stages=(
            StageUnits(
                families=tuple(Family(name=family, units=units) for family, units in families.items()),
                tensors=tuple((tensor, 1) for tensor in tensors),
                flops=tuple(
                    2 * sum(tensor.elements_per_unit for tensor in tensors if tensor.family == family)
                    for family in families
                ),
            ),
        )
    )
