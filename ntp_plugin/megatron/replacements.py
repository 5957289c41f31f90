"""How something of Megatron's or torch's is replaced, with its reason.

A `Replacement` names its target as `module:attribute`, says why, and makes the new thing of the old one. A table of
them is all that a mode changes; nothing is replaced anywhere else.

Where a patched upstream offers a function to be told (`patches/`), it is told, and nothing is replaced.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A function that only a patched upstream has, and what it is to be told."""

    function: str
    told: tuple[Any, ...]

    def take(self) -> bool:
        """Whether it is there; it has been told then."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name, None)
        if function is not None:
            function(*self.told)
        return function is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One thing that is replaced: `torch.cuda:is_available`, `megatron.core.x:Class.__init__`."""

    target: str
    why: str
    make: Callable[[Any], Any]
    offer: Offer | None = None

    def apply(self) -> None:
        """Put the new thing in its place; a target that does not exist is an error of ours."""
        if self.offer is not None and self.offer.take():
            return
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        raw = vars(owner).get(name)
        made = self.make(getattr(owner, name))
        setattr(owner, name, staticmethod(made) if isinstance(raw, staticmethod) else made)


def apply_all(table: Iterable[Replacement]) -> None:
    """The whole table, in its order."""
    for replacement in table:
        replacement.apply()
