"""Says which stage of each replica has which layers.

The layers are numbered over the whole model. The first has the embedding with it, and the last the output layer. A cut
gives each stage consecutive layers; a stage without layers is out of the pipeline. Nominally all replicas are cut
alike. A replica that has lost a stage is cut anew, so that its other stages have all layers.

A *segment* is a run of layers that no replica cuts: all of it is on one stage in each replica. Gradients are summed
segment by segment. If all replicas are cut nominally, the segments are the stages.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

type Cut = tuple[int, ...]
"""Where the layers of each stage begin, and how many layers there are: stage s has the layers cut[s] to cut[s + 1]."""


def cut_of(depths: tuple[int, ...]) -> Cut:
    """Return the cut into stages with so many layers."""
    return (0, *itertools.accumulate(depths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """The cuts of all replicas.

    Attributes:
        nominal: The cut of a replica that is not named in `moved`.
        moved: Replica -> its cut, where layers are on other stages than nominally.
    """

    nominal: Cut
    moved: Mapping[int, Cut]

    def cut(self, replica: int) -> Cut:
        """The cut of a replica."""
        return self.moved.get(replica, self.nominal)

    def stages(self, replica: int) -> tuple[int, ...]:
        """The stages that have layers, first to last."""
        cut = self.cut(replica)
        return tuple(stage for stage, (start, stop) in enumerate(itertools.pairwise(cut)) if start < stop)

    def depth(self, replica: int, stage: int) -> int:
        """How many layers a stage has."""
        cut = self.cut(replica)
        return cut[stage + 1] - cut[stage]

    @functools.cached_property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(first layer, the one after the last) of each segment."""
        bounds = {*self.nominal, *itertools.chain.from_iterable(self.moved.values())}
        return tuple(itertools.pairwise(sorted(bounds)))

    def stage_of(self, replica: int, segment: int) -> int:
        """The stage of a replica that has a segment."""
        first, cut = self.segments[segment][0], self.cut(replica)
        return next(stage for stage in self.stages(replica) if cut[stage] <= first < cut[stage + 1])

    def segments_of(self, replica: int, stage: int) -> tuple[int, ...]:
        """The segments that a stage of a replica has."""
        start, stop = self.cut(replica)[stage : stage + 2]
        return tuple(number for number, (first, _) in enumerate(self.segments) if start <= first < stop)
