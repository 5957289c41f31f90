"""Megatron's optimizers of one model as one optimizer of torch.

Megatron makes an optimizer for the experts beside that for all other parameters, since they are summed over other
ranks; with Muon also one for all that is no matrix. What moves or copies their state asks for it by parameter.
"""

import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from ntp_plugin.training.optimizers import CombinedOptimizer


def of_torch(optimizer: Any) -> Any:
    """Return the optimizer of torch inside of one of Megatron, or one that stands for several."""
    chained = [one.optimizer for one in parts_of(optimizer) if one.optimizer is not None]
    if len(chained) == 1:
        return chained[0]
    return CombinedOptimizer(chained, _States(chained))


def parts_of(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers: usually one, and two with experts or with Muon, or four with both."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


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
