"""Replaces functions and attributes of a framework or of torch, each with a reason.

A `Replacement` names its target as `module:attribute`, gives the reason, and makes the new value from the old one. A
table of replacements is all that a mode changes; nothing is replaced anywhere else.

A patched upstream (`patches/`) may offer a function for the purpose. Then this function is called, and nothing is
replaced.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

type TakeBack = Callable[[], None]
"""Restores the value that was there before."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A function that only a patched upstream has, with the arguments to call it with."""

    function: str
    arguments: tuple[Any, ...]

    def take(self) -> bool:
        """Call the function, if the upstream has it; return whether it has."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name, None)
        if function is not None:
            function(*self.arguments)
        return function is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """The replacement of one attribute, such as `torch.cuda:is_available` or `megatron.core.x:Class.__init__`."""

    target: str
    why: str
    make: Callable[[Any], Any]
    offer: Offer | None = None

    def apply(self, *, offered: bool = True) -> TakeBack:
        """Replace the target, or call `offer`; return how to undo it. A target that does not exist is our error."""
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
    """Apply all replacements of a table, in its order.

    Args:
        table: The replacements.
        offered: Whether to call the functions of a patched upstream. Such a call cannot be undone; with False
            everything is replaced instead.

    Returns:
        A function that undoes the replacements.
    """
    done = [replacement.apply(offered=offered) for replacement in table]

    def take_back() -> None:
        for undo in reversed(done):
            undo()

    return take_back
