"""Which elements of a tensor a process holds, and what two holders have in common.

However a framework shards, a few numbers describe what one process holds of a tensor: ranges of the full tensor along
the dim that is cut, concatenated and flattened, and of that the elements from `start` to `stop`. A slot's part has all
of these elements; a shard of it, or of what a lane packs, has others for its ends.

Shapes and places are those of the full tensor, so a reader of a copy needs to know nothing of its writer.
"""

import dataclasses
from collections.abc import Sequence

import torch

from ntp_plugin.copies.runs import Runs, runs_of
from ntp_plugin.planning.spans import Spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """Elements of one tensor. All slices with the same `whole` together are the full tensor, each element once."""

    tensor: str
    shape: tuple[int, ...]
    dim: int
    ranges: Spans
    start: int
    stop: int
    whole: str = ""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def runs(self) -> Runs:
        """Where they lie in the full tensor."""
        return runs_of(self.shape, self.dim, self.ranges, self.start, self.stop)


def read_slice(fields: Sequence[object]) -> TensorSlice:
    """Make a slice from the values of its fields, as JSON has them."""
    tensor, shape, dim, ranges, start, stop, whole = fields
    return TensorSlice(
        tensor=str(tensor),
        shape=tuple(shape),  # type: ignore[arg-type]
        dim=int(dim),  # type: ignore[call-overload]
        ranges=tuple((first, last) for first, last in ranges),  # type: ignore[attr-defined]
        start=int(start),  # type: ignore[call-overload]
        stop=int(stop),  # type: ignore[call-overload]
        whole=str(whole),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """What two parts have in common: for each run, where it begins in either part, and its length."""

    mine: torch.Tensor
    theirs: torch.Tensor
    lengths: torch.Tensor

    @property
    def size(self) -> int:
        return int(self.lengths.sum())


def common(mine: Runs, theirs: Runs) -> Common:
    """The common runs of two parts, in ascending order of the places in the full tensor."""
    my_starts, my_ends, my_offsets = _sorted(mine)
    their_starts, their_ends, their_offsets = _sorted(theirs)
    first = torch.searchsorted(their_ends, my_starts, right=True)
    counts = (torch.searchsorted(their_starts, my_ends) - first).clamp(min=0)
    me = torch.repeat_interleave(torch.arange(len(counts)), counts)
    them = torch.arange(len(me)) - (counts.cumsum(0) - counts)[me] + first[me]
    start = torch.maximum(my_starts[me], their_starts[them])
    lengths = torch.minimum(my_ends[me], their_ends[them]) - start
    return Common(
        mine=my_offsets[me] + start - my_starts[me],
        theirs=their_offsets[them] + start - their_starts[them],
        lengths=lengths,
    )


def _sorted(runs: Runs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = runs.starts.argsort()
    starts = runs.starts[order]
    return starts, starts + runs.lengths[order], runs.offsets[order]


def indices(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Every index of these runs, one after the other."""
    offsets = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - offsets, lengths)
