"""One optimizer step that a death may interrupt anywhere, whatever the layout of the model.

The rank computes the loss of its samples one micro-batch after the other and sums the gradients; the sums are reduced;
the vote is taken; the optimizer is applied. Until the vote nothing is applied, so a death before it means: the step
again, with the lost samples dealt to the others. After it all who hold the reduced gradients apply.
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
    """The half of a `Trainer` that takes steps; who derives from it says what is reduced where, and how to recover."""

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
        """Called by all ranks together where the loss of a step is not finite, before anything is applied."""
        self._prepared, self._joiner = False, joiner
        self.loss = math.nan
        """The mean loss of the newest step whose gradients this rank has reduced."""

    @property
    @abc.abstractmethod
    def members(self) -> tuple[int, ...]:
        """The slots that train now."""

    @property
    def place(self) -> str:
        """Which part of the model this rank has; ranks with the same one have the same shapes."""
        return "all ranks"

    @abc.abstractmethod
    def my_samples(self) -> list[int]:
        """The samples of a step that this rank computes, by their numbers in the global batch."""

    @abc.abstractmethod
    def replicated_state(self) -> ReplicatedState:
        """What every replica has, with this rank's part of it."""

    @abc.abstractmethod
    def _reduce(self, total: torch.Tensor) -> float:
        """Sum all gradients, also those of a rank without samples, and the loss, over the global batch."""

    def step(self) -> float:
        """Compute, reduce, vote and apply the next step; returns its mean loss over the global batch."""
        total = self._accumulate(self.applied + 1, self.my_samples())
        told = self._reduce(total)
        self.loss = told / self._samples_per_step
        if not math.isfinite(told):
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
        """Nothing to say but that everybody is here: who leaves this knows that all hold the reduced gradients."""
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)

    def _apply(self) -> None:
        self.optimizer.step()
        self.applied, self._prepared = self.applied + 1, False


def _nothing() -> None:
    """There is nothing to compare."""


def samples_of(share: Share, micro_batch: int) -> list[int]:
    """The samples of a share, by their numbers in the global batch."""
    return [number * micro_batch + sample for number in share.numbers for sample in range(micro_batch)]
