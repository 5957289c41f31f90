"""Where the units of a tensor lie in the part that a slot holds. PURE.

A part holds, run after run, the units of the slot in storage order. Units that move between slots are always in
ascending order, run after run, so both sides know their order without a description.
"""

import dataclasses

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Span, Spans
from ntp_plugin.planning.units import Run, Tensor

WHOLE_UNITS: Spans = ((0, 1),)
"""A replicated tensor is one unit that every slot holds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnitTransfer:
    """Units that go to, or come from, another slot."""

    peer: int
    units: Spans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recut:
    """One tensor on one slot: the units of its old and new part in storage order, and the units that move."""

    tensor: Tensor
    before: Spans
    after: Spans
    outgoing: tuple[UnitTransfer, ...] = ()
    incoming: tuple[UnitTransfer, ...] = ()


def runs_of(tensor: Tensor) -> tuple[Run, ...]:
    """The runs of a tensor; a replicated one is a single unit."""
    return tensor.runs if tensor.family else (Run(start=0, unit_size=tensor.shape[tensor.dim]),)


def local_size(tensor: Tensor, units: Spans) -> int:
    """The length along the cut dim of a part with these units."""
    return sp.size(units) * sum(run.unit_size for run in runs_of(tensor))


def local_ranges(tensor: Tensor, held: Spans, wanted: Spans) -> Spans:
    """The ranges of the `wanted` units (ascending) in a part that holds `held` (storage order), run after run."""
    found: list[Span] = []
    offset = 0
    for run in runs_of(tensor):
        places: list[tuple[Span, int]] = []  # per held run of units: the wanted part of it, and where that begins
        for start, stop in held:
            places += [
                (part, offset + (part[0] - start) * run.unit_size) for part in sp.intersection(wanted, ((start, stop),))
            ]
            offset += (stop - start) * run.unit_size
        found += [(at, at + (part[1] - part[0]) * run.unit_size) for part, at in sorted(places)]
    assert sum(stop - start for start, stop in found) == local_size(tensor, wanted), "a slot holds what is asked for"
    return sp.joined(found)


def global_ranges(tensor: Tensor, held: Spans) -> Spans:
    """The ranges along the cut dim of the full tensor that a part with these units holds, in its order."""
    return tensor.local_index(held) if tensor.family else ((0, tensor.shape[tensor.dim]),)


def local_shape(tensor: Tensor, held: Spans) -> tuple[int, ...]:
    """The shape of a part with these units."""
    return (*tensor.shape[: tensor.dim], local_size(tensor, held), *tensor.shape[tensor.dim + 1 :])
