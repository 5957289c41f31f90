"""Decides how the layers of a replica that has lost a stage lie over the stages it has left.

A function of the nominal cut and of what each layer costs on each stage, and of nothing that was before. A pipeline is
as slow as its slowest stage, so the cut with the fastest slowest stage is chosen (the other terms of a step's time, the
filling and draining, hardly depend on the cut). Of several such cuts the one is chosen that leaves most on the stages
where it nominally is, and of several of these the one that fills the first stages most. A stage that would only slow
the others down gets no layer.

Costs are whole numbers, so that all survivors find the same cut.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ntp_plugin.config.sections import Model, Parallel
from ntp_plugin.planning.layer_placement import Cut, LayerPlacement, cut_of
from ntp_plugin.planning.pace import stage_work
from ntp_plugin.planning.topology import Pattern, Slot, SurvivingReplicas, Topology
from ntp_plugin.planning.units import ModelUnits, transformer_units


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """The layers of a model, and their nominal cut.

    Attributes:
        units: One stage for each layer: the first with the embedding, the last with the output layer.
        depths: How many layers each stage nominally has.
        least_stages: A replica with fewer stages is dropped.
    """

    units: ModelUnits
    depths: tuple[int, ...]
    least_stages: int = 1

    def cost(self, tp: int, pattern: Pattern) -> tuple[int, ...]:
        """What each layer costs on a stage with that pattern: operations per token at its widest slot."""
        return tuple(math.ceil(stage_work(layer, tp, pattern)) for layer in self.units.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The parameters of each layer."""
        return tuple(layer.elements for layer in self.units.stages)


def layers_of(model: Model, parallel: Parallel, *, granule: int | None) -> Layers:
    """Return the layers of a described model."""
    units = transformer_units(model, tp=parallel.tp, pp=model.layers, granule=granule)
    return Layers(units=units, depths=parallel.depths(model.layers))


def place_layers(topology: Topology, lost: frozenset[Slot], min_tp_width: int, layers: Layers) -> LayerPlacement:
    """Return the cuts of all replicas after losses. A replica with too few stages left is not cut anew: it is
    dropped."""
    surviving = SurvivingReplicas(topology=topology, lost=lost, min_tp_width=min_tp_width)
    nominal, most = cut_of(layers.depths), topology.tp - surviving.narrowest
    moved: dict[int, Cut] = {}
    found: dict[tuple[Pattern | None, ...], Cut] = {}
    for replica in sorted(surviving.dropped):
        patterns = [surviving.pattern(replica, stage) for stage in range(topology.pp)]
        left = tuple(None if len(pattern) > most else pattern for pattern in patterns)
        if any(pattern is not None for pattern in left):
            if left not in found:
                found[left] = _cut(layers, topology.tp, nominal, left)
            moved[replica] = found[left]
    placement = LayerPlacement(nominal=nominal, moved=moved)
    enough = {replica: cut for replica, cut in moved.items() if len(placement.stages(replica)) >= layers.least_stages}
    return LayerPlacement(nominal=nominal, moved=enough)


def _cut(layers: Layers, tp: int, nominal: Cut, left: tuple[Pattern | None, ...]) -> Cut:
    of_pattern = {pattern: layers.cost(tp, pattern) for pattern in left if pattern is not None}
    costs = {stage: of_pattern[pattern] for stage, pattern in enumerate(left) if pattern is not None}
    return choose_cut(nominal, costs, layers.sizes)


def choose_cut(nominal: Cut, costs: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> Cut:
    """Return the best cut over some stages.

    Args:
        nominal: The cut over all stages.
        costs: Stage -> what each layer costs there, for the stages that are left.
        sizes: What it costs to move each layer.
    """
    stages = {
        stage: _Stage(
            sums=(0, *itertools.accumulate(costs[stage])), home=range(nominal[stage], nominal[stage + 1]), sizes=sizes
        )
        for stage in sorted(costs)
    }
    lowest, highest = 0, max(stage.sums[-1] for stage in stages.values())
    while lowest < highest:  # the least cost within which all layers have a place
        middle = (lowest + highest) // 2
        if _fits(stages.values(), middle):
            highest = middle
        else:
            lowest = middle + 1
    ends = dict(zip(stages, _keeping_most(stages.values(), lowest), strict=True))
    cut = [0]
    for stage in range(len(nominal) - 1):
        cut.append(ends.get(stage, cut[-1]))
    return tuple(cut)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A stage that is left.

    Attributes:
        sums: What the first layers of the model cost here, for any number of them.
        home: The layers that it nominally has.
        sizes: What it costs to move each layer.
    """

    sums: Sequence[int]
    home: range
    sizes: Sequence[int]

    def ends(self, start: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield where it may end if it begins with the layer `start` and costs no more than `most`, each with the sizes
        of the layers that move to it."""
        end, moved = start, 0
        while end < len(self.sizes) and self.sums[end + 1] - self.sums[start] <= most:
            yield end, moved
            moved += 0 if end in self.home else self.sizes[end]
            end += 1
        yield end, moved


def _fits(stages: Iterable[_Stage], most: int) -> bool:
    """Whether all layers have a place if no stage may cost more; each stage in turn takes as many as it can."""
    start, layers = 0, 0
    for stage in stages:
        layers = len(stage.sizes)
        *_, (start, _) = stage.ends(start, most)
    return start == layers


def _keeping_most(stages: Iterable[_Stage], most: int) -> tuple[int, ...]:
    """Return where each stage ends in the cut that moves least, of those in which no stage costs more than `most`."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    """Layers with a place -> the sizes that have moved, and the ends (negated: of equals, the fullest first stages)."""
    for stage in stages:
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (moved, ends) in best.items():
            for end, more in stage.ends(start, most):
                found = moved + more, (*ends, -end)
                if end not in reached or found < reached[end]:
                    reached[end] = found
        best = reached
    return tuple(-end for end in best[max(best)][1])
