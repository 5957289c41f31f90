"""Options of Megatron that make a step faster, and that a degraded layout leaves out.

They change when something is computed or sent, and not what. So a job with one of them runs as it is until a slot is
lost, and goes on without it.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

_LOG = logging.getLogger(__name__)

IN_A_DEGRADED_LAYOUT: Mapping[str, str] = {
    "defer_embedding_wgrad_compute": "the last stage computes the gradient of its output layer at once",
    "overlap_param_gather_with_optimizer_step": "all parameters of a rank are sent after the whole step",
    "overlap_moe_expert_parallel_comm": "tokens are exchanged while no other micro-batch is computed",
    "tp_comm_overlap": "TransformerEngine's user buffers belong to the first TP groups, and are not made again",
}
"""Argument -> what happens without it."""
FOR_GOOD = frozenset({"tp_comm_overlap"})
"""These stay off after the first change of ranks, whatever the layout: a new process has no part in them."""


def flag_of(argument: str) -> str:
    """Return the flag of an argument."""
    return "--" + argument.replace("_", "-")


def wanted(given: Mapping[str, bool], *, degraded: bool) -> dict[str, bool]:
    """Return the value of each option in a layout that is not the first, from what the recipe gives."""
    return {name: on and not degraded and name not in FOR_GOOD for name, on in given.items()}


class SwitchedOff:
    """Sets these options in the arguments and configurations of a job, layout by layout."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._given = {name: bool(getattr(args, name, False)) for name in IN_A_DEGRADED_LAYOUT}
        self._reported: set[str] = set()

    def for_layout(self, configs: Iterable[Any] = (), *, degraded: bool, reports: bool) -> None:
        """Set the options for a layout after a change of ranks, or for a degraded start, before a model is built.

        Args:
            configs: The configurations of models that exist already.
            degraded: Whether a slot is lost in this layout.
            reports: Whether this rank logs what is left out.
        """
        values = wanted(self._given, degraded=degraded)
        left_out = {name for name, on in self._given.items() if on and not values[name]}
        for name in sorted(left_out - self._reported) if reports else ():
            _LOG.warning("%s is left out: %s", flag_of(name), IN_A_DEGRADED_LAYOUT[name])
        self._reported |= left_out
        for holder in (self._args, *configs):
            vars(holder).update({name: value for name, value in values.items() if hasattr(holder, name)})
