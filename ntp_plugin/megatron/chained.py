"""Megatron's optimizers of one model as one optimizer of torch.

Megatron makes an optimizer for the experts beside that for all other parameters, since they are summed over other
ranks. Both are of one kind, and what moves or copies their state asks for it by parameter.
"""

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from ntp_plugin.errors import Refused


def of_torch(optimizer: Any) -> Any:
    """Return the optimizer of torch inside of one of Megatron, or one that stands for several."""
    chained = [one.optimizer for one in parts_of(optimizer) if one.optimizer is not None]
    if len(chained) == 1:
        return chained[0]
    kinds = {type(one).__qualname__ for one in chained}
    if len(kinds) != 1:
        raise Refused(
            f"Megatron made optimizers of several kinds for this model: {', '.join(sorted(kinds))}; their state cannot"
            " be kept through a loss",
            fix="leave out what some parameters have an optimizer of their own for, or start by torchrun",
        )
    return _as_one(chained)


def parts_of(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers: usually one, and two with experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _as_one(optimizers: Sequence[Any]) -> Any:
    """Return an optimizer of their kind with all of their groups and states, which are theirs: nothing is copied."""
    kind: Any = type(optimizers[0])
    whole = kind.__new__(kind)
    vars(whole).update(vars(optimizers[0]))
    vars(whole).update(
        state=_States(optimizers),
        param_groups=list(itertools.chain.from_iterable(one.param_groups for one in optimizers)),
    )
    return whole


class _States(MutableMapping[Any, Any]):
    """What several optimizers keep, by parameter."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._owners = {
            parameter: one for one in optimizers for group in one.param_groups for parameter in group["params"]
        }

    def __getitem__(self, parameter: Any) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(one.state for one in self._optimizers)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    def __contains__(self, parameter: Any) -> bool:
        return parameter in self._owners and parameter in self._owners[parameter].state
