"""How something of a framework's or torch's is replaced, with its reason.

A `Replacement` names its target as `module:attribute`, says why, and makes the new thing of the old one. A table of
them is all that a mode changes; nothing is replaced anywhere else.

Where a patched upstream offers a function to be told (`patches/`), it is told, and nothing is replaced.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

type TakeBack = Callable[[], None]
"""Puts what was there before back in its place."""


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

    def apply(self, *, offered: bool = True) -> TakeBack:
        """Put the new thing in its place; a target that does not exist is an error of ours."""
        if offered and self.offer is not None and self.offer.take():
            return lambda: None
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        raw = vars(owner).get(name)
        made = self.make(getattr(owner, name))
        setattr(owner, name, staticmethod(made) if isinstance(raw, staticmethod) else made)
        return (
            functools.partial(setattr, owner, name, raw) if raw is not None else functools.partial(delattr, owner, name)
        )


def apply_all(table: Iterable[Replacement], *, offered: bool = True) -> TakeBack:
    """The whole table, in its order. What a patched upstream was told is not taken back: without `offered` it is told
    nothing, and all is replaced."""
    done = [replacement.apply(offered=offered) for replacement in table]

    def take_back() -> None:
        for undo in reversed(done):
            undo()

    return take_back
