"""Which optimizers are element-wise, and what each keeps for a parameter.

A tensor can be cut anew, or sharded, only if the step of an element depends on nothing but that element: its weight,
its gradient and what the optimizer keeps for it. That cannot be seen from outside, so this is a table of the classes
known to be so, and of the names of what they keep. What is *cut* has the parameter's shape and moves with its elements;
what is *kept* is one number, the same for every part. Everything else is refused by its name: an optimizer that looks
at whole matrices (Shampoo, SOAP, Adafactor) would train another model at every width. Muon and LAMB do so too, and are
here for jobs whose matrices are never cut: Megatron's (`megatron/muon.py`), and DeepSpeed's without ZeRO or AutoTP.

Each optimizer keeps its step number in its own place. Torch's Adam has it with each parameter. NVIDIA's has it once for
all parameters of a group, among the group's options, and apex's does not count if the group has none on this rank.
DeepSpeed's has it with each parameter, and counts in that of the group's last one for all. The number moves with the
elements in any case, because the rank that receives them has to continue their steps (`Numbers`).

A class is known by the module that defines it, and is not imported here. Two projects are called apex; NVIDIA's
optimizers are recognized by the kernel that they carry. A subclass is another optimizer, since it may step as it likes.
"""

import dataclasses
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ntp_plugin.copies.inventory import EXACT, NONE, Item
from ntp_plugin.errors import Refused


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ElementWise:
    """An element-wise optimizer: the names of what it keeps, and an attribute that all of its kind have."""

    cut: tuple[str, ...]
    kept: tuple[str, ...] = ()
    of_group: tuple[str, ...] = ()
    """What it keeps once for all parameters of a group."""
    of_last: tuple[str, ...] = ()
    """What it keeps with each parameter but counts only for the last one, whose number is that of all."""
    carries: str = "param_groups"
    steps_matrices: bool = False
    """Whether it is none after all: a step depends on a whole matrix, and only its state moves with the elements."""


_ADAM = ElementWise(cut=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), kept=("step",))
_SGD = ElementWise(cut=("momentum_buffer",))
_FUSED_ADAM = ElementWise(
    cut=("exp_avg", "exp_avg_sq", "master_param"), of_group=("step",), carries="multi_tensor_adam"
)
_DEEPSPEEDS_ADAM = ElementWise(
    cut=("exp_avg", "exp_avg_sq"), kept=("step",), of_last=("step",), carries="multi_tensor_adam"
)
_DEEPSPEEDS_CPU_ADAM = ElementWise(cut=("exp_avg", "exp_avg_sq"), kept=("step",), carries="ds_opt_adam")
"""It rounds an element by its place: it computes blocks of several at once, and the rest otherwise."""
_FUSED_SGD = ElementWise(cut=("momentum_buffer",), carries="multi_tensor_sgd")

_DEEPSPEEDS_LION = ElementWise(cut=("exp_avg",), kept=("step",), of_last=("step",), carries="multi_tensor_lion")
_DEEPSPEEDS_LAMB = ElementWise(
    cut=("exp_avg", "exp_avg_sq"), kept=("step",), carries="fused_lamb_cuda", steps_matrices=True
)
_DEEPSPEEDS_MUON = ElementWise(
    cut=("momentum_buffer", "exp_avg", "exp_avg_sq"), kept=("step",), carries="aux_optimizer", steps_matrices=True
)
_MUON = ElementWise(cut=("momentum_buffer",), carries="scaled_orthogonalize_fn", steps_matrices=True)

KNOWN: Mapping[tuple[str, str], ElementWise] = {
    ("torch.optim.adam", "Adam"): _ADAM,
    ("torch.optim.adamw", "AdamW"): _ADAM,
    ("torch.optim.sgd", "SGD"): _SGD,
    ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam"): _FUSED_ADAM,
    ("transformer_engine.pytorch.optimizers.fused_sgd", "FusedSGD"): _FUSED_SGD,
    ("apex.optimizers.fused_adam", "FusedAdam"): _FUSED_ADAM,
    ("apex.optimizers.fused_sgd", "FusedSGD"): _FUSED_SGD,
    ("deepspeed.ops.adam.fused_adam", "FusedAdam"): _DEEPSPEEDS_ADAM,
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"): _DEEPSPEEDS_CPU_ADAM,
    ("deepspeed.ops.lion.fused_lion", "FusedLion"): _DEEPSPEEDS_LION,
    ("deepspeed.ops.lamb.fused_lamb", "FusedLamb"): _DEEPSPEEDS_LAMB,
    ("deepspeed.runtime.zero.muon.muon_optimizer", "MuonWithAuxAdam"): _DEEPSPEEDS_MUON,
    ("torch.optim.adagrad", "Adagrad"): ElementWise(cut=("sum",), kept=("step",)),
    ("torch.optim.rmsprop", "RMSprop"): ElementWise(cut=("square_avg", "momentum_buffer", "grad_avg"), kept=("step",)),
    ("megatron.core.optimizer.emerging_optimizers", "TensorParallelMuon"): _MUON,
}
"""The known optimizers, by the module that defines the class, and its name."""

INVENTORY = (
    *(
        Item(pattern=f"what the optimizer keeps as {key}", becomes=EXACT, why="copied with what is stepped")
        for key in sorted({key for known in KNOWN.values() for key in (*known.cut, *known.kept, *known.of_group)})
    ),
    Item(pattern="error feedback", becomes=NONE, why="none is kept; an optimizer that keeps some is refused"),
)
"""What becomes of what optimizers keep, when state comes from copies."""

_alike: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that may round an element by its place."""

_FIX = "use SGD, Adam or AdamW, of torch, of NVIDIA's TransformerEngine or apex, or DeepSpeed's FusedAdam or FusedLion"


class CombinedOptimizer:
    """Several optimizers of one model as one; each steps its own parameters.

    An optimizer of whole matrices may be among them. Whoever combines them makes sure that no matrix is cut anew.
    """

    def __init__(self, optimizers: Sequence[Any], state: MutableMapping[Any, Any]) -> None:
        self.optimizers, self.state = tuple(optimizers), state
        self.param_groups = [group for one in optimizers for group in one.param_groups]


def accept_rounding_by_place(optimizer: Any) -> None:
    """Accept that an optimizer rounds an element by its place in memory (`fused` on a CPU), from now on.

    For jobs in which an element is stepped at one place at a time: by the one rank that holds its shard, or by replicas
    that all hold the same. Elsewhere replicas would drift apart.
    """
    _alike.add(optimizer)


def element_wise(optimizer: object) -> ElementWise:
    """What is known of an optimizer; raises `Refused` unless it is element-wise, by its class and its options."""
    if isinstance(optimizer, CombinedOptimizer):
        return _any_of([_known(one) for one in optimizer.optimizers])
    known = _known(optimizer)
    if known.steps_matrices:
        raise Refused(
            f"the optimizer {type(optimizer).__qualname__} steps whole matrices, and a part of one would be stepped"
            " otherwise",
            fix=_FIX,
        )
    return known


def kept_by(optimizer: object) -> ElementWise:
    """What is known of an optimizer whose tensors are never cut: it may step whole matrices.

    Raises:
        Refused: It is not in the table, or its options are others.
    """
    return element_wise(optimizer) if isinstance(optimizer, CombinedOptimizer) else _known(optimizer)


def _known(optimizer: object) -> ElementWise:
    """What the table has of an optimizer; raises `Refused` if there is nothing, or if its options are others."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    known = KNOWN.get((kind.__module__, kind.__qualname__))
    if known is None:
        raise Refused(f"the optimizer {name} is not known to be element-wise", fix=_FIX)
    if not hasattr(optimizer, known.carries):
        raise Refused(f"the optimizer {name} has no {known.carries}: it is another one of that name", fix=_FIX)
    groups = getattr(optimizer, "param_groups")  # noqa: B009  (any object may be asked)
    if optimizer not in _alike and any(group.get("fused") for group in groups):
        raise Refused(
            "the optimizer has fused = True, which rounds an element by its place in memory, so layouts differ",
            fix="leave fused out",
        )
    for option in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"):
        dtype = getattr(optimizer, option, None)
        if dtype not in (None, torch.float32):
            raise Refused(
                f"the optimizer {name} has {option} = {dtype}: it keeps a scale for all elements of a tensor, beside"
                " its state",
                fix=f"{option} = torch.float32",
            )
    if getattr(optimizer, "master_weights", False) and hasattr(optimizer, "param_groups_master"):
        raise Refused(
            f"the optimizer {name} has master_weights = True: it keeps them beside its state",
            fix="master_weights = False, and the framework's own float32 masters",
        )
    return known


def _any_of(several: Sequence[ElementWise]) -> ElementWise:
    """What any of several optimizers keeps."""

    def any_of(field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for known in several for name in getattr(known, field)))

    return ElementWise(cut=any_of("cut"), kept=any_of("kept"), of_group=any_of("of_group"), of_last=any_of("of_last"))


class Numbers:
    """All that an optimizer keeps and that is not cut, by parameter."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._known = optimizer, kept_by(optimizer)
        several = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else ()
        self._required = {
            parameter: _known(one).of_group
            for one in several
            for group in one.param_groups
            for parameter in group["params"]
        }
        of_groups = optimizer.param_groups if self._known.of_group or self._known.of_last else []
        self._group_of = {parameter: group for group in of_groups for parameter in group["params"]}

    def of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The numbers of a parameter, in one order on all ranks."""
        state = self._optimizer.state.get(parameter, {})
        group: Mapping[str, Any] = self._group_of.get(parameter, {"params": ()})
        cut = {key for key in self._known.cut if isinstance(state.get(key), torch.Tensor)}
        found = {key: value for key, value in state.items() if key not in cut}
        counting = group["params"] or (parameter,)  # ZeRO-3 shows a group its parameters only within a step
        states = [self._optimizer.state.get(one, {}) for one in (counting if self._known.of_last else ())]
        found |= {key: max(one[key] for one in states if key in one) for key in self._known.of_last if key in found}
        return dict(sorted((found | {key: group[key] for key in self._known.of_group if key in group}).items()))

    def put(self, parameter: torch.Tensor, numbers: Mapping[str, Any]) -> None:
        """Have the optimizer keep these numbers for a parameter, where it keeps such numbers."""
        of_group = {key: value for key, value in numbers.items() if key in self._known.of_group}
        if of_group:
            self._group_of[parameter].update(of_group)
        if len(numbers) > len(of_group):
            self._optimizer.state[parameter].update({key: numbers[key] for key in numbers if key not in of_group})

    def required(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The numbers without which an optimizer would count the steps of a parameter from zero again."""
        return self._required.get(parameter, self._known.of_group)

    def forget(self) -> None:
        """Remove the numbers that groups keep."""
        for group in self._optimizer.param_groups:
            for key in self._known.of_group:
                group.pop(key, None)


def kept(optimizer: torch.optim.Optimizer) -> list[str]:
    """What an optimizer keeps so far, as `INVENTORY` names it."""
    keys = {str(key) for state in optimizer.state.values() for key in state}
    keys |= {key for key in _known(optimizer).of_group for group in optimizer.param_groups if key in group}
    return [f"what the optimizer keeps as {key}" for key in sorted(keys)]


def refuse_unknown_state(known: ElementWise, name: str, parameter: torch.Tensor, state: Mapping[str, object]) -> None:
    """Raise `Refused` if an optimizer keeps something for a parameter that is not in the table, or not in its shape."""
    for key, value in state.items():
        numbers = value.numel() if isinstance(value, torch.Tensor) else 1
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if key in known.cut and (value is None or shape == tuple(parameter.shape)):
            continue
        if key in known.kept and numbers == 1:
            continue
        raise Refused(
            f"the optimizer keeps {key} of shape {shape} for {name} of shape {tuple(parameter.shape)}, "
            "and it is not known how to cut it",
            fix=_FIX,
        )
