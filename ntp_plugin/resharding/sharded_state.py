"""The user's parameters and optimizer state: `nn.Parameter`s get new data, the optimizer's state gets new entries.

The objects stay, their tensors change. Members do not switch to new tensors by themselves, so each tensor has a version
(`reshard.py` says why).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.resharding.rebuild import MAIN, WEIGHT, Entries, Options, SharedEntries
from ntp_plugin.resharding.reshard_plan import NOT_HELD, AvailableVersions
from ntp_plugin.training.optimizers import Numbers, element_wise, refuse_unknown_state


class ShardedState:
    """The parameters of this process and their optimizer state, each tensor in the layout of its version."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        mains: Mapping[str, torch.nn.Parameter] | None = None,
        joiner: bool = False,
    ) -> None:
        """`mains` are the higher-precision copies that the optimizer steps instead of some parameters."""
        self.parameters = dict(parameters)
        self._mains = dict(mains or {})
        self.have_optimizer(optimizer)
        self.versions = dict.fromkeys(self.parameters, NOT_HELD if joiner else 0)
        self._built: dict[str, tuple[int, Entries, Mapping[str, object]]] = {}
        self._lent: dict[str, torch.Tensor] = {}
        """The old weights of parameters that have been lent new ones, until the rest of these arrives."""

    def have_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer that steps the parameters from now on."""
        self.optimizer, self._known, self._numbers = optimizer, element_wise(optimizer), Numbers(optimizer)

    def have_parameters(self, parameters: Mapping[str, torch.nn.Parameter], version: int) -> None:
        """Set the parameters, where they are others from now on; their values come afterwards."""
        self.parameters = dict(parameters)
        self.versions = dict.fromkeys(self.parameters, version)

    def held(self, lost: Mapping[int, tuple[int, ...]]) -> AvailableVersions:
        """Return what this member reports before a recovery; `lost` are the losses behind the versions."""
        names = list(self.parameters)
        return AvailableVersions(
            versions=tuple(self.versions.values()),
            built=tuple((names.index(name), version) for name, (version, *_) in self._built.items()),
            lost=lost,
        )

    def entries(self, name: str) -> Entries:
        """The parameter, and what the optimizer keeps in its shape."""
        state = self._state(name)
        cut = {key: state[key] for key in self._known.cut if isinstance(state.get(key), torch.Tensor)}
        main = {MAIN: self._mains[name].data} if name in self._mains else {}
        return {WEIGHT: self.parameters[name].data} | main | cut

    def _stepped(self, name: str) -> torch.nn.Parameter:
        return self._mains.get(name, self.parameters[name])

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self._stepped(name), {})
        return state

    def kept(self, name: str) -> SharedEntries:
        """What is the same on all slots. Anything else that the optimizer keeps for a parameter is one number."""
        return SharedEntries(
            dtypes={key: entry.dtype for key, entry in self.entries(name).items()},
            numbers={key: _to_plain(value) for key, value in self._numbers.of(self._stepped(name)).items()},
        )

    def build(self, name: str, version: int, entries: Entries, numbers: Mapping[str, object]) -> None:
        """Keep the new entries of a tensor, and the numbers that the others' optimizers keep for it, until `switch`."""
        self._built[name] = version, entries, numbers

    def switch(self) -> None:
        """Put all built tensors into the user's objects, and release the old ones."""
        while self._built:
            name = next(iter(self._built))
            self._switch(name, *self._built[name])
            del self._built[name]

    def lend(self, name: str, weights: torch.Tensor) -> None:
        """Put new weights into a parameter before the rest of its entries arrives."""
        self._lent[name] = self.parameters[name].data
        self._have(name, weights)

    def _have(self, name: str, weights: torch.Tensor) -> None:
        parameter = self.parameters[name]
        if weights.shape != parameter.shape:
            parameter.grad = None
            # While a graph of the interrupted step is alive, in a traceback say, autograd remembers the old shape with
            # the parameter, and forgets it only for another dtype.
            parameter.data = torch.empty(0, dtype=torch.bfloat16 if parameter.dtype != torch.bfloat16 else torch.float)
        parameter.data = weights

    def _switch(self, name: str, version: int, entries: Entries, numbers: Mapping[str, object]) -> None:
        self._have(name, entries[WEIGHT])
        self._lent.pop(name, None)
        if MAIN in entries:
            self._mains[name].grad, self._mains[name].data = None, entries[MAIN]
        own: dict[str, object] = {key: value for key, value in entries.items() if key not in (WEIGHT, MAIN)}
        if own:
            self.optimizer.state[self._stepped(name)].update(own)
        if numbers != self.kept(name).numbers:
            self._numbers.put(self._stepped(name), {key: _from_plain(value) for key, value in numbers.items()})
        self.versions[name] = version

    def settle(self, newest: Mapping[str, int]) -> None:
        """After an interrupted move, switch to what any member has switched to, and drop what else was built or
        lent."""
        self._built = {name: built for name, built in self._built.items() if newest[name] == built[0]}
        self.switch()
        while self._lent:
            name = next(iter(self._lent))
            self._have(name, self._lent[name])
            del self._lent[name]

    @property
    def is_new(self) -> bool:
        """Whether no tensor has been held here yet."""
        return set(self.versions.values()) == {NOT_HELD}

    def options(self) -> Options:
        """The options of the optimizer's groups, such as a learning rate that a schedule has changed."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def take_options(self, options: Sequence[Mapping[str, object]]) -> None:
        """Set the groups' options to those of the others."""
        for group, wanted in zip(self.optimizer.param_groups, options, strict=True):
            group.update(wanted)

    def refuse_what_cannot_be_cut(self) -> None:
        """Raise unless all that the optimizer keeps is known."""
        for name in self.parameters:
            refuse_unknown_state(self._known, name, self._stepped(name), self._state(name))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Number:
    """A tensor of one number. Tensors are not sent as objects, because frameworks change how they are packed."""

    value: float
    dtype: torch.dtype
    device: str


def _to_plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _Number(value=value.item(), dtype=value.dtype, device=value.device.type)
    return value


def _from_plain(value: object) -> object:
    if isinstance(value, _Number):
        return torch.tensor(value.value, dtype=value.dtype, device=value.device)
    return value
