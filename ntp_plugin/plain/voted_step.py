"""One optimizer step that the loss of a rank may interrupt anywhere, whatever the layout of the model.

The rank computes the loss of its samples one micro-batch after the other and sums the gradients. The sums are reduced,
all ranks vote, and each applies the optimizer. Nothing is applied before the vote, so after a loss before it the step
is taken again, with the lost samples dealt to the others. After the vote all ranks with the reduced gradients apply
them.
"""

import abc
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.planning.batch_split import Share
from ntp_plugin.recovery.replica_comparison import ReplicatedState

type Samples = Sequence[int]
type LossOfSamples = Callable[[int, Samples], torch.Tensor]
"""(step, sample numbers within the step's global batch) -> the sum of their losses."""


class VotedStep(abc.ABC):
    """The half of a `Trainer` that takes steps. A subclass defines how gradients are reduced, and how to recover."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOfSamples,
        *,
        groups: ElasticGroups,
        micro_batches: int,
        micro_batch: int,
        joiner: bool,
    ) -> None:
        self.model, self.optimizer, self._loss_of = model, optimizer, loss_of
        self._groups = groups
        self._micro_batch, self._samples_per_step = micro_batch, micro_batches * micro_batch
        self.applied = 0
        self.not_finite: Callable[[], None] = _nothing
        """Called by all ranks together if the loss of a step is not finite, before anything is applied."""
        self._prepared, self._joiner = False, joiner
        self.loss = math.nan
        """The mean loss of the newest step whose gradients this rank has reduced."""

    @property
    @abc.abstractmethod
    def members(self) -> tuple[int, ...]:
        """The slots that train now."""

    @property
    def place(self) -> str:
        """The part of the model that this rank holds. Ranks with the same part have tensors of the same shapes."""
        return "all ranks"

    @abc.abstractmethod
    def my_samples(self) -> list[int]:
        """Return the samples of a step that this rank computes, as numbers in the global batch."""

    @abc.abstractmethod
    def replicated_state(self) -> ReplicatedState:
        """Yield this rank's part of the state that every replica holds."""

    @abc.abstractmethod
    def _reduce(self, total: torch.Tensor) -> float:
        """Sum all gradients, also those of a rank without samples, and the loss, over the global batch."""

    def step(self) -> float:
        """Compute, reduce, vote and apply the next step; return its mean loss over the global batch."""
        total = self._accumulate(self.applied + 1, self.my_samples())
        loss = self._reduce(total)
        self.loss = loss / self._samples_per_step
        if not math.isfinite(loss):
            self.not_finite()
        for parameter in self.model.parameters():
            assert parameter.grad is not None, "every parameter was reduced"
            parameter.grad.div_(self._samples_per_step)
        self._groups.confirm()
        self._prepared = True
        self._vote()
        self._groups.confirm()
        self._apply()
        return self.loss

    def _accumulate(self, number: int, samples: list[int]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        size, total = self._micro_batch, torch.zeros((), dtype=torch.float64)
        for start in range(0, len(samples), size):
            loss = self._loss_of(number, samples[start : start + size])
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        return total

    def _vote(self) -> None:
        """Wait for all ranks: a rank that returns knows that all hold the reduced gradients. It transfers no value."""
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)

    def _apply(self) -> None:
        self.optimizer.step()
        self.applied, self._prepared = self.applied + 1, False


def _nothing() -> None:
    """Do nothing."""


def samples_of(share: Share, micro_batch: int) -> list[int]:
    """Return the samples of a share, as numbers in the global batch."""
    return [number * micro_batch + sample for number in share.numbers for sample in range(micro_batch)]
